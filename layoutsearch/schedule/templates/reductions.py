"""Reductions with their accumulators in registers.

Vectors run over a data-parallel axis where the loads are dense along it (a pool of a packed tensor), else along the
reduction itself, with partial results in the lanes (a mean over H and W in NCHW). Several results, or several parts of
one, are computed beside each other, so that none waits for the addition before it. A pointwise stage that reads the
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
from layoutsearch.schedule.templates.conditions import Conditions
from layoutsearch.schedule.templates.maps import SMALL
from layoutsearch.schedule.templates.strides import pinned_axes, strides

Axes = Sequence[tuple[ir.Var, int]]
Values = dict[ir.Var, Expr]
_VECTORS = 4
"""Vectors of a strip; twice as many independent additions cover the latency of one."""
_SHORT = 8
"""Columns of a window up to which it is unrolled."""


class Reduction:
    """Emits one reduction stage, with the pointwise stage behind it where there is one."""

    def __init__(self, stage: Stage, finish: Stage | None, target: TargetInfo) -> None:
        self.stage = stage
        self.finish = finish
        self.target = target
        self.dtype = str(stage.buffer.dtype)
        self._conditions = Conditions(stage)

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
    def _work(self) -> int:
        return math.prod(e for _, e in (*self.stage.spatial, *self.stage.reduction))

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

    def _update(self, values: Values, acc: tirx.Buffer, index: Expr, value: tirx.Expr | None = None) -> tirx.Stmt:
        value = b.substitute(self.stage.value if value is None else value, values)
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

        def task(index: Expr) -> tirx.Stmt:
            *at, part = b.unravel(index, extents)
            return body(dict(zip((v for v, _ in axes), at, strict=True)), part)

        return b.parallel("task", math.prod(extents), task, self.target.threads > 1 and self._work > SMALL)

    def _over_spatial(self, axis: int) -> tirx.Stmt:
        """Vectors of results along one data-parallel axis, of several neighbours along another where it has registers.

        Those neighbours, most often the columns of a pool, share what their windows have in common.
        """
        stage, lanes = self.stage, self.target.lanes
        extent = stage.spatial[axis][1]
        column = self._column_axis(axis)
        outer = [pair for i, pair in enumerate(stage.spatial) if i not in (axis, column)]
        count = math.prod(e for _, e in outer)

        def cut(values: Values, start: Expr, size: int) -> tirx.Stmt:
            """A run of the axis that is whole vectors, then ever narrower ones."""
            out, done = [], 0
            while done < size:
                left = size - done
                piece = left // lanes * lanes or 1 << (left.bit_length() - 1)
                out.append(self._columns(values, axis, column, start + done, piece))
                done += piece
            return b.seq(out)

        # Few other iterations: strips of the axis are tasks, else a task takes the whole axis.
        few = count < 4 * self.target.threads and self._work > 8 * SMALL
        vectors = self._even_vectors(count, extent // lanes) if few else _VECTORS
        tile = vectors * lanes
        whole, rest = divmod(extent, tile)
        if few and whole + (rest > 0) > 1:

            def part(values: Values, index: Expr) -> tirx.Stmt:
                full = cut(values, index * tile, tile)
                return full if not rest else tirx.IfThenElse(index < whole, full, cut(values, whole * tile, rest))

            return self._tasks(outer, whole + (rest > 0), part)

        def row(values: Values, _: Expr) -> tirx.Stmt:
            strips = [b.loop("strip", whole, lambda i: cut(values, i * tile, tile))] if whole else []
            return b.seq([*strips, cut(values, whole * tile, rest)] if rest else strips)

        return self._tasks(outer, 1, row)

    def _even_vectors(self, count: int, vectors: int) -> int:
        """Vectors of a task, so that the threads have the same to do; many, as neighbours in memory come together."""
        threads = self.target.threads

        def longest(each: int) -> int:
            return -(-count * -(-vectors // each) // threads) * each

        return min(range(1, 2 * _VECTORS + 1), key=lambda each: (longest(each), -each))

    def _column_axis(self, axis: int) -> int | None:
        """The data-parallel axis to tile besides the one of the vectors, where that leaves the threads enough tasks."""
        spatial, lanes = self.stage.spatial, self.target.lanes
        axes = [i for i, (_, e) in enumerate(spatial) if i != axis and e > 1]
        if not axes or self._moves is None:
            return None
        strips = -(-spatial[axis][1] // (_VECTORS * lanes))
        tasks = math.prod(spatial[i][1] for i in axes[:-1]) * strips
        return axes[-1] if tasks >= 4 * self.target.threads else None

    def _columns(self, values: Values, axis: int, column: int | None, start: Expr, size: int) -> tirx.Stmt:
        """All columns of a strip: those whose windows reach into the padding one by one, the others by tiles."""
        if column is None:
            return self._strip(values, axis, start, size, None, 0, 1)
        extent = self.stage.spatial[column][1]
        low, high = self._conditions.inside(column)
        count = max(1, min(high - low, self.target.registers // 4 // -(-size // self.target.lanes)))
        tiles = (high - low) // count

        def one(i: Expr) -> tirx.Stmt:
            return self._strip(values, axis, start, size, column, i, 1)

        def inside(i: Expr, width: int = count) -> tirx.Stmt:
            return self._strip(values, axis, start, size, column, i, width, inside=True)

        done = low + tiles * count
        return b.seq(
            [
                b.loop("x", low, one),
                b.loop("x", tiles, lambda i: inside(i * count + low)),
                *([inside(done, high - done)] if done < high else []),
                b.loop("x", extent - high, one, start=high),
            ]
        )

    def _strip(
        self,
        values: Values,
        axis: int,
        start: Expr,
        size: int,
        column: int | None,
        first: Expr,
        count: int,
        inside: bool = False,
    ) -> tirx.Stmt:
        """`size` results along the axis, for `count` columns from `first`, all in registers."""
        stage, width = self.stage, min(size, self.target.lanes)
        parts = self._parts(count * -(-size // self.target.lanes))
        acc = b.registers("acc", parts * count * size, self.dtype)
        value = self._conditions.bare(column) if inside and column is not None else stage.value

        def each(body: Callable[[Expr, Values], tirx.Stmt]) -> tirx.Stmt:
            def at(x: Expr, i: Expr) -> tirx.Stmt:
                here = {**values, stage.spatial[axis][0]: start + i}
                if column is not None:
                    here[stage.spatial[column][0]] = first + x
                return body(x * size + i, here)

            return b.unrolled(
                "x",
                count,
                lambda x: b.unrolled(
                    "u", size // width, lambda u: b.vectorized("v", width, lambda v: at(x, u * width + v))
                ),
            )

        def update(r: Values, part: Expr) -> tirx.Stmt:
            return each(lambda i, at: self._update({**at, **r}, acc, part * (count * size) + i, value))

        *others, (inner, extent) = stage.reduction
        groups, left = divmod(extent, parts)

        def along(r: Values) -> tirx.Stmt:
            # Unrolled, so that what the windows of neighbours share is loaded once.
            kind = b.unrolled if count > 1 and extent <= _SHORT else b.loop
            if parts == 1:
                return kind(inner.name, extent, lambda i: update({**r, inner: i}, 0))
            return b.seq(
                [
                    b.loop(
                        inner.name,
                        groups,
                        lambda g: b.unrolled("part", parts, lambda p: update({**r, inner: g * parts + p}, p)),
                    ),
                    b.unrolled("part", left, lambda p: update({**r, inner: p + groups * parts}, p)),
                ]
            )

        def merge(part: Expr) -> tirx.Stmt:
            assert self._combiner is not None
            combine = self._combiner
            return each(lambda i, _: b.store(acc, combine(b.load(acc, i), b.load(acc, part * (count * size) + i)), i))

        return b.seq(
            [
                b.allocate(acc),
                # The initial value is neutral for sum, max and min, so every part may start from it.
                b.unrolled(
                    "part",
                    parts,
                    lambda p: each(lambda i, at: self._init(at, acc, p * (count * size) + i)),
                ),
                self._nest(others, along, {}),
                b.unrolled("part", parts - 1, merge, start=1),
                each(lambda i, at: self._store(at, b.load(acc, i))),
            ]
        )

    def _parts(self, vectors: int) -> int:
        """Partial results of each vector, where there are too few vectors to cover the latency of an addition."""
        if self._combiner is None:
            return 1
        return max(1, min(2 * _VECTORS // vectors, self.stage.reduction[-1][1] // 2 if _long(self.stage) else 1))

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
            acc = b.registers("acc", step, self.dtype)

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

            def fold(distance: int) -> tirx.Stmt:
                """Halves the partial results: a chain of additions over all lanes would be longer than the sum."""
                return b.vectorized(
                    "v", distance, lambda v: b.store(acc, combine(b.load(acc, v), b.load(acc, v + distance)), v)
                )

            def gather(u: Expr) -> tirx.Stmt:
                return b.vectorized(
                    "v", lanes, lambda v: b.store(acc, combine(b.load(acc, v), b.load(acc, u * lanes + v)), v)
                )

            return b.seq(
                [
                    b.allocate(acc),
                    # The initial value is neutral for sum, max and min, so every lane may start from it.
                    each(lambda j: self._init(values, acc, j)),
                    self._nest(outer, along, {}),
                    b.unrolled("u", vectors - 1, gather, start=1),
                    *(fold(1 << bit) for bit in reversed(range(lanes.bit_length() - 1))),
                    self._store(values, b.load(acc, 0)),
                ]
            )

        return self._tasks(stage.spatial, 1, row)


def _lanes(width: int, start: int, body: Callable[[Expr, Expr], tirx.Stmt]) -> tirx.Stmt:
    return b.vectorized("v", width, lambda v: body(start, v))


def _long(stage: Stage) -> bool:
    """Whether the reduction takes longer than combining partial results."""
    return math.prod(e for _, e in stage.reduction) >= 32
