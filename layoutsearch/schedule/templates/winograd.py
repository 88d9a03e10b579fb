"""Convolutions by Winograd's F(m x m, 3 x 3): inputs transformed, a matrix product a point, outputs transformed.

The output is cut into tiles of m x m pixels, and those into blocks of `strips * tile` of them. All products of a block
with some vectors of output channels are made point by point, (m + 2)^2 small matrix products whose accumulators stay in
registers, and transformed back at once while they are in the first or second cache: only the transformed inputs are as
large as the data. Vectors run over channels throughout.

* outer `tiles`: every thread transforms the inputs of its own blocks, and walks all weights for each block;
* outer `channels`: first all inputs are transformed, then every thread keeps to its own output channels, whose weights
  it reads once for each block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tvm import tirx

from layoutsearch.schedule import builder as b
from layoutsearch.schedule.anatomy import Epilogue
from layoutsearch.schedule.contraction import Contraction
from layoutsearch.schedule.indexing import Expr, Split
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.templates.lanes import Lanes, Run
from layoutsearch.schedule.value import Schedule, ScheduleError
from layoutsearch.schedule.winograd import minimal

_LINE = 16
"""Elements by which consecutive points are kept apart further, so that they do not meet in one set of a cache."""


@dataclass(frozen=True)
class Tiling:
    """The output in tiles of m x m, all images together.

    Attributes:
        rows, columns: Tiles of one image along each axis.
        total: Tiles.
        block: Tiles of a block; the last block overlaps the one before.
        blocks: Number of blocks.
        tile: Tiles of a register tile; the last one in a block overlaps the one before.
        strips: Register tiles of a block.
    """

    rows: int
    columns: int
    total: int
    block: int
    blocks: int
    tile: int
    strips: int

    @classmethod
    def of(cls, c: Contraction, tile: int, strips: int) -> Tiling:
        """Blocks of about `strips` register tiles of about `tile` tiles, evenly filled."""
        rows, columns = (-(-axis[0].count // c.winograd) for axis in (c.rows, c.columns))
        total = c.batch * rows * columns
        blocks = -(-total // min(total, tile * strips))
        block = -(-total // blocks)
        strips = -(-block // tile)
        return cls(rows, columns, total, block, blocks, -(-block // strips), strips)

    def first_of_block(self, index: Expr) -> Expr:
        """First tile of a block."""
        return _start(index, self.block, self.total, self.blocks)

    def first_of_strip(self, index: Expr) -> Expr:
        """First tile of a register tile within its block."""
        return _start(index, self.tile, self.block, self.strips)


@dataclass(frozen=True)
class Input:
    """Where an input of a tile is read along one axis, and whether it is in the tensor (None: always)."""

    at: Expr
    inside: Expr | None


def _start(index: Expr, size: int, total: int, pieces: int) -> Expr:
    if pieces == 1:
        return 0
    return index * size if total % size == 0 else tirx.min(index * size, total - size)


def data_lanes(c: Contraction, target: TargetInfo) -> int:
    """Input channels of a vector: the widest that divides their number and the block of the data."""
    return math.gcd(c.reduce_block, target.lanes)


class WinogradKernel:
    """Emits one convolution with its epilogue under a `winograd` schedule."""

    def __init__(self, c: Contraction, epilogue: Epilogue, schedule: Schedule, target: TargetInfo) -> None:
        self.c, self.epilogue = c, epilogue
        self.form = minimal(c.winograd)
        self.lanes = Lanes.of(c, target)
        self.width = data_lanes(c, target)
        self.chunks = c.in_channels // self.width
        self.vectors = schedule.number("vectors")
        self.tiling = Tiling.of(c, schedule.number("tile"), schedule.number("strips"))
        self.shared = schedule["outer"] == "channels"
        self.parallel = target.threads > 1
        if self.vectors > self.lanes.most:
            raise ScheduleError(f"{self.vectors} vectors are more than the output has channels for")
        self.input_tiles = self.tiling.total if self.shared else self.tiling.block
        self.point_stride = self.chunks * self.input_tiles * self.width + _LINE
        self.inputs = tirx.decl_buffer((self.form.points**2 * self.point_stride,), c.dtype, "winograd_inputs")

    def emit(self) -> list[tirx.Stmt]:
        """The stages: one loop nest, or two where the transformed inputs are shared."""
        tiling, channel_tiles = self.tiling, self.lanes.tiles(self.vectors)
        if not self.shared:

            def blocks(index: Expr) -> tirx.Stmt:
                first, bound = b.bind("first", tiling.first_of_block(index))
                body = [
                    b.allocate(self.inputs),
                    b.loop("chunk", self.chunks, lambda chunk: self._transform_inputs(chunk, first)),
                    b.loop("channels", channel_tiles, lambda tile: self._channel_tile(tile, first, 0)),
                ]
                return b.seq([*bound, *body])

            return [b.parallel("block", tiling.blocks, blocks, self.parallel)]

        def strip(index: Expr) -> tirx.Stmt:
            chunk, row = b.unravel(index, (self.chunks, self.c.batch * tiling.rows))
            (chunk, row), bound = b.bind_all(chunk=chunk, row=row)
            first = row * tiling.columns
            tiles = b.loop("tile", tiling.columns, lambda i: self._transform_input(chunk, first + i, first + i))
            return b.seq([*bound, tiles])

        def task(index: Expr) -> tirx.Stmt:
            tile, block = b.unravel(index, (channel_tiles, tiling.blocks))
            (tile, block), bound = b.bind_all(tile=tile, block=block)
            first, more = b.bind("first", tiling.first_of_block(block))
            return b.seq([*bound, *more, self._channel_tile(tile, first, first)])

        return [
            b.allocate(self.inputs),
            b.parallel("strip", self.chunks * self.c.batch * tiling.rows, strip, self.parallel),
            b.parallel("task", channel_tiles * tiling.blocks, task, self.parallel),
        ]

    def _place(self, tile: Expr) -> tuple[list[Expr], list[tirx.Stmt]]:
        """(image, row, column) of a tile, each bound to a name."""
        tiling = self.tiling
        n, row, column = b.unravel(tile, (self.c.batch, tiling.rows, tiling.columns))
        return b.bind_all(n=n, row=row, column=column)

    # Inputs.

    def _transform_inputs(self, chunk: Expr, first: Expr) -> tirx.Stmt:
        return b.loop("tile", self.tiling.block, lambda i: self._transform_input(chunk, first + i, i))

    def _transform_input(self, chunk: Expr, tile: Expr, slot: Expr) -> tirx.Stmt:
        """B^T d B of one tile and one vector of channels, into `slot` of the transformed inputs.

        Inputs outside the tensor are read at its edge and not used: branches, and code that is written out for every
        column, take a second of LLVM's time.
        """
        c, m, points, width = self.c, self.c.winograd, self.form.points, self.width
        (n, row, column), out = self._place(tile)
        (top, left), bound = b.bind_all(top=row * m + c.rows[0].offset0, left=column * m + c.columns[0].offset0)
        half = b.registers("half", points * points * width, c.dtype)
        ys: list[Input] = []
        for i in range(points):
            at, more = self._input("y", top, i, c.rows[0].offset0, self.tiling.rows, c.height)
            ys.append(at)
            bound += more
        base = (chunk * self.input_tiles + slot) * width

        def line(x: Expr) -> tirx.Stmt:
            """Column x of the tile: its inputs, and B^T of them."""
            raw = b.registers("raw", points * width, c.dtype)
            at, statements = self._input("x", left, x, c.columns[0].offset0, self.tiling.columns, c.width)

            def element(y: int, v: Expr) -> tirx.Stmt:
                value = c.data(n, Split(chunk, width, v), ys[y].at, at.at)
                tests = [i.inside for i in (ys[y], at) if i.inside is not None]
                if tests:
                    value = tirx.Select(tirx.all(*tests), value, b.const(0, c.dtype))
                return b.store(raw, value, y * width + v)

            loads = [b.vectorized("v", width, partial(element, y)) for y in range(points)]
            parts = self._parts(raw, 0, lambda e, v, value: b.store(half, value, (x + e * points) * width + v))
            return b.seq([*statements, b.allocate(raw), *loads, *parts])

        def across(y: Expr) -> tirx.Stmt:
            """Row y of what the columns came to: B^T along it, one vector for each point."""
            return b.seq(
                self._parts(
                    half,
                    y * points,
                    lambda e, v, value: b.store(self.inputs, value, base + v + (y * points + e) * self.point_stride),
                )
            )

        body = [b.allocate(half), b.loop("x", points, line), b.loop("y", points, across)]
        return b.seq([*out, *bound, *body])

    def _input(
        self, name: str, first: Expr, i: Expr, offset: int, tiles: int, extent: int
    ) -> tuple[Input, list[tirx.Stmt]]:
        """Input number i of a tile along one axis, bound to a name; tiles start `offset` from multiples of m."""
        highest = (tiles - 1) * self.c.winograd + offset
        low, high = (i, i) if isinstance(i, int) else (0, self.form.points - 1)
        if low + offset >= 0 and highest + high < extent:
            return Input(first + i, None), []
        (at,), bound = b.bind_all(**{name: tirx.max(tirx.min(first + i, extent - 1), 0)})
        return Input(at, at == first + i), bound

    def _parts(
        self, source: tirx.Buffer, start: Expr, put: Callable[[int, Expr, tirx.Expr], tirx.Stmt]
    ) -> list[tirx.Stmt]:
        """put(e, lane, part e) for B^T of the vectors `start`, `start + 1`, ... of `source`."""
        points, width = self.form.points, self.width

        def part(e: int, v: Expr) -> tirx.Stmt:
            column = [b.load(source, (start + j) * width + v) for j in range(points)]
            return put(e, v, self.form.data_parts(column)[e])

        return [b.vectorized("v", width, partial(part, e)) for e in range(points)]

    # Products and outputs.

    def _channel_tile(self, tile: Expr, first: Expr, slot: Expr) -> tirx.Stmt:
        """Outputs of one block of tiles, starting at `first`, in one tile of channels; its inputs start at `slot`."""
        lanes, tiles = self.lanes, self.lanes.tiles(self.vectors)
        exact = lanes.span % lanes.width == 0 and lanes.full % self.vectors == 0
        tile = tile if tiles > 1 else 0
        last = lanes.runs(self.vectors, True, 0, tile)
        whole = lanes.runs(self.vectors, False, 0, tile)
        if exact:
            return self._block(whole, tile, first, slot)
        if tiles == 1:
            return self._block(last, tile, first, slot)
        return tirx.IfThenElse(
            tile < tiles - 1, self._block(whole, tile, first, slot), self._block(last, tile, first, slot)
        )

    def _block(self, runs: list[Run], channel: Expr, first: Expr, slot: Expr) -> tirx.Stmt:
        tiling, points = self.tiling, self.form.points
        span = sum(run.count * run.width for run in runs)
        stride = tiling.block * span + _LINE
        products = b.thread_scratch("products", points * points * stride, self.c.dtype)

        def point(ey: Expr, ex: Expr) -> tirx.Stmt:
            return b.loop(
                "strip", tiling.strips, lambda s: self._product(runs, products, stride, span, ey, ex, slot, s)
            )

        def outputs(i: Expr) -> tirx.Stmt:
            return self._outputs(runs, channel, products, stride, span, first + i, i)

        return b.seq(
            [
                b.allocate(products),
                b.loop("ey", points, lambda ey: b.loop("ex", points, lambda ex: point(ey, ex))),
                b.loop("tile", tiling.block, outputs),
            ]
        )

    def _product(
        self,
        runs: list[Run],
        products: tirx.Buffer,
        stride: int,
        span: int,
        ey: Expr,
        ex: Expr,
        slot: Expr,
        strip: Expr,
    ) -> tirx.Stmt:
        """One register tile of one matrix product: `tile` tiles by the channels of `runs`, summed over all inputs."""
        c, size, width = self.c, self.tiling.tile, self.width
        start = self.tiling.first_of_strip(strip)
        point = ey * self.form.points + ex
        sums = [b.registers("sum", size * run.count * run.width, c.dtype) for run in runs]

        def each(run: Run, body: Callable[[Expr, Expr, Expr, Expr], tirx.Stmt]) -> tirx.Stmt:
            def vector(t: Expr, u: Expr) -> tirx.Stmt:
                at = (t * run.count + u) * run.width
                return b.vectorized("v", run.width, lambda v: body(t, u, v, at + v))

            return b.unrolled("t", size, lambda t: b.unrolled("u", run.count, lambda u: vector(t, u)))

        def step(rc: Expr, ri: Expr) -> tirx.Stmt:
            out = []
            for run, acc in zip(runs, sums, strict=True):

                def multiply(t: Expr, u: Expr, v: Expr, i: Expr, run: Run = run, acc: tirx.Buffer = acc) -> tirx.Stmt:
                    place = point * self.point_stride + (rc * self.input_tiles + slot + start + t) * width + ri
                    weight = c.weight(0, run.channel(u, v), Split(rc, width, ri), ey, ex)
                    return b.store(acc, b.load(acc, i) + b.load(self.inputs, place) * weight, i)

                out.append(each(run, multiply))
            return b.seq(out)

        statements: list[tirx.Stmt] = [b.allocate(acc) for acc in sums]
        for run, acc in zip(runs, sums, strict=True):
            statements.append(each(run, lambda t, u, v, i, acc=acc: b.store(acc, b.const(0, c.dtype), i)))  # type: ignore[misc]
        statements.append(b.loop("rc", self.chunks, lambda rc: b.loop("ri", width, lambda ri: step(rc, ri))))
        offset = 0
        for run, acc in zip(runs, sums, strict=True):

            def keep(
                t: Expr, u: Expr, v: Expr, i: Expr, run: Run = run, acc: tirx.Buffer = acc, offset: int = offset
            ) -> tirx.Stmt:
                place = point * stride + (start + t) * span + (u * run.width + v + offset)
                return b.store(products, b.load(acc, i), place)

            statements.append(each(run, keep))
            offset += run.count * run.width
        return b.seq(statements)

    def _outputs(
        self, runs: list[Run], channel: Expr, products: tirx.Buffer, stride: int, span: int, tile: Expr, slot: Expr
    ) -> tirx.Stmt:
        """A^T M A of one tile, stored through the epilogue by vectors that lie in one block of the output."""
        (n, row, column), bound = self._place(tile)
        out: list[tirx.Stmt] = list(bound)
        done = 0
        for width in (run.width for run in runs for _ in range(run.count)):
            part = math.gcd(width, self.c.out_block) if self.c.out_block > 1 else width
            for at in range(done, done + width, part):
                vector = channel * (self.vectors * self.lanes.width // part) + at // part
                base = slot * span + at
                out.append(self._output_vector(vector, part, products, stride, base, n, row, column))
            done += width
        return b.seq(out)

    def _output_vector(
        self, vector: Expr, width: int, products: tirx.Buffer, stride: int, base: Expr, n: Expr, row: Expr, column: Expr
    ) -> tirx.Stmt:
        c, m, points = self.c, self.c.winograd, self.form.points
        half = b.registers("half", m * points * width, c.dtype)

        def down(x: Expr) -> tirx.Stmt:
            def vector(y: int, v: Expr) -> tirx.Stmt:
                rows = [b.load(products, base + v + (x + e * points) * stride) for e in range(points)]
                return b.store(half, self.form.outputs_of(rows)[y], (x + y * points) * width + v)

            return b.seq(b.vectorized("v", width, partial(vector, y)) for y in range(m))

        def across(y: Expr) -> tirx.Stmt:
            def vector(x: int, v: Expr) -> tirx.Stmt:
                line = [b.load(half, (y * points + e) * width + v) for e in range(points)]
                value = self.form.outputs_of(line)[x]
                indices = c.out_indices(n, Split(vector_index, width, v), row * m + y, column * m + x)
                return b.seq(b.store(o, value, *indices) for o, value in self.epilogue.apply(value, indices))

            return b.seq(
                self._guarded(row, column, y, x, b.vectorized("v", width, partial(vector, x))) for x in range(m)
            )

        vector_index, bound = b.bind("vector", vector)
        return b.seq([*bound, b.allocate(half), b.loop("x", points, down), b.loop("y", m, across)])

    def _guarded(self, row: Expr, column: Expr, y: Expr, x: int, body: tirx.Stmt) -> tirx.Stmt:
        """`body` where output (y, x) of the tile exists."""
        m, tests = self.c.winograd, []
        for tile, at, count in ((row, y, self.c.rows[0].count), (column, x, self.c.columns[0].count)):
            if count % m and not (isinstance(at, int) and at < count % m):
                tests.append(tile * m + at < count)
        return tirx.IfThenElse(tirx.all(*tests), body, None) if tests else body
