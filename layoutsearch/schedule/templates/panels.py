"""Panels of weights: parts of a reduction whose weights stay in the first cache while many pixels use them.

A tile of channels goes over its pixels once for each part (Goto and van de Geijn, Anatomy of High-Performance Matrix
Multiplication, 2008). Sums wait in a scratch buffer between the parts. Meanwhile the weights of the next tile of
channels are fetched: they come from memory, where the first pass over them would otherwise wait for every line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tvm import tirx

from layoutsearch.schedule import builder as b
from layoutsearch.schedule.contraction import Contraction
from layoutsearch.schedule.indexing import Expr, Split
from layoutsearch.schedule.templates.lanes import Run

# Of the first cache, for the weights of a part; activations and sums stream through the rest.
_L1_SHARE = 0.75
# Input channels between two rounds of requests: a core waits for at most a dozen lines at once.
_GROUP = 16
# Requests written out one by one: beyond that, as where a matrix product has one row, a loop makes them.
_UNROLLED = 512


@dataclass(frozen=True)
class Area:
    """The pixels of one task, in units: rows, or strips of the only row.

    Attributes:
        begin: first unit.
        units: how many, at most.
        all: units of the whole output.
        width: pixels of a unit.
        strips: whether units are strips.
    """

    begin: Expr
    units: int
    all: int
    width: int
    strips: bool


@dataclass(frozen=True)
class Panel:
    """One part of the reduction for one unit: where its sums wait.

    Attributes:
        scratch: the waiting sums, a buffer for each run: for each pixel the vectors of the run.
        runs: the vectors of output channels.
        base: what to add to the number of a column for that of its pixel in the scratch.
        start: first block of input channels of the part.
        count: how many of them.
        last: whether the sums are complete after it.
        group: blocks of input channels between two calls of `fetch`, a divisor of `count`.
        fetch: asks for the unit's share of what the next tile of channels needs of a group of blocks.
    """

    scratch: tuple[tirx.Buffer, ...]
    runs: tuple[Run, ...]
    base: Expr
    start: Expr
    count: int
    last: bool
    group: int
    fetch: Callable[[Expr], list[tirx.Stmt]]

    def load(self, number: int, acc: tirx.Buffer, first: Expr, t: Expr, u: Expr, v: Expr, i: Expr) -> tirx.Stmt:
        """Into accumulator element `i` what earlier parts added up for lane `v` of vector `u` of column `first + t`."""
        if not self.scratch:
            return b.store(acc, b.const(0, str(acc.dtype)), i)
        return b.store(acc, b.load(self.scratch[number], self._at(number, first, t, u, v)), i)

    def save(self, number: int, acc: tirx.Buffer, first: Expr, t: Expr, u: Expr, v: Expr, i: Expr) -> tirx.Stmt:
        """Inverse of `load`, for the next part."""
        return b.store(self.scratch[number], b.load(acc, i), self._at(number, first, t, u, v))

    def _at(self, number: int, first: Expr, t: Expr, u: Expr, v: Expr) -> Expr:
        run = self.runs[number]
        return ((self.base + first + t) * run.count + u) * run.width + v


class Panels:
    """One task: a tile of channels for an area of pixels, part by part.

    Args:
        c: the contraction, of one phase.
        runs: the vectors of output channels.
        area: the pixels.
        l1_bytes: first cache of a core.
    """

    def __init__(self, c: Contraction, runs: Sequence[Run], area: Area, l1_bytes: int) -> None:
        self._c, self._runs, self._area = c, tuple(runs), area
        blocks = c.in_channels // c.reduce_block
        channels = sum(run.count * run.width for run in runs)
        size = 4 * c.reduce_block * c.rows[0].taps * c.columns[0].taps * channels
        self._most = min(blocks, max(1, int(l1_bytes * _L1_SHARE) // size))
        self._parts = -(-blocks // self._most)
        self._last = blocks - (self._parts - 1) * self._most

    def emit(
        self, rows: Callable[[Expr, Expr | None, Panel], tirx.Stmt], n: Expr, ahead: Sequence[Run] | None
    ) -> tirx.Stmt:
        """The task.

        Args:
            rows: emits a row, or a strip of it, for a part of the reduction.
            n: the batch index.
            ahead: vectors of the next tile of channels; None where there is none.
        """
        if self._parts == 1:
            return self._part(rows, n, ahead, (), 0, self._last, True)
        sizes = [self._area.units * self._area.width * run.count * run.width for run in self._runs]
        scratch = tuple(b.thread_scratch("waiting", size, self._c.dtype) for size in sizes)
        zero = b.const(0, self._c.dtype)
        clear = [
            b.vector_run(size, run.width, lambda i, out=out: b.store(out, zero, i))  # type: ignore[misc]
            for out, size, run in zip(scratch, sizes, self._runs, strict=True)
        ]

        def middle(part: Expr) -> tirx.Stmt:
            return self._part(rows, n, ahead, scratch, part * self._most, self._most, False)

        start = (self._parts - 1) * self._most
        last = self._part(rows, n, ahead, scratch, start, self._last, True)
        return b.seq([*map(b.allocate, scratch), *clear, b.loop("part", self._parts - 1, middle), last])

    def _part(
        self,
        rows: Callable[[Expr, Expr | None, Panel], tirx.Stmt],
        n: Expr,
        ahead: Sequence[Run] | None,
        scratch: tuple[tirx.Buffer, ...],
        start: Expr,
        count: int,
        last: bool,
    ) -> tirx.Stmt:
        area, block = self._area, self._c.reduce_block
        group = max(g for g in range(1, count + 1) if count % g == 0 and (g == 1 or g * block <= _GROUP))

        def unit(at: Expr) -> tirx.Stmt:
            number, bound = b.bind("unit", area.begin + at)
            base = (at - number if area.strips else at) * area.width
            fetch = partial(self._fetch, n, number, group, ahead)
            panel = Panel(scratch, self._runs, base, start, count, last, group, fetch)
            body = rows(0, number, panel) if area.strips else rows(number, None, panel)
            inside = area.all % area.units == 0
            return b.seq([*bound, body if inside else tirx.IfThenElse(number < area.all, body, None)])

        return b.loop("at", area.units, unit)

    def _fetch(self, n: Expr, unit: Expr, group: int, ahead: Sequence[Run] | None, start: Expr) -> list[tirx.Stmt]:
        """Ask for a unit's share of what the next tile of channels needs of `group` blocks from `start` on."""
        if ahead is None:
            return []
        c, rows, columns = self._c, self._c.rows[0], self._c.columns[0]
        steps = group * c.reduce_block * rows.taps * columns.taps
        share = -(-steps // self._area.all)
        repeat = b.unrolled if share * sum(run.count for run in ahead) <= _UNROLLED else b.loop

        def step(j: Expr) -> tirx.Stmt:
            number = unit * share + j
            ky, kx, rc, ri = b.unravel(number, (rows.taps, columns.taps, group, c.reduce_block))
            place, taps = Split(start + rc, c.reduce_block, ri), (rows.kernel(ky, 0), columns.kernel(kx, 0))
            return b.seq(
                b.prefetch(b.buffer_loads(c.weight(n, run.channel(u, 0), place, *taps))[0])
                for run in ahead
                for u in range(run.count)
            )

        if steps % self._area.all == 0:
            return [repeat("ahead", share, step)]
        whole, rest = divmod(steps, share)
        some = tirx.IfThenElse(unit.equal(whole), repeat("ahead", rest, step), None) if rest else None
        return [tirx.IfThenElse(unit < whole, repeat("ahead", share, step), some)]
