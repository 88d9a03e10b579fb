"""Reductions: accumulators in registers, vectors along the last data-parallel axis or along the reduction itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import ir, tirx
from tvm.sym import Analyzer

from layoutsearch.schedule import builder as b
from layoutsearch.schedule.anatomy import Stage, inline_loads
from layoutsearch.schedule.indexing import Expr
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.templates.maps import SMALL


def _accesses(stage: Stage) -> list[tuple[list[tirx.Expr], list[int]]]:
    return [(list(load.indices), [int(s) for s in load.source.shape]) for load in stage.loads]


def _contiguous_suffix(
    axes: Sequence[tuple[ir.Var, int]], accesses: Sequence[tuple[list[tirx.Expr], list[int]]]
) -> int:
    """Length of the longest suffix of `axes` over which each access is either dense in the same order or constant."""
    best = 0
    for length in range(1, len(axes) + 1):
        suffix = axes[len(axes) - length :]
        variables = [v for v, _ in suffix]
        if all(_dense_or_absent(indices, shape, suffix, variables) for indices, shape in accesses):
            best = length
    return best


def _dense_or_absent(
    indices: list[tirx.Expr], shape: list[int], suffix: Sequence[tuple[ir.Var, int]], variables: list[ir.Var]
) -> bool:
    if not any(b.uses_any(i, variables) for i in indices):
        return True
    tail, length = indices[len(indices) - len(suffix) :], len(suffix)
    if len(indices) < length or any(b.uses_any(i, variables) for i in indices[: len(indices) - length]):
        return False
    same = all(
        i.same_as(v) or (e == 1 and isinstance(i, tirx.IntImm) and int(i) == 0)
        for i, (v, e) in zip(tail, suffix, strict=True)
    )
    # The outermost fused axis may be a part of its dimension; the inner ones must fill theirs.
    return same and shape[len(shape) - length + 1 :] == [e for _, e in suffix[1:]]


class Reduction:
    """A reduction with its accumulator in registers: vectors over the last data-parallel axis, or along the reduction."""

    def __init__(self, stage: Stage, target: TargetInfo) -> None:
        self.stage = stage
        self.target = target
        self.dtype = str(stage.buffer.dtype)

    def emit(self) -> tirx.Stmt:
        stage = self.stage
        along = _contiguous_suffix(stage.reduction, _accesses(stage))
        last = stage.spatial[-1] if stage.spatial else None
        over_spatial = last is not None and last[1] > 1 and self._is_contiguous(last)
        inner = stage.reduction[len(stage.reduction) - along :]
        run = math.prod(e for _, e in inner)
        kind = None
        if not over_spatial and along and run >= 4 and self._combiner() is not None:
            kind = "reduction"
        elif last is not None and last[1] > 1:
            kind = "spatial"
        if kind == "reduction":
            return self._along_reduction(inner)
        return self._over_spatial(1 if kind is None else None)

    def _is_contiguous(self, axis: tuple[ir.Var, int]) -> bool:
        """Whether every access is dense along the axis or does not depend on it."""
        var, _ = axis
        for load in self.stage.loads:
            if any(b.uses_any(i, [var]) for i in load.indices[:-1]):
                return False
            if not b.uses_any(load.indices[-1], [var]):
                continue
            moved = b.substitute(load.indices[-1], {var: var + 1}) - load.indices[-1]
            if not b.is_one(Analyzer().simplify(moved)):
                return False
        return any(b.uses_any(load.indices[-1], [var]) for load in self.stage.loads)

    def _combiner(self) -> str | None:
        value = self.stage.value
        if isinstance(value, tirx.Add):
            return "add"
        if isinstance(value, tirx.Max):
            return "max"
        if isinstance(value, tirx.Min):
            return "min"
        return None

    def _combine(self, left: tirx.Expr, right: tirx.Expr) -> tirx.Expr:
        kind = self._combiner()
        return left + right if kind == "add" else tirx.max(left, right) if kind == "max" else tirx.min(left, right)

    def _update(self, values: dict[ir.Var, Expr], acc: tirx.Buffer, index: Expr) -> tirx.Stmt:
        value = b.substitute(self.stage.value, values)
        value = inline_loads(value, {self.stage.buffer: lambda _: b.load(acc, index)})
        return b.store(acc, value, index)

    def _nest(self, axes: Sequence[tuple[ir.Var, int]], body, values: dict[ir.Var, Expr]) -> tirx.Stmt:
        if not axes:
            return body(values)
        (var, extent), *rest = axes
        return b.loop(var.name, extent, lambda i: self._nest(rest, body, {**values, var: i}))

    def _parallel(self, axes: Sequence[tuple[ir.Var, int]], body) -> tirx.Stmt:
        extents = [e for _, e in axes]
        work = math.prod(e for _, e in (*self.stage.spatial, *self.stage.reduction))

        def task(index: Expr) -> tirx.Stmt:
            return body(dict(zip((v for v, _ in axes), b.unravel(index, extents), strict=True)))

        return b.parallel("task", math.prod(extents), task, self.target.threads > 1 and work > SMALL)

    def _finish(self, values: dict[ir.Var, Expr], value: tirx.Expr) -> tirx.Stmt:
        return b.store(self.stage.buffer, value, *(b.substitute(i, values) for i in self.stage.indices))

    def _over_spatial(self, width: int | None) -> tirx.Stmt:
        stage = self.stage
        if not stage.spatial:
            return self._scalar({})
        *outer, (var, extent) = stage.spatial
        lanes = width or self.target.lanes
        tile = 4 * lanes

        def vector(values: dict[ir.Var, Expr], start: Expr, size: int) -> tirx.Stmt:
            acc = b.registers("acc", size, self.dtype)
            step = min(size, lanes)

            def each(body) -> tirx.Stmt:
                return b.unrolled("u", size // step, lambda u: b.vectorized("v", step, lambda v: body(u * step + v)))

            def at(i: Expr) -> dict[ir.Var, Expr]:
                return {**values, var: start + i}

            return b.seq(
                [
                    tirx.AllocBuffer(acc),
                    each(lambda i: b.store(acc, b.substitute(stage.init, at(i)), i)),
                    self._nest(stage.reduction, lambda r: each(lambda i: self._update({**at(i), **r}, acc, i)), {}),
                    each(lambda i: self._finish(at(i), b.load(acc, i))),
                ]
            )

        # Few outer iterations: the vectors of the last axis are shared out as well.
        def row(values: dict[ir.Var, Expr]) -> tirx.Stmt:
            out = []
            whole, rest = divmod(extent, tile)
            if whole:
                out.append(b.loop("strip", whole, lambda i: vector(values, i * tile, tile)))
            done = whole * tile
            while rest:
                piece = lanes * (rest // lanes) if rest >= lanes else 1 << (rest.bit_length() - 1)
                out.append(vector(values, done, piece))
                done, rest = done + piece, rest - piece
            return b.seq(out)

        if math.prod(e for _, e in outer) < 2 * self.target.threads and extent >= 2 * lanes and extent % lanes == 0:
            whole = extent // lanes
            strip = tirx.Var("strip", "int32")
            axes = [*outer, (strip, whole)]
            return self._parallel(axes, lambda values: vector(_without(values, strip), values[strip] * lanes, lanes))
        return self._parallel(outer, row)

    def _scalar(self, values: dict[ir.Var, Expr]) -> tirx.Stmt:
        acc = b.registers("acc", 1, self.dtype)
        return b.seq(
            [
                tirx.AllocBuffer(acc),
                b.store(acc, b.substitute(self.stage.init, values), 0),
                self._nest(self.stage.reduction, lambda r: self._update({**values, **r}, acc, 0), {}),
                self._finish(values, b.load(acc, 0)),
            ]
        )

    def _along_reduction(self, inner: Sequence[tuple[ir.Var, int]]) -> tirx.Stmt:
        """Partial results in vector lanes along the contiguous part of the reduction, combined at the end."""
        stage, extents = self.stage, [e for _, e in inner]
        run = math.prod(extents)
        outer = stage.reduction[: len(stage.reduction) - len(inner)]
        lanes = min(self.target.lanes, 1 << (run.bit_length() - 1))
        vectors = min(4, run // lanes)
        step = lanes * vectors

        def row(values: dict[ir.Var, Expr]) -> tirx.Stmt:
            acc, one = b.registers("acc", step, self.dtype), b.registers("total", 1, self.dtype)
            whole, rest = divmod(run, step)

            def at(flat: Expr) -> dict[ir.Var, Expr]:
                return dict(zip((v for v, _ in inner), b.unravel(flat, extents), strict=True))

            def each(body) -> tirx.Stmt:
                return b.unrolled("u", vectors, lambda u: b.vectorized("v", lanes, lambda v: body(u * lanes + v)))

            def body(r: dict[ir.Var, Expr]) -> tirx.Stmt:
                main = b.loop(
                    "i", whole, lambda i: each(lambda j: self._update({**values, **r, **at(i * step + j)}, acc, j))
                )
                parts = [main]
                done, left = whole * step, rest
                while left:
                    piece = lanes if left >= lanes else 1 << (left.bit_length() - 1)
                    parts.append(
                        b.vectorized(
                            "v",
                            piece,
                            lambda v, done=done: self._update({**values, **r, **at(v + done)}, acc, v),
                        )
                    )
                    done, left = done + piece, left - piece
                return b.seq(parts)

            # The initial value is the neutral element of sum, max and min, so every lane may start from it.
            init = b.substitute(stage.init, values)
            return b.seq(
                [
                    tirx.AllocBuffer(acc),
                    tirx.AllocBuffer(one),
                    each(lambda j: b.store(acc, init, j)),
                    self._nest(outer, body, {}),
                    b.store(one, b.load(acc, 0), 0),
                    b.unrolled(
                        "j",
                        step - 1,
                        lambda j: b.store(one, self._combine(b.load(one, 0), b.load(acc, j)), 0),
                        start=1,
                    ),
                    self._finish(values, b.load(one, 0)),
                ]
            )

        return self._parallel(stage.spatial, row)


def _without(values: dict[ir.Var, Expr], var: ir.Var) -> dict[ir.Var, Expr]:
    return {k: v for k, v in values.items() if not k.same_as(var)}
