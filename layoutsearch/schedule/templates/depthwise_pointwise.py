"""A depthwise convolution and the pointwise one behind it, by strips of rows: what is between stays with its thread.

A task makes `rows` rows of all channels of the depthwise result, its epilogue applied, in the thread's scratch, and
multiplies them by the weights of the pointwise convolution while they are in the caches next to the core. Both halves
are those of the `channels` template, with the one's results and the other's data in the scratch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tvm import tirx

from layoutsearch.layout.layout import Layout
from layoutsearch.schedule import builder as b
from layoutsearch.schedule.anatomy import Epilogue
from layoutsearch.schedule.contraction import Contraction
from layoutsearch.schedule.indexing import Coordinate, Expr, physical_indices
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.templates.channels import ChannelsKernel, Place
from layoutsearch.schedule.templates.lanes import Run
from layoutsearch.schedule.value import Schedule, ScheduleError


@dataclass(frozen=True, eq=False)
class Strip:
    """Rows of the tensor between the two, laid out as that tensor is.

    Attributes:
        buffer: flat.
        layout: of the tensor; its rows follow each other.
        channels: all of them.
        pixels: of all rows.
    """

    buffer: tirx.Buffer
    layout: Layout
    channels: int
    pixels: int

    @classmethod
    def of(cls, layout: Layout, channels: int, pixels: int, dtype: str) -> Strip:
        """A strip in a scratch of its own."""
        return cls(b.thread_scratch("strip", channels * pixels, dtype), layout, channels, pixels)

    def at(self, channel: Coordinate, pixel: Expr) -> Expr:
        """Index of an element."""
        shape = self.layout.physical_shape((1, self.channels, 1, self.pixels), "NCHW")
        indices = physical_indices(self.layout, {"N": 0, "C": channel, "H": 0, "W": pixel})
        return sum(i * math.prod(shape[axis + 1 :]) for axis, i in enumerate(indices))


class _Depthwise(ChannelsKernel):
    """Writes into a strip that starts at row `first`."""

    strip: Strip
    first: Expr = 0

    def _store(
        self, at: Place, first: Expr, run: Run, acc: tirx.Buffer, t: Expr, u: Expr, v: Expr, i: Expr
    ) -> tirx.Stmt:
        x, channel = first + t, run.channel(u, v)
        ((_, value),) = self.epilogue.apply(b.load(acc, i), self.c.out_indices(at.n, channel, at.row, x))
        pixel = (at.row - self.first) * self.c.columns[0].count + x
        return b.store(self.strip.buffer, value, self.strip.at(channel, pixel))


class PairKernel:
    """Emits a depthwise convolution and the pointwise one behind it under a `depthwise_pointwise` schedule.

    Args:
        depthwise, pointwise: the convolutions with their epilogues.
        layout: of the tensor between them.
        schedule: the decisions.
        target: the machine.

    Raises:
        ScheduleError: the schedule does not fit.
    """

    def __init__(
        self,
        depthwise: tuple[Contraction, Epilogue],
        pointwise: tuple[Contraction, Epilogue],
        layout: Layout,
        schedule: Schedule,
        target: TargetInfo,
    ) -> None:
        self._pointwise, self._layout, self._schedule, self._target = pointwise, layout, schedule, target
        c, tail = depthwise
        self._height, self._width = c.rows[0].count, c.columns[0].count
        self._rows, self._tile = schedule.number("rows"), schedule.number("tile")
        if self._rows > self._height:
            raise ScheduleError(f"strips of {self._rows} rows are higher than the output")
        if self._tile > self._rows * self._width:
            raise ScheduleError(f"a tile of {self._tile} pixels is larger than a strip")
        self._depthwise = _Depthwise(c, tail, _half(schedule.number("dw_tile"), schedule.number("dw_vectors")), target)
        self._parallel = target.threads > 1 and c.flops + pointwise[0].flops > 50_000

    def emit(self) -> list[tirx.Stmt]:
        """The stages: one loop nest."""
        c = self._depthwise.c
        whole, rest = divmod(self._height, self._rows)
        strips = whole + bool(rest)

        def task(index: Expr) -> tirx.Stmt:
            n, strip = b.unravel(index, (c.batch, strips))
            (n, strip), bound = b.bind_all(n=n, strip=strip)
            (first,), more = b.bind_all(first=strip * self._rows)
            body = self._strip(n, first, self._rows)
            if rest:
                body = tirx.IfThenElse(strip < whole, body, self._strip(n, first, rest))
            return b.seq([*bound, *more, body])

        return [b.parallel("task", c.batch * strips, task, self._parallel)]

    def _strip(self, n: Expr, first: Expr, rows: int) -> tirx.Stmt:
        """`rows` rows of the result from row `first` on."""
        c, tail = self._pointwise
        pixels = rows * self._width
        strip = Strip.of(self._layout, c.in_channels, pixels, str(c.source.dtype))
        self._depthwise.strip, self._depthwise.first = strip, first
        tile, vectors = min(self._tile, pixels), self._schedule.number("vectors")
        pointwise = ChannelsKernel(_of_strip(c, strip, first * self._width), tail, _half(tile, vectors), self._target)
        return b.seq([b.allocate(strip.buffer), self._depthwise.rows_of(n, first, rows), pointwise.rows_of(n, 0, 1)])


def _half(tile: int, vectors: int) -> Schedule:
    return Schedule.make("channels", tile=tile, vectors=vectors, reduce="taps_outer", outer="channels")


def _of_strip(pointwise: Contraction, strip: Strip, start: Expr) -> Contraction:
    """The pixels of a strip, read from the strip; the first of them is pixel `start` of the image."""
    c = pointwise.fused()
    return replace(
        c,
        width=strip.pixels,
        columns=(replace(c.columns[0], count=strip.pixels),),
        data=lambda n, channel, _, x: b.load(strip.buffer, strip.at(channel, x)).astype(c.dtype),
        out_indices=lambda n, channel, _, x: c.out_indices(n, channel, 0, start + x),
    )
