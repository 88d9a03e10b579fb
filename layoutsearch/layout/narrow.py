"""Candidates of a model narrowed to the layouts that are wanted beside its search space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from layoutsearch.errors import SpaceError
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.candidates import OpSpace, expand, forbidden, why_not
from layoutsearch.layout.desired import DEFAULT, Desired, most_specific
from layoutsearch.layout.graph import LayoutGraph, OpNode
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.matching import channels_of
from layoutsearch.layout.rules import initial_candidate, why_illegal
from layoutsearch.layout.space import Rule, SearchSpace


def narrow(
    graph: LayoutGraph, space: SearchSpace, spaces: Mapping[str, OpSpace], wanted: Sequence[Desired]
) -> dict[str, OpSpace]:
    """The candidates of `spaces` that are as `wanted`, and what is wanted and not among them.

    Raises:
        SpaceError: no legal candidate is as wanted, or that contradicts a rule of the space, or another wish; the
            message names both and the operator.
    """
    if not wanted:
        return dict(spaces)
    rules = space.rules_for(graph)
    found = dict(spaces)
    for op in graph.ops:
        desired = most_specific(op, wanted)
        if desired is None:
            continue
        if op.role is not Role.FROZEN:
            found[op.name] = _narrowed(op, spaces[op.name], rules[op.name][0], desired, space)
        elif desired.key != DEFAULT:
            _check_frozen(op, desired)
    return _followed(graph, space, found)


def _narrowed(op: OpNode, free: OpSpace, rule: Rule, desired: Desired, space: SearchSpace) -> OpSpace:
    blocks = rule.blocks or space.blocks
    kept = [c for c in free.candidates if desired.admits(c)]
    has = {(c.data, c.out) for c in kept}
    banned = set(forbidden(op, rule, blocks, space.source))
    reasons: dict[str, str] = {}
    for pattern in desired.patterns:
        for text, wish in expand(op, pattern, blocks, str(desired)):
            # What the space offers between two layouts is better than what follows from them alone.
            if wish in kept or (not set(":@") & set(pattern) and (wish.data, wish.out) in has):
                continue
            if rule.pin:
                reason: str | None = f"{rule} of {space.source} pins {free.candidates[0]}; leave one away"
            else:
                reason = f"forbidden by {rule} of {space.source}" if wish in banned else why_not(op, wish)
            if reason is None:
                kept.append(wish)
            else:
                reasons[text] = reason
    if not kept:
        why = "; ".join(f"{text}: {reason}" for text, reason in list(reasons.items())[:3])
        why = why or f"none of the blocks {list(blocks)} divides its channels {channels_of(op)}"
        raise SpaceError(f"{desired}: no candidate of {op.id} ({op.name}) is so: {why}")
    away = tuple((str(c), f"pinned by {desired}") for c in free.candidates if c not in kept)
    return replace(free, candidates=tuple(kept), refused=(*free.refused, *away), pinned=str(desired))


def _check_frozen(op: OpNode, desired: Desired) -> None:
    """What cannot be changed may happen to be as it is wanted."""
    has = initial_candidate(op)
    if (str(has.data), str(has.out)) not in desired.sides:
        raise SpaceError(f"{desired}: no candidate of {op.id} ({op.name}) is so: {why_illegal(op, has)}")


def _followed(graph: LayoutGraph, space: SearchSpace, spaces: Mapping[str, OpSpace]) -> dict[str, OpSpace]:
    """Flexible operators may also run in the layouts that others are pinned to, so that their kernels stay whole."""
    pinned = [c for found in spaces.values() if found.pinned for c in found.candidates]
    layouts = dict.fromkeys(layout for c in pinned for layout in (c.data, c.out))
    rules = space.rules_for(graph)
    found = dict(spaces)
    for op in graph.ops:
        if op.role is not Role.FLEXIBLE or spaces[op.name].pinned:
            continue
        rule, has = rules[op.name][0], spaces[op.name].candidates
        banned = forbidden(op, rule, rule.blocks or space.blocks, space.source)
        more = [c for c in map(Candidate.uniform, layouts) if c not in has and c not in banned]
        found[op.name] = replace(spaces[op.name], candidates=(*has, *(c for c in more if why_illegal(op, c) is None)))
    return found
