"""Contractions vectorised over output channels: packed and channels-last convolutions, depthwise, matmul.

A tile of `tile` pixels by `vectors` vectors of output channels is accumulated in registers: every step loads the
vectors of weights once, and each pixel's input element is broadcast against them. The border is not padded: tiles that
touch it are emitted apart with the taps that fall outside left out, and rows clip the range of their taps. `outer` says
what is outermost: rows of pixels, tiles of channels, or these with the reduction in parts (`panels`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tvm import tirx

from layoutsearch.schedule import builder as b
from layoutsearch.schedule.anatomy import Epilogue
from layoutsearch.schedule.contraction import Contraction, Phase
from layoutsearch.schedule.indexing import Coordinate, Expr, Split, flat
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.templates.lanes import Lanes, Run
from layoutsearch.schedule.templates.panels import Area, Panel, Panels
from layoutsearch.schedule.value import Schedule, ScheduleError


@dataclass(frozen=True)
class Place:
    """Where in the iteration space a tile is: batch, space (group), row number and its phases."""

    n: Expr
    space: Expr
    row: Expr
    rows: Phase
    columns: Phase
    panel: Panel | None = None


# Threads may differ in their work by that much before pixels are cut up for balance.
_BALANCED = 1.07


class ChannelsKernel:
    """Emits one contraction with its epilogue under a `channels` schedule.

    Args:
        c: the contraction.
        epilogue: what is done to each sum.
        schedule: the decisions.
        target: the machine.
        by_rows: keep the rows of a pointwise one apart.

    Raises:
        ScheduleError: the schedule does not fit.
    """

    def __init__(
        self, c: Contraction, epilogue: Epilogue, schedule: Schedule, target: TargetInfo, by_rows: bool = False
    ) -> None:
        self.c = c = c if by_rows else c.fused()
        self.rows: tuple[Phase, ...] = c.rows if c.merged_rows is None else (c.merged_rows,)
        self.epilogue = epilogue
        self.lanes = Lanes.of(c, target)
        self.threads = target.threads
        self.tile = schedule.number("tile")
        self.vectors = schedule.number("vectors")
        self.taps_inner = schedule["reduce"] == "taps_inner"
        self.outer = schedule["outer"]
        self.l1_bytes = target.l1_bytes
        if self.outer == "panels" and (len(self.rows) > 1 or len(c.columns) > 1 or self.lanes.mode != "broadcast"):
            raise ScheduleError("panels of weights need a convolution with one phase that shares its inputs")
        if self.tile > max(p.count for p in self.c.columns):
            raise ScheduleError(f"a tile of {self.tile} columns is wider than the output")
        if self.vectors > self.lanes.most:
            raise ScheduleError(f"{self.vectors} vectors are more than the output has channels for")

    def emit(self) -> list[tirx.Stmt]:
        """The stages: one loop nest."""
        c, tiles = self.c, self.lanes.tiles(self.vectors)
        rows = max(p.count for p in self.rows)
        # With a single row (pointwise, matmul) there are only column tiles to share out between threads.
        strips = self._strips() if rows == 1 and self._uniform() else 1
        channel_tiles = self.lanes.spaces * tiles
        pixels = rows * strips
        if self.outer == "panels":
            return self._panels(pixels, strips, tiles)

        def task(index: Expr) -> tirx.Stmt:
            if self.outer == "rows":
                n, pixel, channel = b.unravel(index, (c.batch, pixels, channel_tiles))
            else:
                n, channel, pixel = b.unravel(index, (c.batch, channel_tiles, pixels))
            (n, pixel, channel), bound = b.bind_all(n=n, pixel=pixel, channel=channel)
            space, tile = b.unravel(channel, (self.lanes.spaces, tiles))
            row, strip = b.unravel(pixel, (rows, strips))
            return b.seq([*bound, self._channel_tile(n, space, tile, tiles, row, strip if strips > 1 else None)])

        total = c.batch * channel_tiles * pixels
        return [b.parallel("task", total, task, enabled=self.threads > 1 and c.flops > 50_000)]

    def rows_of(self, n: Expr, first: Expr, count: int) -> tirx.Stmt:
        """`count` rows of one image from row `first` on, one tile of channels after the other, on one thread."""
        tiles = self.lanes.tiles(self.vectors)

        def channel_tile(channel: Expr) -> tirx.Stmt:
            space, tile = b.unravel(channel, (self.lanes.spaces, tiles))
            (space, tile), bound = b.bind_all(space=space, tile=tile)
            return b.seq([*bound, self.tile_of(n, space, tile, tiles, first, count)])

        return b.loop("channel", self.lanes.spaces * tiles, channel_tile)

    def tile_of(self, n: Expr, space: Expr, tile: Expr, tiles: int, first: Expr, count: Expr) -> tirx.Stmt:
        """`count` rows of one tile of channels from row `first` on."""
        return b.loop("row", count, lambda i: self._channel_tile(n, space, tile, tiles, first + i, None))

    def _uniform(self) -> bool:
        return len(self.c.columns) == 1 and self.c.columns[0].always_inside(self.c.width)

    def _strips(self) -> int:
        return -(-self.c.columns[0].count // self.tile)

    def _channel_tile(self, n: Expr, space: Expr, tile: Expr, tiles: int, row: Expr, strip: Expr | None) -> tirx.Stmt:
        return self._for_runs(space, tile, tiles, lambda runs: self._rows(n, space, row, strip, runs))

    def _for_runs(self, space: Expr, tile: Expr, tiles: int, body: Callable[[list[Run]], tirx.Stmt]) -> tirx.Stmt:
        """body for the vectors of a tile of channels; the last tile may have others than the rest."""
        exact = self.lanes.span % self.lanes.width == 0 and self.lanes.full % self.vectors == 0
        last = self.lanes.runs(self.vectors, True, space, tile if tiles > 1 else 0)
        if exact or tiles == 1:
            return body(last if tiles == 1 else self._whole(space, tile))
        return tirx.IfThenElse(tile < tiles - 1, body(self._whole(space, tile)), body(last))

    def _panels(self, pixels: int, strips: int, tiles: int) -> list[tirx.Stmt]:
        """Tiles of channels outermost, in each the reduction in parts: see `panels`."""
        c = self.c
        channel_tiles = self.lanes.spaces * tiles
        blocks = self._blocks(c.batch * channel_tiles, pixels)
        block = -(-pixels // blocks)

        def task(index: Expr) -> tirx.Stmt:
            n, channel, part = b.unravel(index, (c.batch, channel_tiles, blocks))
            (n, channel, part), bound = b.bind_all(n=n, channel=channel, part=part)
            space, tile = b.unravel(channel, (self.lanes.spaces, tiles))
            ahead = self._whole(space, tirx.min(tile + 1, tiles - 1)) if tiles > 1 else None

            def panels(runs: list[Run]) -> tirx.Stmt:
                def row(at: Expr, strip: Expr | None, panel: Panel) -> tirx.Stmt:
                    return self._rows(n, space, at, strip, runs, panel)

                width = c.columns[0].count if strips == 1 else self.tile
                task = Panels(c, runs, Area(part * block, block, pixels, width, strips > 1), self.l1_bytes)
                return task.emit(row, n, ahead)

            return b.seq([*bound, self._for_runs(space, tile, tiles, panels)])

        total = c.batch * channel_tiles * blocks
        return [b.parallel("task", total, task, enabled=self.threads > 1 and c.flops > 50_000)]

    def _blocks(self, tasks: int, pixels: int) -> int:
        """In how many blocks the pixels are cut so that no thread is left with much more than another."""
        for blocks in range(1, pixels + 1):
            total = tasks * blocks
            if -(-total // self.threads) * self.threads <= total * _BALANCED:
                return blocks
        return pixels

    def _whole(self, space: Expr, tile: Expr) -> list[Run]:
        return self.lanes.runs(self.vectors, False, space, tile)

    def _rows(
        self, n: Expr, space: Expr, row: Expr, strip: Expr | None, runs: list[Run], panel: Panel | None = None
    ) -> tirx.Stmt:
        most = max(p.count for p in self.rows)
        out = []
        for rows in self.rows:
            for columns in self.c.columns:
                body = self._columns(Place(n, space, row, rows, columns, panel), strip, runs)
                out.append(body if rows.count == most else tirx.IfThenElse(row < rows.count, body, None))
        return b.seq(out)

    def _columns(self, at: Place, strip: Expr | None, runs: list[Run]) -> tirx.Stmt:
        """All pixels of a row (or one strip of it): a loop over equal tiles, tiles at the border apart."""
        width, count = self.tile, at.columns.count
        whole, rest = divmod(count, width)
        if strip is not None:
            body = self._tile(at, strip * width, width, runs, self._all(at, width))
            if not rest:
                return body
            return tirx.IfThenElse(strip < whole, body, self._tile(at, whole * width, rest, runs, self._all(at, rest)))
        out: list[tirx.Stmt] = []
        start = 0
        pieces = [(i * width, width) for i in range(whole)] + ([(whole * width, rest)] if rest else [])
        while start < len(pieces):
            first, size = pieces[start]
            taps = self._valid(at, first, size)
            end = start + 1
            if taps == self._all(at, size):
                while end < len(pieces) and pieces[end][1] == size and self._valid(at, pieces[end][0], size) == taps:
                    end += 1

            def body(
                i: Expr, size: int = size, taps: list[tuple[int, int]] = taps, base: int = first, skip: int = start
            ) -> tirx.Stmt:
                return self._tile(at, base + (i - skip) * width if size == width else base, size, runs, taps)

            out.append(b.loop("strip", end - start, body, start=start))
            start = end
        return b.seq(out)

    def _all(self, at: Place, size: int) -> list[tuple[int, int]]:
        return [(0, size)] * at.columns.taps

    def _valid(self, at: Place, first: int, size: int) -> list[tuple[int, int]]:
        return [at.columns.valid(tap, self.c.width, first, size) for tap in range(at.columns.taps)]

    def _tile(self, at: Place, first: Expr, size: int, runs: list[Run], taps: list[tuple[int, int]]) -> tirx.Stmt:
        """Accumulates `size` pixels from output number `first` on and stores them through the epilogue."""
        c = self.c
        sums = [b.registers("sum", size * run.count * run.width, c.dtype) for run in runs]
        statements: list[tirx.Stmt] = [b.allocate(s) for s in sums]
        panel = at.panel
        for number, (run, acc) in enumerate(zip(runs, sums, strict=True)):
            begin = partial(self._clear, acc) if panel is None else partial(panel.load, number, acc, first)
            statements.append(self._over(run, 0, size, begin))
        if at.rows.taps and at.columns.taps:
            statements.append(self._reduce(at, first, size, runs, sums, taps))
        for number, (run, acc) in enumerate(zip(runs, sums, strict=True)):
            end = partial(self._store, at, first, run, acc)
            if panel is not None and not panel.last:
                end = partial(panel.save, number, acc, first)
            statements.append(self._over(run, 0, size, end))
        return b.seq(statements)

    def _clear(self, acc: tirx.Buffer, t: Expr, u: Expr, v: Expr, i: Expr) -> tirx.Stmt:
        return b.store(acc, b.const(0, self.c.dtype), i)

    def _store(
        self, at: Place, first: Expr, run: Run, acc: tirx.Buffer, t: Expr, u: Expr, v: Expr, i: Expr
    ) -> tirx.Stmt:
        y = at.row * at.rows.step + at.rows.start
        x = (first + t) * at.columns.step + at.columns.start
        indices = self.c.out_indices(at.n, run.channel(u, v), y, x)
        return b.seq(b.store(out, value, *indices) for out, value in self.epilogue.apply(b.load(acc, i), indices))

    def _over(self, run: Run, low: int, high: int, body: Callable[[Expr, Expr, Expr, Expr], tirx.Stmt]) -> tirx.Stmt:
        """body(pixel, vector, lane, accumulator index) over pixels low..high and all vectors of the run."""

        def lanes(t: Expr, u: Expr) -> tirx.Stmt:
            at = (t * run.count + u) * run.width
            return b.vectorized("v", run.width, lambda v: body(t, u, v, at + v))

        return b.unrolled("t", high - low, lambda t: b.unrolled("u", run.count, lambda u: lanes(t, u)), start=low)

    def _reduce(
        self, at: Place, first: Expr, size: int, runs: list[Run], sums: list[tirx.Buffer], taps: list[tuple[int, int]]
    ) -> tirx.Stmt:
        c, inner = self.c, self.c.reduce_block
        low, count = at.rows.tap_range(at.row, c.height)
        interior = taps == self._all(at, size)

        def multiply(rc: Expr, ky: Expr, ri: Expr, kx: Expr, span: tuple[int, int]) -> tirx.Stmt:
            y = at.rows.input(at.row, ky)
            tap_y, tap_x = at.rows.kernel(ky, at.row), at.columns.kernel(kx, 0)
            i = Split(rc, inner, ri)

            def step(run: Run, acc: tirx.Buffer, t: Expr, u: Expr, v: Expr, index: Expr) -> tirx.Stmt:
                channel = run.channel(u, v)
                x = at.columns.input(first + t, kx)
                element = c.data(at.n, self._input_channel(at.space, channel, rc, ri), y, x)
                product = element * c.weight(at.n, channel, i, tap_y, tap_x)
                return b.store(acc, b.load(acc, index) + product, index)

            return b.seq(self._over(run, *span, partial(step, run, acc)) for run, acc in zip(runs, sums, strict=True))

        def columns(rc: Expr, ky: Expr) -> tirx.Stmt:
            def over_taps(ri: Expr) -> tirx.Stmt:
                if interior:
                    return b.unrolled("kx", at.columns.taps, lambda kx: multiply(rc, ky, ri, kx, (0, size)))
                return b.seq(multiply(rc, ky, ri, kx, span) for kx, span in enumerate(taps) if span[1] > span[0])

            def over_channels(kx: Expr, span: tuple[int, int]) -> tirx.Stmt:
                return b.loop("ri", inner, lambda ri: multiply(rc, ky, ri, kx, span))

            if self.taps_inner or inner == 1:
                return b.loop("ri", inner, over_taps)
            if interior:
                return b.loop("kx", at.columns.taps, lambda kx: over_channels(kx, (0, size)))
            return b.seq(over_channels(kx, span) for kx, span in enumerate(taps) if span[1] > span[0])

        def rows(rc: Expr) -> tirx.Stmt:
            return b.loop("ky", count, lambda ky: columns(rc, ky), start=low)

        if at.panel is None:
            return b.loop("rc", c.in_channels // inner, rows)
        panel = at.panel

        def group(g: Expr) -> tirx.Stmt:
            start = panel.start + g * panel.group
            return b.seq([*panel.fetch(start), b.loop("rc", panel.group, lambda rc: rows(start + rc))])

        return b.loop("group", panel.count // panel.group, group)

    def _input_channel(self, space: Expr, channel: Coordinate, rc: Expr, ri: Expr) -> Coordinate:
        c, inner = self.c, self.c.reduce_block
        if self.lanes.mode == "own":
            return channel
        if self.lanes.mode == "gather":
            return flat(channel) // c.out_per_group * c.in_channels + (rc * inner + ri)
        group = space if c.groups > 1 else 0
        return Split(group * (c.in_channels // inner) + rc, inner, ri)
