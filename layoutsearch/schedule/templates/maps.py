"""Data-parallel stages: elementwise and broadcast chains, copies, and transposes by register tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import ir, tirx

from layoutsearch.schedule import builder as b
from layoutsearch.schedule.anatomy import Stage
from layoutsearch.schedule.indexing import Expr
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.templates.strides import Strides, pinned_axes, split_blocks, split_domains, strides

SMALL = 2048
"""Elements below which a nest is not worth waking the thread pool."""


def emit_map(stage: Stage, target: TargetInfo) -> tirx.Stmt:
    """The loops of a data-parallel stage."""
    return b.seq(_emit_piece(split_blocks(piece), target) for piece in split_domains(stage))


def _emit_piece(stage: Stage, target: TargetInfo) -> tirx.Stmt:
    if not stage.spatial:
        return b.store(stage.buffer, stage.value, *stage.indices)
    moves = strides(stage)
    extents = [e for _, e in stage.spatial]
    last = len(extents) - 1
    if moves is None:
        return _rows(stage, [last], target)
    stored = next((i for i, s in enumerate(moves.store) if s == 1 and extents[i] > 1), None)
    if stored is None:
        return _rows(stage, [last], target)
    pinned = pinned_axes(stage)
    if any(load[stored] not in (0, 1) for load in moves.loads):
        read = _common_axis(moves, extents, stored)
        if read is not None:
            dense, strided = (_merge(moves, extents, axis, pinned) for axis in (stored, read))
            tile = min(target.lanes, *(_power(math.prod(extents[i] for i in run)) for run in (dense, strided)))
            if tile >= 4:
                return _transpose(stage, dense, strided, tile, target)
    return _rows(stage, _merge(moves, extents, stored, pinned), target)


def _power(extent: int) -> int:
    return 1 << (extent.bit_length() - 1)


def _common_axis(moves: Strides, extents: Sequence[int], stored: int) -> int | None:
    """The axis along which every load that is strided along `stored` is dense."""
    bad = [load for load in moves.loads if load[stored] not in (0, 1)]
    for axis, extent in enumerate(extents):
        if axis != stored and extent > 1 and all(load[axis] == 1 for load in bad):
            return axis
    return None


def _merge(moves: Strides, extents: Sequence[int], axis: int, pinned: Sequence[int]) -> list[int]:
    """The axes, outermost first, that together with `axis` as the innermost behave as one for every access.

    `pinned` axes are never merged: the value depends on their coordinates, not only on the elements they lead to.
    """
    run = [axis]
    rest = [i for i in range(len(extents)) if i != axis and not {i, axis} & set(pinned)]
    while True:
        extent = math.prod(extents[i] for i in run)
        following = next((i for i in rest if all(s[i] == s[axis] * extent for s in moves.accesses)), None)
        if following is None:
            return run
        run.insert(0, following)
        rest.remove(following)


def _merged_values(stage: Stage, axes: Sequence[int], flat: Expr) -> dict[ir.Var, Expr]:
    """Values of merged axes at `flat`: the innermost takes it all, which leads to the same element of every buffer."""
    *outer, inner = axes
    return {**{stage.spatial[i][0]: 0 for i in outer}, stage.spatial[inner][0]: flat}


def _values(stage: Stage, axes: Sequence[int], flat: Expr) -> dict[ir.Var, Expr]:
    extents = [stage.spatial[i][1] for i in axes]
    return dict(zip((stage.spatial[i][0] for i in axes), b.unravel(flat, extents), strict=True))


def _point(stage: Stage, values: dict[ir.Var, Expr]) -> tirx.Stmt:
    return b.store(stage.buffer, b.substitute(stage.value, values), *(b.substitute(i, values) for i in stage.indices))


def _size(stage: Stage, axes: Sequence[int]) -> int:
    return math.prod(stage.spatial[i][1] for i in axes)


def _rows(stage: Stage, inner: Sequence[int], target: TargetInfo) -> tirx.Stmt:
    """Vectors along the `inner` axes; the others, and parts of a long inner run, in parallel."""
    outer = [i for i in range(len(stage.spatial)) if i not in inner]
    extent, count = _size(stage, inner), _size(stage, outer)
    chunk = extent
    if count < 4 * target.threads and extent > SMALL:
        share = max(target.lanes, extent // (16 * target.threads))
        chunk = min(extent, -(-share // (4 * target.lanes)) * 4 * target.lanes)
    chunks = -(-extent // chunk)

    def task(index: Expr) -> tirx.Stmt:
        at, part = b.unravel(index, (count, chunks))
        values = _values(stage, outer, at)

        def run(start: Expr, size: int) -> tirx.Stmt:
            return b.vector_run(
                size, target.lanes, lambda i: _point(stage, {**values, **_merged_values(stage, inner, start + i)})
            )

        rest = extent - (chunks - 1) * chunk
        if rest == chunk:
            return run(part * chunk, chunk)
        return tirx.IfThenElse(part < chunks - 1, run(part * chunk, chunk), run((chunks - 1) * chunk, rest))

    return b.parallel("task", count * chunks, task, target.threads > 1 and count * extent > SMALL)


def _transpose(stage: Stage, dense: Sequence[int], strided: Sequence[int], tile: int, target: TargetInfo) -> tirx.Stmt:
    """Square tiles: rows of vectors along the axis the loads are dense in, turned in registers, stored along the other.

    Tiles at an end overlap their neighbour; both write the same values.
    """
    outer = [i for i in range(len(stage.spatial)) if i not in dense and i not in strided]
    rows, columns = _size(stage, dense), _size(stage, strided)
    extents = (_size(stage, outer), -(-columns // tile), -(-rows // tile))
    dtype = str(stage.buffer.dtype)

    def task(index: Expr) -> tirx.Stmt:
        at, column, row = b.unravel(index, extents)
        values = _values(stage, outer, at)
        row0, column0 = _start(row, rows, tile), _start(column, columns, tile)
        steps = int(math.log2(tile))
        buffers = [b.registers("turn", tile * tile, dtype) for _ in range(2)]

        def fill(i: Expr, v: Expr) -> tirx.Stmt:
            here = {**values, **_merged_values(stage, dense, row0 + i), **_merged_values(stage, strided, column0 + v)}
            return b.store(buffers[0], b.substitute(stage.value, here), i * tile + v)

        def drain(j: Expr, v: Expr) -> tirx.Stmt:
            here = {**values, **_merged_values(stage, dense, row0 + v), **_merged_values(stage, strided, column0 + j)}
            indices = (b.substitute(i, here) for i in stage.indices)
            return b.store(stage.buffer, b.load(buffers[steps % 2], j * tile + v), *indices)

        def square(body) -> tirx.Stmt:  # type: ignore[no-untyped-def]
            return b.unrolled("i", tile, lambda i: b.vectorized("v", tile, lambda v: body(i, v)))

        turned = [_exchange(buffers[s % 2], buffers[(s + 1) % 2], 1 << s, tile) for s in range(steps)]
        return b.seq([*(b.allocate(x) for x in buffers), square(fill), *turned, square(drain)])

    total = math.prod(extents) * tile * tile
    return b.parallel("task", math.prod(extents), task, target.threads > 1 and total > SMALL)


def _start(index: Expr, extent: int, tile: int) -> Expr:
    return index * tile if extent % tile == 0 else tirx.min(index * tile, extent - tile)


def _exchange(source: tirx.Buffer, target: tirx.Buffer, distance: int, tile: int) -> tirx.Stmt:
    """One step of the transposition: rows i and i + distance swap the halves of every group of 2 * distance columns."""

    def row(i: int) -> tirx.Expr:
        return tirx.BufferLoad(source, [tirx.Ramp(i * tile, 1, tile)])

    def put(i: int, picks: list[int], pair: list[tirx.Expr]) -> tirx.Stmt:
        return tirx.BufferStore(target, tirx.Shuffle(pair, picks), [tirx.Ramp(i * tile, 1, tile)])

    low = [j if not j & distance else tile + j - distance for j in range(tile)]
    high = [j + distance if not j & distance else tile + j for j in range(tile)]
    out = []
    for i in range(tile):
        if not i & distance:
            pair = [row(i), row(i + distance)]
            out += [put(i, low, pair), put(i + distance, high, pair)]
    return b.seq(out)
