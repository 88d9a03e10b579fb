"""Which operators become one kernel.

Fusion is decided here, by one rule that is applied to the canonical module (to know what a kernel costs) and to the
converted one (to build it), so that what was measured is what runs. A group is a *root* with the elementwise operators
that must follow it: an operator joins when it is the immediate post-dominator of the group's result, everything between
is elementwise and has the result's shape. Diamonds such as hard-swish therefore fuse whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layoutsearch.layout import kinds
from layoutsearch.layout.graph import LayoutGraph, TensorInfo

# Operators whose kernel computes a reduction or a gather, then an elementwise epilogue at the same tile.
ROOTS = kinds.CONVOLUTIONS | kinds.POOLS | kinds.MATMULS | kinds.REDUCTIONS | kinds.INJECTIVE


@dataclass(frozen=True)
class FusionOp:
    """An operator as fusion sees it.

    Attributes:
        name: bound variable.
        op: Relax operator, or another word for what is not a call of one.
        inputs: variables read, in any order.
        shape: shape of the result in memory, or by axis name: equal for results that one layout stores alike. None for
            tuples and unknown shapes.
        escapes: whether the result is an output of the function.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...] | None
    escapes: bool


def graph_groups(graph: LayoutGraph) -> list[tuple[str, ...]]:
    """The kernels of a canonical module, as they are in every module that stores a kernel's members in one layout.

    A view hands its operand on under other axes: what follows it reads, and fuses with, what is behind it.
    """
    escaping = {o.tensor for o in graph.outputs}
    made = {t.name: op.name for op in graph.ops for t in op.results}
    return fusion_groups(
        [
            FusionOp(
                name=op.name,
                op=op.op,
                inputs=tuple(made[o.tensor] for o in op.operands if o.tensor in made),
                shape=_named_shape(op.result) if len(op.results) == 1 else None,
                escapes=any(t.name in escaping for t in op.results),
            )
            for op in graph.ops
        ]
    )


def _named_shape(info: TensorInfo) -> tuple[int, ...] | None:
    """Extents in alphabetical order of their axes."""
    if info.shape is None:
        return None
    return tuple(extent for _, extent in sorted(zip(info.axes, info.shape, strict=True)))


def fusion_groups(ops: Sequence[FusionOp]) -> list[tuple[str, ...]]:
    """Partition of `ops` (in program order) into kernels, each in program order, sorted by first member.

    Convolutions choose first, so that a residual addition joins a convolution rather than what precedes the other
    operand; among convolutions the last one before the addition takes it.
    """
    by_name = {op.name: op for op in ops}
    order = {op.name: i for i, op in enumerate(ops)}
    users: dict[str, list[str]] = {op.name: [] for op in ops}
    for op in ops:
        for name in dict.fromkeys(op.inputs):
            if name in users:
                users[name].append(op.name)
    owner: dict[str, str] = {}
    heavy = kinds.CONVOLUTIONS | kinds.MATMULS
    roots = sorted((o for o in ops if o.op in heavy), key=lambda o: -order[o.name])
    roots += [o for o in ops if o.op not in heavy]
    for root in roots:
        if root.name in owner:
            continue
        members = _grow(root, by_name, users, order, owner) if root.op in ROOTS else [root.name]
        owner.update(dict.fromkeys(members, root.name))
    groups: dict[str, list[str]] = {}
    for op in ops:
        groups.setdefault(owner[op.name], []).append(op.name)
    return [tuple(members) for members in groups.values()]


def _grow(
    root: FusionOp,
    by_name: Mapping[str, FusionOp],
    users: Mapping[str, Sequence[str]],
    order: Mapping[str, int],
    owner: Mapping[str, str],
) -> list[str]:
    members = [root.name]
    last = root.name
    while not by_name[last].escapes and users[last]:
        region = _region(last, root.shape, by_name, users, order, owner)
        if region is None:
            break
        members += region
        last = region[-1]
    return members


def _region(
    start: str,
    shape: tuple[int, ...] | None,
    by_name: Mapping[str, FusionOp],
    users: Mapping[str, Sequence[str]],
    order: Mapping[str, int],
    owner: Mapping[str, str],
) -> list[str] | None:
    """Operators from `start` (excluded) to its immediate post-dominator (included), if all of them may join."""
    region: set[str] = set()
    frontier = set(users[start])
    while True:
        # In program order, the first of the frontier cannot depend on the others.
        name = min(frontier, key=lambda n: order[n])
        op = by_name[name]
        if name in owner or op.op not in kinds.ELEMENTWISE or op.shape is None or op.shape != shape:
            return None
        frontier.discard(name)
        region.add(name)
        if not frontier:
            return sorted(region, key=lambda n: order[n])
        if op.escapes or not users[name]:
            return None
        frontier.update(users[name])
