"""Why an operator does not have the candidates that it does not have, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from layoutsearch.layout.candidates import OpSpace, expand, why_not
from layoutsearch.layout.graph import OpNode
from layoutsearch.layout.matching import channels_of
from layoutsearch.layout.space import Rule, SearchSpace


def outside(op: OpNode, found: OpSpace, rules: Sequence[Rule], space: SearchSpace) -> dict[str, str]:
    """What else the search space knows for operators like `op`, each with the reason why it is out.

    Args:
        op: the operator.
        found: its candidates.
        rules: those that match it; the first decides.
        space: the search space.
    """
    rule = rules[0]
    reasons = dict(found.refused)
    has = {str(candidate) for candidate in found.candidates}
    for text, reason in _undivided(op, rule.layouts, rule.blocks or space.blocks):
        reasons.setdefault(text, reason)
    for other in space.rules:
        if other is rule or not _about(other, op):
            continue
        for pattern in (p for p in other.layouts if p not in rule.layouts):
            for _, candidate in expand(op, pattern, other.blocks or space.blocks, space.source):
                text = str(candidate)
                if text not in has:
                    why = f"pinned by {rule}" if rule.pin else f"{rule} does not list it"
                    reasons.setdefault(text, why_not(op, candidate) or why)
    return reasons


def _about(rule: Rule, op: OpNode) -> bool:
    """Whether a rule is about operators like `op`, whatever their geometry."""
    wanted = str(rule.match.get("op", op.op)).removeprefix("relax.")
    return wanted == op.op.removeprefix("relax.") and rule.match.get("kind", op.kind) == op.kind


def _undivided(op: OpNode, patterns: Sequence[str], blocks: Sequence[int]) -> Iterator[tuple[str, str]]:
    inputs, outputs = channels_of(op)
    sides = {"b": ((inputs, "channels"), (outputs, "channels")), "i": ((inputs, "input channels"),)}
    sides["o"] = ((outputs, "output channels"),)
    for pattern in patterns:
        for letter, counts in sides.items():
            mark = f"{{{letter}}}"
            for block in blocks if mark in pattern else ():
                for count, what in counts:
                    if count % block:
                        yield pattern.replace(mark, str(block)), f"block {block} does not divide {count} {what}"
                        break
