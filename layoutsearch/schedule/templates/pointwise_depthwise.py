"""A pointwise convolution and the depthwise one behind it, by tiles of channels: what is between stays with its thread.

A task makes all rows of the pointwise result that a strip of `rows` rows of the depthwise result reads, of a tile of
channels alone, in the thread's scratch, and runs the depthwise convolution over them while they are in the caches next
to the core. A depthwise channel reads its own channel only, so that tiles of channels share nothing; strips of rows
compute the few rows that they share twice. Both halves are those of the `channels` template.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import tirx

from layoutsearch.schedule import builder as b
from layoutsearch.schedule.anatomy import Epilogue
from layoutsearch.schedule.contraction import Contraction, Phase
from layoutsearch.schedule.indexing import Expr, flat
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.templates.channels import ChannelsKernel, Place
from layoutsearch.schedule.templates.lanes import Lanes, Run
from layoutsearch.schedule.value import Schedule, ScheduleError


@dataclass(frozen=True, eq=False)
class Slab:
    """Rows of a tile of channels of the tensor between the two: [row][column][channel].

    Attributes:
        buffer: flat.
        width: columns of a row.
        channels: of the widest tile.
        row: of the tensor, the first here.
        channel: of the tensor, the first here.
    """

    buffer: tirx.Buffer
    width: int
    channels: int
    row: Expr
    channel: Expr

    def at(self, channel: Expr, row: Expr, column: Expr) -> Expr:
        """Index of an element of the tensor."""
        return ((row - self.row) * self.width + column) * self.channels + (channel - self.channel)


class _Pointwise(ChannelsKernel):
    """Writes into a slab, row by row."""

    slab: Slab

    def _store(
        self, at: Place, first: Expr, run: Run, acc: tirx.Buffer, t: Expr, u: Expr, v: Expr, i: Expr
    ) -> tirx.Stmt:
        x, channel = first + t, run.channel(u, v)
        ((_, value),) = self.epilogue.apply(b.load(acc, i), self.c.out_indices(at.n, channel, at.row, x))
        return b.store(self.slab.buffer, value, self.slab.at(flat(channel), at.row, x))


class PairKernel:
    """Emits a pointwise convolution and the depthwise one behind it under a `pointwise_depthwise` schedule.

    Args:
        pointwise, depthwise: the convolutions with their epilogues.
        schedule: the decisions.
        target: the machine.

    Raises:
        ScheduleError: the schedule does not fit, or the two cannot share tiles of channels.
    """

    def __init__(
        self,
        pointwise: tuple[Contraction, Epilogue],
        depthwise: tuple[Contraction, Epilogue],
        schedule: Schedule,
        target: TargetInfo,
    ) -> None:
        self._depthwise, self._target = depthwise, target
        self._rows, self._vectors = schedule.number("rows"), schedule.number("vectors")
        self._half = _half(schedule.number("dw_tile"), self._vectors)
        c, _ = depthwise
        if self._rows > c.rows[0].count:
            raise ScheduleError(f"strips of {self._rows} rows are higher than the output")
        lanes = shared_lanes(pointwise[0], c, target)
        if lanes is None:
            raise ScheduleError("the two convolutions of a pair have different vectors of channels")
        self._lanes: Lanes = lanes
        # By rows, not by pixels of all of them: a slab begins and ends with a row.
        self._pointwise = _Pointwise(
            pointwise[0], pointwise[1], _half(schedule.number("tile"), self._vectors), target, by_rows=True
        )
        # The kernel as it is without a slab: what the schedule has to fit.
        ChannelsKernel(c, depthwise[1], self._half, target)
        self._parallel = target.threads > 1 and c.flops + pointwise[0].flops > 50_000

    def emit(self) -> list[tirx.Stmt]:
        """The stages: one loop nest."""
        c, _ = self._depthwise
        tiles = self._lanes.tiles(self._vectors)
        whole, rest = divmod(c.rows[0].count, self._rows)
        strips = whole + bool(rest)

        def task(index: Expr) -> tirx.Stmt:
            n, tile, strip = b.unravel(index, (c.batch, tiles, strips))
            (n, tile, strip), bound = b.bind_all(n=n, tile=tile, strip=strip)
            (first,), more = b.bind_all(first=strip * self._rows)
            body = self._strip(n, tile, tiles, first, self._rows)
            if rest:
                body = tirx.IfThenElse(strip < whole, body, self._strip(n, tile, tiles, first, rest))
            return b.seq([*bound, *more, body])

        return [b.parallel("task", c.batch * tiles * strips, task, self._parallel)]

    def _strip(self, n: Expr, tile: Expr, tiles: int, first: Expr, rows: int) -> tirx.Stmt:
        """`rows` rows of a tile of channels of the result from row `first` on."""
        c, tail = self._depthwise
        start, end = rows_read(c.rows[0], first, rows, c.height)
        (start, end), bound = b.bind_all(start=start, end=end)
        channels = self._vectors * self._lanes.width
        most = min(c.height, (rows - 1) * c.rows[0].in_step + reach(c.rows[0]))
        slab = Slab(
            b.thread_scratch("slab", most * c.width * channels, str(c.source.dtype)),
            c.width,
            channels,
            start,
            tile * channels,
        )
        self._pointwise.slab = slab
        of_slab = replace(
            c, data=lambda n, channel, y, x: b.load(slab.buffer, slab.at(flat(channel), y, x)).astype(c.dtype)
        )
        second = ChannelsKernel(of_slab, tail, self._half, self._target)
        made = self._pointwise.tile_of(n, 0, tile, tiles, start, end - start)
        return b.seq([*bound, b.allocate(slab.buffer), made, second.tile_of(n, 0, tile, tiles, first, rows)])


def shared_lanes(pointwise: Contraction, depthwise: Contraction, target: TargetInfo) -> Lanes | None:
    """How both cut their channels into vectors; None where they do not do so alike."""
    one, two = (Lanes.of(c, target) for c in (pointwise, depthwise))
    same = (one.spaces, one.span, one.width) == (two.spaces, two.span, two.width)
    return one if same and one.spaces == 1 else None


def reach(rows: Phase) -> int:
    """Input rows from the first to the last that one output row reads."""
    return (rows.taps - 1) * rows.offset_step + 1


def rows_read(rows: Phase, first: Expr, count: int, height: int) -> tuple[Expr, Expr]:
    """Input rows [start, end) that `count` output rows from row `first` on read."""
    if count == rows.count:
        first = 0
    start = first * rows.in_step + rows.offset0
    end = start + ((count - 1) * rows.in_step + reach(rows))
    if isinstance(start, int):
        return max(start, 0), min(end, height)
    return tirx.max(start, 0), tirx.min(end, height)


def _half(tile: int, vectors: int) -> Schedule:
    return Schedule.make("channels", tile=tile, vectors=vectors, reduce="taps_outer", outer="channels")
