"""Data-parallel stages: elementwise and broadcast chains, copies, and transposes by register tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm
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
        return _rows(stage, moves, [last], target)
    stored = next((i for i, s in enumerate(moves.store) if s == 1 and extents[i] > 1), None)
    if stored is None:
        return _rows(stage, moves, [last], target)
    pinned = pinned_axes(stage)
    if any(load[stored] not in (0, 1) for load in moves.loads):
        read = _common_axis(moves, extents, stored)
        if read is not None:
            dense, strided = (_merge(moves, extents, axis, pinned) for axis in (stored, read))
            tile = min(target.lanes, *(_power(math.prod(extents[i] for i in run)) for run in (dense, strided)))
            if tile >= 4:
                return _transpose(stage, moves, (dense, strided), tile, target)
    return _rows(stage, moves, _merge(moves, extents, stored, pinned), target)


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


def _point(stage: Stage, values: dict[ir.Var, Expr]) -> tirx.Stmt:
    return b.store(stage.buffer, b.substitute(stage.value, values), *(b.substitute(i, values) for i in stage.indices))


def _size(stage: Stage, axes: Sequence[int]) -> int:
    return math.prod(stage.spatial[i][1] for i in axes)


def _rows(stage: Stage, moves: Strides | None, inner: Sequence[int], target: TargetInfo) -> tirx.Stmt:
    """Vectors along the `inner` axes; the others, and parts of a long inner run, in parallel."""
    outer = [i for i in range(len(stage.spatial)) if i not in inner]
    extent, count = _size(stage, inner), _size(stage, outer)
    chunk = extent
    if count < 4 * target.threads and extent > SMALL:
        share = max(target.lanes, extent // (16 * target.threads))
        chunk = min(extent, -(-share // (4 * target.lanes)) * 4 * target.lanes)
    chunks = -(-extent // chunk)

    def body(at: Sequence[Expr]) -> tirx.Stmt:
        *coordinates, part = at
        values = dict(zip((stage.spatial[i][0] for i in outer), coordinates, strict=True))

        def run(start: Expr, size: int) -> tirx.Stmt:
            return b.vector_run(
                size, target.lanes, lambda i: _point(stage, {**values, **_merged_values(stage, inner, start + i)})
            )

        rest = extent - (chunks - 1) * chunk
        if rest == chunk:
            return run(part * chunk, chunk)
        return tirx.IfThenElse(part < chunks - 1, run(part * chunk, chunk), run((chunks - 1) * chunk, rest))

    axes = [*(_axis(stage, moves, i) for i in outer), _Axis(chunks, *_steps(stage, moves, inner[-1], chunk))]
    return _nest(axes, body, target, target.threads > 1 and count * extent > SMALL)


_TASKS = 8
"""Of each thread at least, where there are so many: the last ones even out what threads take."""
_SEGMENT_BYTES = 4096
"""What a thread writes in one piece is more than a page: cores fetch lines ahead up to its end, and take them from each
other."""


@dataclass(frozen=True)
class _Axis:
    """One axis of a nest; a step along it moves the furthest load by `load` bytes, the store by `store`."""

    extent: int
    load: int
    store: int


def _steps(stage: Stage, moves: Strides | None, axis: int, count: int = 1) -> tuple[int, int]:
    if moves is None:
        return 0, 0
    size = tvm.DataType(str(stage.buffer.dtype)).bits // 8 * count
    return max((load[axis] for load in moves.loads), default=0) * size, moves.store[axis] * size


def _axis(stage: Stage, moves: Strides | None, axis: int) -> _Axis:
    return _Axis(stage.spatial[axis][1], *_steps(stage, moves, axis))


def _shared_axis(axes: Sequence[_Axis], target: TargetInfo) -> int:
    """The axis whose halves are halves of what is read.

    Who wrote it was in all likelihood the same thread, and its core still has it. That is worth it only where threads
    then write in long pieces.
    """
    wide = [i for i, axis in enumerate(axes) if axis.extent > 1]
    axis = max(wide, key=lambda i: axes[i].load, default=0)
    found = axes[axis]
    pays = found.extent >= _TASKS * target.threads and found.extent * found.store > _SEGMENT_BYTES * target.threads
    return axis if pays else min(wide, default=0)


def _nest(
    axes: Sequence[_Axis], body: Callable[[Sequence[Expr]], tirx.Stmt], target: TargetInfo, enabled: bool
) -> tirx.Stmt:
    """A box: one axis in parallel, and as many more from outside as it takes to have enough tasks; the others as loops.

    A loop adds a constant to the addresses, where a task divides its number for every coordinate.
    """
    if not enabled:
        return _loops(list(range(len(axes))), axes, {}, body)
    enough = _TASKS * target.threads
    first = _shared_axis(axes, target)
    order = [first, *(i for i in range(len(axes)) if i != first)]
    # Of many small steps, some in a row are one task's.
    share = next((s for s in range(axes[first].extent // enough, 1, -1) if axes[first].extent % s == 0), 1)
    cut, extents = 1, [axes[first].extent // share]
    while cut < len(order) and math.prod(extents) < enough:
        extents.append(axes[order[cut]].extent)
        cut += 1

    def task(index: Expr) -> tirx.Stmt:
        done: dict[int, Expr] = {}
        bound: list[tirx.Stmt] = []
        for axis, value in zip(order, b.unravel(index, extents), strict=False):
            done[axis], statements = b.bind("at", value)
            bound += statements
        rest = order[cut:]
        if share == 1:
            return b.seq([*bound, _loops(rest, axes, done, body)])
        start = done[first] * share
        outside = [i for i in rest if axes[i].store > axes[first].store]
        inside = [i for i in rest if i not in outside]

        def run(done: dict[int, Expr]) -> tirx.Stmt:
            return b.loop("step", share, lambda i: _loops(inside, axes, {**done, first: start + i}, body))

        return b.seq([*bound, _loops_around(outside, axes, done, run)])

    return b.parallel("task", math.prod(extents), task)


def _loops(
    order: Sequence[int], axes: Sequence[_Axis], done: dict[int, Expr], body: Callable[[Sequence[Expr]], tirx.Stmt]
) -> tirx.Stmt:
    return _loops_around(order, axes, done, lambda found: body([found[i] for i in range(len(axes))]))


def _loops_around(
    order: Sequence[int], axes: Sequence[_Axis], done: dict[int, Expr], body: Callable[[dict[int, Expr]], tirx.Stmt]
) -> tirx.Stmt:
    if not order:
        return body(done)
    axis, *rest = order
    return b.loop("at", axes[axis].extent, lambda i: _loops_around(rest, axes, {**done, axis: i}, body))


def _transpose(
    stage: Stage, moves: Strides, runs: tuple[Sequence[int], Sequence[int]], tile: int, target: TargetInfo
) -> tirx.Stmt:
    """Square tiles: rows of vectors along the axis the loads are dense in, turned in registers, stored along the other.

    `runs` are the axes that the store is dense along, and those that the loads are.

    Tiles at an end overlap their neighbour; both write the same values.
    """
    dense, strided = runs
    outer = [i for i in range(len(stage.spatial)) if i not in dense and i not in strided]
    rows, columns = _size(stage, dense), _size(stage, strided)
    dtype = str(stage.buffer.dtype)

    def body(at: Sequence[Expr]) -> tirx.Stmt:
        *coordinates, column, row = at
        values = dict(zip((stage.spatial[i][0] for i in outer), coordinates, strict=True))
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

        def square(body: Callable[[Expr, Expr], tirx.Stmt]) -> tirx.Stmt:
            return b.unrolled("i", tile, lambda i: b.vectorized("v", tile, lambda v: body(i, v)))

        turned = [_exchange(buffers[s % 2], buffers[(s + 1) % 2], 1 << s, tile) for s in range(steps)]
        return b.seq([*(b.allocate(x) for x in buffers), square(fill), *turned, square(drain)])

    tiles = [
        _Axis(-(-size // tile), *_steps(stage, moves, run[-1], tile))
        for size, run in ((columns, strided), (rows, dense))
    ]
    axes = [*(_axis(stage, moves, i) for i in outer), *tiles]
    return _nest(axes, body, target, target.threads > 1 and math.prod(a.extent for a in axes) * tile * tile > SMALL)


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
