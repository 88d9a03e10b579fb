"""Rules that say nothing about a model: most often a slip of the pen."""

from __future__ import annotations

from collections.abc import Sequence

import tvm

from layoutsearch.errors import SpaceError
from layoutsearch.layout.candidates import expand
from layoutsearch.layout.desired import Desired, nearest_word, unmatched_desired
from layoutsearch.layout.graph import LayoutGraph, OpNode
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.matching import channels_of
from layoutsearch.layout.space import Rule, SearchSpace

_CONV_KINDS = ("conv2d", "conv2d_pointwise", "conv2d_depthwise", "conv2d_grouped", "extern")


def unmatched_rules(space: SearchSpace, graph: LayoutGraph) -> list[str]:
    """A line for every rule that matches no operator of the model, with the nearest operator it has.

    Raises:
        SpaceError: a rule names an operator or a kind that TVM does not have, or blocks that divide nothing.
    """
    known = _operators()
    kinds = {name.rpartition(".")[2] for name in known} | set(_CONV_KINDS)
    decides = {name: rules[0] for name, rules in space.rules_for(graph).items() if rules}
    lines = []
    for rule in space.rules:
        hint = _hint(rule, graph)
        op, kind = str(rule.match.get("op", "")).removeprefix("relax."), str(rule.match.get("kind", ""))
        if op and op not in known:
            raise SpaceError(f"{space.source}: rule {rule.name!r}: TVM has no op {op!r}{hint}")
        if kind and kind not in kinds:
            raise SpaceError(f"{space.source}: rule {rule.name!r}: there is no kind {kind!r}{hint}")
        if not rule.matches(graph):
            lines.append(f"{space.source}: rule {rule.name!r} matches no op of the model{hint}")
        _check_blocks(rule, [o for o in graph.ops if decides.get(o.name) is rule], space)
    return lines


def unmatched_layouts(wanted: Sequence[Desired], graph: LayoutGraph) -> list[str]:
    """The same of what is wanted beside the space; see `layout.desired.unmatched_desired`."""
    return unmatched_desired(wanted, graph.ops, _operators())


def _operators() -> set[str]:
    return {str(name).removeprefix("relax.") for name in tvm.ir.Op.list_op_names()}


def _hint(rule: Rule, graph: LayoutGraph) -> str:
    """What the rule may have been meant for, by the first name that it gives."""
    present = {
        "op": [op.op.removeprefix("relax.") for op in graph.ops],
        "kind": [op.kind for op in graph.ops],
        "id": [op.id for op in graph.ops],
        "name": [op.name for op in graph.ops],
    }
    for key, words in present.items():
        near = nearest_word(str(rule.match.get(key, "")).removeprefix("relax."), words) if key in rule.match else ""
        if near:
            return f"; the nearest {'op' if key == 'op' else key} of the model is {near}"
    return ""


def _check_blocks(rule: Rule, ops: Sequence[OpNode], space: SearchSpace) -> None:
    """Blocks of a rule's own are meant for what it matches: refuse them where no operator can have any."""
    patterns = [p for p in rule.layouts if any(mark in p for mark in ("{b}", "{i}", "{o}"))]
    free = [op for op in ops if op.role is not Role.FROZEN]
    if rule.blocks is None or not patterns or not free:
        return
    expanded = [c for op in free for p in patterns for _, c in expand(op, p, rule.blocks, space.source)]
    if any(c.data.is_blocked or c.out.is_blocked for c in expanded):
        return
    counts = sorted({count for op in free for count in channels_of(op)})
    raise SpaceError(
        f"{space.source}: rule {rule.name!r}: none of its blocks {list(rule.blocks)} divides the channels of an op it "
        f"matches: {', '.join(map(str, counts))}"
    )
