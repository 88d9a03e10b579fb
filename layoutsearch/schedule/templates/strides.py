"""How the accesses of a data-parallel stage move with its axes: the ground for choosing vector axes and tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import ir, tirx
from tvm.sym import Analyzer
from tvm_ffi import structural_walk

from layoutsearch.schedule import builder as b
from layoutsearch.schedule.anatomy import Stage, inline_loads
from layoutsearch.schedule.indexing import Expr


def split_domains(stage: Stage) -> list[Stage]:
    """One stage for every piece of a concatenation: `if_then_else(K <= v, X, Y)` is X over v >= K and Y over v < K.

    The pieces are plain copies; the condition would otherwise be tested for every element.
    """
    value = stage.value
    if not (isinstance(value, ir.Call) and isinstance(value.op, ir.Op) and str(value.op.name).endswith("if_then_else")):
        return [stage]
    test, then, other = value.args
    axis = next((i for i, (var, _) in enumerate(stage.spatial) if _is_at_least(test, var) is not None), None)
    if axis is None or stage.reduction:
        return [stage]
    var, extent = stage.spatial[axis]
    at = _is_at_least(test, var)
    if at is None or not 0 < at < extent:
        return [stage]
    low, high = tirx.Var(var.name, "int32"), tirx.Var(var.name, "int32")
    pieces = (
        _over(stage, axis, low, at, low, other),
        _over(stage, axis, high, extent - at, high + at, then),
    )
    return [piece for part in pieces for piece in split_domains(part)]


def _is_at_least(test: tirx.Expr, var: ir.Var) -> int | None:
    """K of `K <= var`."""
    if isinstance(test, tirx.LE) and isinstance(test.a, tirx.IntImm) and test.b.same_as(var):
        return int(test.a)
    if isinstance(test, tirx.GE) and isinstance(test.b, tirx.IntImm) and test.a.same_as(var):
        return int(test.b)
    return None


def _over(stage: Stage, axis: int, var: ir.Var, extent: int, at: Expr, value: tirx.Expr) -> Stage:
    analyzer = Analyzer()
    analyzer.bind(var, ir.Range(0, extent))
    moved = {stage.spatial[axis][0]: at}
    spatial = (*stage.spatial[:axis], (var, extent), *stage.spatial[axis + 1 :])
    return dataclasses.replace(
        stage,
        spatial=spatial,
        indices=tuple(analyzer.simplify(b.substitute(i, moved)) for i in stage.indices),
        value=_simplify_loads(b.substitute(value, moved), analyzer),
    )


def _simplify_loads(value: tirx.Expr, analyzer: Analyzer) -> tirx.Expr:
    """The value with the indices of its loads simplified."""
    buffers = {load.source for load in b.buffer_loads(value)}

    def again(buffer: tirx.Buffer, indices: list[tirx.Expr]) -> tirx.Expr:
        return b.load(buffer, *(analyzer.simplify(i) for i in indices))

    return inline_loads(value, {buffer: (lambda at, buffer=buffer: again(buffer, at)) for buffer in buffers})


def split_blocks(stage: Stage) -> Stage:
    """The stage with every axis c that is only read as c // f and c % f split in two, so that all accesses are affine.

    Before: out[n, c, h, w] = in[n, c // 16, h, w, c % 16]. After: axes n, co, ci, h, w with c = co * 16 + ci. An axis
    may be part of the channel itself: (c * 16 + v) // 32 splits c by 2.
    """
    factors: dict[ir.Var, set[int]] = {}

    def visit(node: tirx.FloorDiv | tirx.FloorMod) -> None:
        if isinstance(node.b, tirx.IntImm):
            var, step = _blocks_of(node.a)
            if var is not None and int(node.b) % step == 0:
                factors.setdefault(var, set()).add(int(node.b) // step)

    structural_walk(stage.value, ((tirx.FloorDiv, tirx.FloorMod), visit))
    axes: list[tuple[ir.Var, int]] = []
    moved: dict[ir.Var, Expr] = {}
    analyzer = Analyzer()
    for var, extent in stage.spatial:
        wanted = factors.get(var, set())
        factor = next(iter(wanted)) if len(wanted) == 1 else 1
        if 1 < factor < extent and extent % factor == 0:
            outer, inner = tirx.Var(var.name, "int32"), tirx.Var(f"{var.name}_in", "int32")
            analyzer.bind(outer, ir.Range(0, extent // factor))
            analyzer.bind(inner, ir.Range(0, factor))
            axes += [(outer, extent // factor), (inner, factor)]
            moved[var] = outer * factor + inner
        else:
            analyzer.bind(var, ir.Range(0, extent))
            axes.append((var, extent))
    if not factors:
        return stage
    return dataclasses.replace(
        stage,
        spatial=tuple(axes),
        indices=tuple(b.substitute(i, moved) for i in stage.indices),
        value=_simplify_loads(b.substitute(stage.value, moved), analyzer),
    )


def _blocks_of(channel: tirx.Expr) -> tuple[ir.Var | None, int]:
    """(c, 1) of c, (c, f) of c * f + v; (None, 1) of anything else."""
    if isinstance(channel, ir.Var):
        return channel, 1
    if isinstance(channel, tirx.Add) and isinstance(channel.a, tirx.Mul) and isinstance(channel.b, ir.Var):
        var, step = channel.a.a, channel.a.b
        if isinstance(var, ir.Var) and isinstance(step, tirx.IntImm):
            return var, int(step)
    return None, 1


@dataclass(frozen=True)
class Strides:
    """Elements each access moves when an axis (the data-parallel ones first, then the reduction) advances by one.

    Attributes:
        store: By axis, for the stored buffer.
        loads: By axis, for every load.
    """

    store: tuple[int, ...]
    loads: tuple[tuple[int, ...], ...]

    @property
    def accesses(self) -> tuple[tuple[int, ...], ...]:
        """All of them, the store first."""
        return (self.store, *self.loads)


def strides(stage: Stage) -> Strides | None:
    """The strides of a stage; None where an access is not affine in its axes."""
    axes = [var for var, _ in (*stage.spatial, *stage.reduction)]
    analyzer = Analyzer()
    for var, extent in (*stage.spatial, *stage.reduction):
        analyzer.bind(var, ir.Range(0, extent))
    store = _of_access(list(stage.indices), stage.buffer, axes, analyzer)
    loads = [_of_access(list(load.indices), load.source, axes, analyzer) for load in stage.loads]
    if store is None or any(load is None for load in loads):
        return None
    return Strides(store, tuple(load for load in loads if load is not None))


def _of_access(
    indices: Sequence[tirx.Expr], buffer: tirx.Buffer, axes: Sequence[ir.Var], analyzer: Analyzer
) -> tuple[int, ...] | None:
    steps: dict[int, int] = dict.fromkeys(range(len(axes)), 0)
    weight = 1
    for index, extent in zip(reversed(list(indices)), reversed([int(s) for s in buffer.shape]), strict=True):
        if not isinstance(index, tirx.IntImm):
            for number, axis in enumerate(axes):
                if index.same_as(axis):
                    steps[number] += weight
                elif not isinstance(index, ir.Var) and b.uses_any(index, [axis]):
                    moved = analyzer.simplify(b.substitute(index, {axis: axis + 1}) - index)
                    if not isinstance(moved, tirx.IntImm):
                        return None
                    steps[number] += int(moved) * weight
        weight *= extent
    return tuple(steps[i] for i in range(len(axes)))


def pinned_axes(stage: Stage) -> list[int]:
    """Axes (data-parallel, then reduction) that the value uses outside the indices of its loads, as in a condition."""
    buffers = {load.source for load in stage.loads} | {stage.buffer}
    bare = inline_loads(stage.value, {buffer: (lambda _, buffer=buffer: _zero(buffer)) for buffer in buffers})
    return [i for i, (var, _) in enumerate((*stage.spatial, *stage.reduction)) if b.uses_any(bare, [var])]


def _zero(buffer: tirx.Buffer) -> tirx.Expr:
    return b.const(0, str(buffer.dtype))
