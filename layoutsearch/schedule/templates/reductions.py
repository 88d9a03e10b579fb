"""Reductions with their accumulators in registers.

Vectors run over a data-parallel axis where the loads are dense along it (a pool of a packed tensor), else along the
reduction itself, with partial results in the lanes (a mean over H and W in NCHW). A pointwise stage that reads the
result in place (the division of an average) is computed before the store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property

from tvm import ir, tirx

from layoutsearch.schedule import builder as b
from layoutsearch.schedule.anatomy import Stage, inline_loads, value_at
from layoutsearch.schedule.indexing import Expr
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.templates.maps import SMALL
from layoutsearch.schedule.templates.strides import pinned_axes, strides

Axes = Sequence[tuple[ir.Var, int]]
Values = dict[ir.Var, Expr]
_VECTORS = 4
"""Independent accumulators: enough to cover the latency of an addition."""


class Reduction:
    """Emits one reduction stage, with the pointwise stage behind it where there is one."""

    def __init__(self, stage: Stage, finish: Stage | None, target: TargetInfo) -> None:
        self.stage = stage
        self.finish = finish
        self.target = target
        self.dtype = str(stage.buffer.dtype)

    def emit(self) -> tirx.Stmt:
        """The loop nest, along whichever axis the loads are dense in."""
        stage = self.stage
        last = next((i for i in range(len(stage.spatial) - 1, -1, -1) if stage.spatial[i][1] > 1), None)
        if last is not None and self._dense(last):
            return self._over_spatial(last)
        inner = self._dense_reduction()
        if inner is not None:
            return self._along_reduction(inner)
        return self._scalar() if last is None else self._over_spatial(last)

    @cached_property
    def _moves(self) -> tuple[tuple[int, ...], ...] | None:
        """Strides of the loads by axis, data-parallel ones first; None where one is not affine."""
        moves = strides(self.stage)
        return None if moves is None else moves.loads

    def _dense(self, axis: int) -> bool:
        """Whether every load is contiguous or constant along the axis, and one of them contiguous."""
        if self._moves is None:
            return False
        steps = [load[axis] for load in self._moves]
        return 1 in steps and set(steps) <= {0, 1}

    def _dense_reduction(self) -> Axes | None:
        """Reduction axes, outermost first, that are one contiguous run of at least four elements."""
        parallel_axes = len(self.stage.spatial)
        if self._moves is None or self._combiner is None:
            return None
        axes = range(parallel_axes, parallel_axes + len(self.stage.reduction))
        extents = {i: self.stage.reduction[i - parallel_axes][1] for i in axes}
        pinned = pinned_axes(self.stage)
        for axis in axes:
            if extents[axis] == 1 or not self._dense(axis):
                continue
            run = [axis]
            while True:
                size = math.prod(extents[i] for i in run)
                rest = [i for i in axes if i not in run and extents[i] > 1 and not {i, axis} & set(pinned)]
                outer = next((i for i in rest if all(m[i] == m[axis] * size for m in self._moves)), None)
                if outer is None:
                    break
                run.insert(0, outer)
            if math.prod(extents[i] for i in run) >= 4:
                return [self.stage.reduction[i - parallel_axes] for i in run]
        return None

    @cached_property
    def _combiner(self) -> Callable[[tirx.Expr, tirx.Expr], tirx.Expr] | None:
        value = self.stage.value
        if isinstance(value, tirx.Add):
            return lambda x, y: x + y
        if isinstance(value, tirx.Max):
            return tirx.max
        return tirx.min if isinstance(value, tirx.Min) else None

    def _update(self, values: Values, acc: tirx.Buffer, index: Expr) -> tirx.Stmt:
        value = b.substitute(self.stage.value, values)
        value = inline_loads(value, {self.stage.buffer: lambda _: b.load(acc, index)})
        return b.store(acc, value, index)

    def _init(self, values: Values, acc: tirx.Buffer, index: Expr) -> tirx.Stmt:
        return b.store(acc, b.substitute(self.stage.init, values), index)

    def _store(self, values: Values, value: tirx.Expr) -> tirx.Stmt:
        indices = [b.substitute(i, values) for i in self.stage.indices]
        if self.finish is None:
            return b.store(self.stage.buffer, value, *indices)
        final = inline_loads(value_at(self.finish, indices), {self.stage.buffer: lambda _: value})
        return b.store(self.finish.buffer, final, *indices)

    def _nest(self, axes: Axes, body: Callable[[Values], tirx.Stmt], values: Values) -> tirx.Stmt:
        if not axes:
            return body(values)
        (var, extent), *rest = axes
        return b.loop(var.name, extent, lambda i: self._nest(rest, body, {**values, var: i}))

    def _tasks(self, axes: Axes, parts: int, body: Callable[[Values, Expr], tirx.Stmt]) -> tirx.Stmt:
        """body(values of the axes, part) in parallel over the axes and the parts."""
        extents = [*(e for _, e in axes), parts]
        work = math.prod(e for _, e in (*self.stage.spatial, *self.stage.reduction))

        def task(index: Expr) -> tirx.Stmt:
            *at, part = b.unravel(index, extents)
            return body(dict(zip((v for v, _ in axes), at, strict=True)), part)

        return b.parallel("task", math.prod(extents), task, self.target.threads > 1 and work > SMALL)

    def _over_spatial(self, axis: int) -> tirx.Stmt:
        """Vectors of results along one data-parallel axis."""
        stage, lanes = self.stage, self.target.lanes
        var, extent = stage.spatial[axis]
        outer = [pair for i, pair in enumerate(stage.spatial) if i != axis]

        def strip(values: Values, start: Expr, size: int) -> tirx.Stmt:
            acc, width = b.registers("acc", size, self.dtype), min(size, lanes)

            def each(body: b.Body) -> tirx.Stmt:
                return b.unrolled("u", size // width, lambda u: b.vectorized("v", width, lambda v: body(u * width + v)))

            def at(i: Expr) -> Values:
                return {**values, var: start + i}

            def update(r: Values) -> tirx.Stmt:
                return each(lambda i: self._update({**at(i), **r}, acc, i))

            return b.seq(
                [
                    b.allocate(acc),
                    each(lambda i: self._init(at(i), acc, i)),
                    self._nest(stage.reduction, update, {}),
                    each(lambda i: self._store(at(i), b.load(acc, i))),
                ]
            )

        # Few other iterations: every vector of the axis is a task, else a task takes the whole axis.
        few = math.prod(e for _, e in outer) < 2 * self.target.threads
        tile = lanes if few else _VECTORS * lanes
        whole, rest = divmod(extent, tile)
        if few and whole > 1 and not rest:
            return self._tasks(outer, whole, lambda values, part: strip(values, part * tile, tile))

        def row(values: Values, _: Expr) -> tirx.Stmt:
            out = [b.loop("strip", whole, lambda i: strip(values, i * tile, tile))] if whole else []
            done, left = whole * tile, rest
            while left:
                piece = left // lanes * lanes or 1 << (left.bit_length() - 1)
                out.append(strip(values, done, piece))
                done, left = done + piece, left - piece
            return b.seq(out)

        return self._tasks(outer, 1, row)

    def _scalar(self) -> tirx.Stmt:
        """One result over a reduction that no vector fits."""
        acc = b.registers("acc", 1, self.dtype)
        values: Values = {var: 0 for var, _ in self.stage.spatial}
        return b.seq(
            [
                b.allocate(acc),
                self._init(values, acc, 0),
                self._nest(self.stage.reduction, lambda r: self._update({**values, **r}, acc, 0), {}),
                self._store(values, b.load(acc, 0)),
            ]
        )

    def _along_reduction(self, inner: Axes) -> tirx.Stmt:
        """Partial results in vector lanes along the contiguous part of the reduction, combined at the end."""
        stage, combine = self.stage, self._combiner
        assert combine is not None
        run = math.prod(e for _, e in inner)
        outer = [pair for pair in stage.reduction if pair not in inner]
        lanes = min(self.target.lanes, 1 << (run.bit_length() - 1))
        vectors = min(_VECTORS, run // lanes)
        step = lanes * vectors

        def row(values: Values, _: Expr) -> tirx.Stmt:
            acc, total = b.registers("acc", step, self.dtype), b.registers("total", 1, self.dtype)

            def at(flat: Expr) -> Values:
                # The run is contiguous for every load: its innermost axis may take the whole position.
                return {**{v: 0 for v, _ in inner}, inner[-1][0]: flat}

            def each(body: b.Body) -> tirx.Stmt:
                return b.unrolled("u", vectors, lambda u: b.vectorized("v", lanes, lambda v: body(u * lanes + v)))

            def along(r: Values) -> tirx.Stmt:
                def update(start: Expr, lane: Expr) -> tirx.Stmt:
                    return self._update({**values, **r, **at(start + lane)}, acc, lane)

                whole, left = divmod(run, step)
                parts = [b.loop("i", whole, lambda i: each(lambda j: update(i * step, j)))]
                done = whole * step
                while left:
                    piece = lanes if left >= lanes else 1 << (left.bit_length() - 1)
                    parts.append(_lanes(piece, done, update))
                    done, left = done + piece, left - piece
                return b.seq(parts)

            def fold(j: Expr) -> tirx.Stmt:
                return b.store(total, combine(b.load(total, 0), b.load(acc, j)), 0)

            return b.seq(
                [
                    b.allocate(acc),
                    b.allocate(total),
                    # The initial value is neutral for sum, max and min, so every lane may start from it.
                    each(lambda j: self._init(values, acc, j)),
                    self._nest(outer, along, {}),
                    b.store(total, b.load(acc, 0), 0),
                    b.unrolled("j", step - 1, fold, start=1),
                    self._store(values, b.load(total, 0)),
                ]
            )

        return self._tasks(stage.spatial, 1, row)


def _lanes(width: int, start: int, body: Callable[[Expr, Expr], tirx.Stmt]) -> tirx.Stmt:
    return b.vectorized("v", width, lambda v: body(start, v))
