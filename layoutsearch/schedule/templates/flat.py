"""Contractions vectorised over pixels, for tensors whose columns are contiguous (NCHW).

A plane of the input is copied once into a padded one whose rows follow each other with a pitch, so that output pixel f
of a plane, counted with that pitch, reads input f + constant for every tap: vectors of pixels run across row ends, and
small or odd widths cost only the padding. The pixels between the rows are computed and dropped. A stride splits the
padded plane into interleaved ones (every s-th row and column), so that all loads stay contiguous. Pointwise
convolutions read the input itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from tvm import tirx

from layoutsearch.schedule import builder as b
from layoutsearch.schedule.anatomy import Epilogue
from layoutsearch.schedule.contraction import Contraction
from layoutsearch.schedule.indexing import Expr
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.templates.planes import Margin, Pair, alternating, bundles
from layoutsearch.schedule.value import Schedule, ScheduleError


def applies(c: Contraction) -> bool:
    """Whether the template fits: columns contiguous in data and output, output channels not."""
    return c.columns_last and not c.channels_last


class FlatKernel:
    """Emits one contraction with its epilogue under a `flat` schedule."""

    def __init__(self, c: Contraction, epilogue: Epilogue, schedule: Schedule, target: TargetInfo) -> None:
        if not applies(c):
            raise ScheduleError("schedule template flat needs columns contiguous in data and output")
        self.c = c.fused()
        self.epilogue = epilogue
        self.lanes = target.lanes
        self.threads = target.threads
        self.channels, self.vectors = schedule.number("channels"), schedule.number("vectors")
        self.rows = schedule.number("rows")
        if c.out_per_group % self.channels:
            raise ScheduleError(f"{self.channels} output channels do not divide the {c.out_per_group} of a group")
        if self.rows > max(p.count for p in self.c.rows):
            raise ScheduleError(f"{self.rows} rows are more than the output has")
        self.direct = c.pointwise
        self.y = Margin.of(self.c.rows, self.c.height)
        self.x = Margin.of(self.c.columns, self.c.width)
        self.pitch = self.x.length
        self.plane = self.y.step * self.x.step * self.y.length * self.pitch
        self.local_pad = c.depthwise
        # Nothing to add around the planes and no strip that ends beyond them: they are read where they are.
        self.bare = all(m.step == 1 and m.before == 0 and m.length == m.extent for m in (self.y, self.x)) and all(
            p.count % self.rows == 0 for p in self.c.rows
        )
        # What vectors and the last strip of rows read past the end of the last plane. It is zero: what else may lie
        # there, denormal numbers say, would cost hundreds of cycles a vector.
        self.slack = 0 if self.direct else max(0, max(map(self._end, bundles(self.c)), default=0) - self.plane)

    def emit(self) -> list[tirx.Stmt]:
        """The stages: a padded copy where one is shared, then the contraction."""
        c = self.c
        stages: list[tirx.Stmt] = []
        padded = None
        if not self.direct and not self.local_pad and not self.bare:
            channels = c.in_channels * c.groups
            padded = tirx.decl_buffer((c.batch * channels * self.plane + self.slack,), str(c.source.dtype), "padded")

            def copy(index: Expr) -> tirx.Stmt:
                n, channel = b.unravel(index, (c.batch, channels))
                return self._pad_plane(padded, index * self.plane, n, channel)

            stages += [b.allocate(padded), self._parallel("plane", c.batch * channels, copy)]
            stages.append(self._zeros(padded, c.batch * channels * self.plane))
        most = max(p.count for p in c.rows)
        strips = -(-most // self.rows) if not self.direct else self._direct_strips()
        # A padded plane of its own serves all strips of a depthwise task.
        extents = (c.batch, c.out_channels // self.channels, 1 if self.local_pad else strips)

        def task(index: Expr) -> tirx.Stmt:
            n, channel, strip = b.unravel(index, extents)
            (n, channel, strip), bound = b.bind_all(n=n, channel=channel, strip=strip)
            return b.seq([*bound, self._task(n, channel, strip, padded, strips)])

        return [*stages, self._parallel("task", math.prod(extents), task)]

    def _tiles(self, phases: list[Pair]) -> tuple[int, int]:
        """The output pixels of a strip, with those between its rows: as whole tiles, and pixels left of them."""
        rows, columns = phases[0]
        pixels = (min(self.rows, rows.count) - 1) * self.pitch + columns.count
        whole, rest = divmod(pixels, self.vectors * self.lanes)
        return whole, rest if self.bare else -(-rest // self.lanes) * self.lanes

    def _end(self, phases: list[Pair]) -> int:
        """Where in a padded plane the last strip of phases that read the same input ends to read."""
        rows, columns = phases[0]
        whole, rest = self._tiles(phases)
        last = (-(-rows.count // self.rows) - 1) * self.rows
        ends = [0]
        for ky in range(rows.taps):
            for kx in range(columns.taps):
                (py, dy), (px, dx) = self.y.part(rows, ky), self.x.part(columns, kx)
                start = (py * self.x.step + px) * self.y.length * self.pitch
                ends.append(start + (last + dy) * self.pitch + dx + whole * self.vectors * self.lanes + rest)
        return int(max(ends))

    def _zeros(self, padded: tirx.Buffer, start: int) -> tirx.Stmt:
        zero = b.const(0, str(padded.dtype))
        return b.vector_run(self.slack, self.lanes, lambda i: b.store(padded, zero, start + i))

    def _parallel(self, name: str, extent: int, body: b.Body) -> tirx.Stmt:
        return b.parallel(name, extent, body, enabled=self.threads > 1 and self.c.flops > 50_000)

    def _pad_plane(self, out: tirx.Buffer, base: Expr, n: Expr, channel: Expr) -> tirx.Stmt:
        """One channel of the input with its margins, one interleaved part after the other, at `base` of `out`."""
        y_axis, x_axis, zero = self.y, self.x, b.const(0, str(out.dtype))
        parts = []
        for py in range(y_axis.step):
            for px in range(x_axis.step):
                start = base + (py * x_axis.step + px) * y_axis.length * self.pitch
                top, bottom = y_axis.inside(py)
                left, right = x_axis.inside(px)

                def fill(row: Expr, low: int = 0, high: int = self.pitch, start: Expr = start) -> tirx.Stmt:
                    return b.vector_run(
                        high - low, self.lanes, lambda i: b.store(out, zero, start + row * self.pitch + (i + low))
                    )

                def copy(
                    row: Expr,
                    start: Expr = start,
                    py: int = py,
                    px: int = px,
                    left: int = left,
                    right: int = right,
                    zeros: Callable[[Expr, int, int], tirx.Stmt] = fill,
                ) -> tirx.Stmt:
                    y = y_axis.input(row, py)
                    middle = b.vector_run(
                        right - left,
                        self.lanes,
                        lambda i: b.store(
                            out,
                            self.c.data(n, channel, y, x_axis.input(i + left, px)).astype(str(out.dtype)),
                            start + row * self.pitch + (i + left),
                        ),
                    )
                    return b.seq([zeros(row, 0, left), middle, zeros(row, right, self.pitch)])

                parts.append(b.loop("row", top, fill))
                parts.append(b.loop("row", bottom - top, copy, start=top))
                parts.append(b.loop("row", y_axis.length - bottom, fill, start=bottom))
        return b.seq(parts)

    def _direct_strips(self) -> int:
        return -(-self.c.width // (self.vectors * self.lanes))

    def _task(self, n: Expr, tile: Expr, strip: Expr, padded: tirx.Buffer | None, strips: int) -> tirx.Stmt:
        first = tile * self.channels
        group = first // self.c.out_per_group if self.c.groups > 1 else 0
        if self.direct:
            return self._direct(n, first, group, strip, strips)
        statements: list[tirx.Stmt] = []
        if self.local_pad and not self.bare:
            padded = b.thread_scratch("padded", self.plane + self.slack, str(self.c.source.dtype))
            statements += [b.allocate(padded), self._pad_plane(padded, 0, n, group * self.c.in_channels)]
            statements.append(self._zeros(padded, self.plane))

        def rows(at: Expr) -> tirx.Stmt:
            return b.seq(self._rows(n, first, group, at, padded, phases) for phases in bundles(self.c))

        statements.append(b.loop("strip", strips, rows) if self.local_pad else rows(strip))
        return b.seq(statements)

    def _rows(
        self, n: Expr, first: Expr, group: Expr, strip: Expr, padded: tirx.Buffer | None, phases: list[Pair]
    ) -> tirx.Stmt:
        """`self.rows` output rows of phases that read the same input, by way of a scratch plane for each of them."""
        c = self.c
        rows, columns = phases[0]
        count = min(self.rows, rows.count)
        step = self.vectors * self.lanes
        whole, rest = self._tiles(phases)
        size = whole * step + rest
        # Whole vectors are read from the last row as well.
        scratch = b.thread_scratch("scratch", len(phases) * self.channels * size + self.lanes, c.dtype)
        row0 = strip * self.rows

        def tile(start: Expr, width: int) -> tirx.Stmt:
            def save(m: Expr, i: Expr, value: tirx.Expr) -> tirx.Stmt:
                return b.store(scratch, value, m * size + start + i)

            def element(i: Expr, ky: Expr, kx: Expr, pixel: Expr) -> tirx.Expr:
                (py, dy), (px, dx) = self.y.part(rows, ky), self.x.part(columns, kx)
                channel = group * c.in_channels + i
                if padded is None:
                    # The plane is contiguous, so a column may count on past the end of its row.
                    return c.data(n, channel, row0 + dy, start + pixel + dx)
                channel = 0 if self.local_pad else n * (c.in_channels * c.groups) + channel
                plane = channel * self.plane + (py * self.x.step + px) * (self.y.length * self.pitch)
                return b.load(padded, plane + (row0 + dy) * self.pitch + dx + start + pixel).astype(c.dtype)

            return self._accumulate(n, first, width, phases, element, save)

        def finish(number: int, m: Expr, r: Expr) -> tirx.Stmt:
            y_phase, x_phase = phases[number]

            def pixel(q: Expr) -> tirx.Stmt:
                y = (row0 + r) * y_phase.step + y_phase.start
                indices = c.out_indices(n, first + m, y, q * x_phase.step + x_phase.start)
                value = b.load(scratch, (number * self.channels + m) * size + r * self.pitch + q)
                return b.seq(b.store(o, v, *indices) for o, v in self.epilogue.apply(value, indices))

            line = b.vector_run(columns.count, self.lanes, pixel)
            if rows.count % self.rows == 0:
                return line
            return tirx.IfThenElse(row0 + r < rows.count, line, None)

        body = [b.allocate(scratch)]
        if whole:
            body.append(b.loop("run", whole, lambda i: tile(i * step, step)))
        body += [tile(whole * step + start, width) for start, width in _pieces(rest, self.lanes)]

        def finish_pair(even: int, odd: int, m: Expr, r: Expr) -> tirx.Stmt:
            """Two phases of the columns that alternate in the output: a row of both, stored at once."""
            y_phase, x_phase = phases[even]
            row = b.registers("row", 2 * -(-columns.count // self.lanes) * self.lanes, c.dtype)
            starts = [(number * self.channels + m) * size + r * self.pitch for number in (even, odd)]
            y = (row0 + r) * y_phase.step + y_phase.start

            def pixel(x: Expr) -> tirx.Stmt:
                indices = c.out_indices(n, first + m, y, x + x_phase.start)
                return b.seq(b.store(o, v, *indices) for o, v in self.epilogue.apply(b.load(row, x), indices))

            line = b.seq(
                [
                    b.allocate(row),
                    _interleave(scratch, starts, row, columns.count, self.lanes),
                    b.vector_run(2 * columns.count, self.lanes, pixel),
                ]
            )
            return line if rows.count % self.rows == 0 else tirx.IfThenElse(row0 + r < rows.count, line, None)

        def channels(make: Callable[..., tirx.Stmt], *numbers: int) -> tirx.Stmt:
            return b.loop("m", self.channels, lambda m: b.loop("r", count, lambda r: make(*numbers, m, r)))

        pairs = alternating(phases)
        body += [channels(finish_pair, even, odd) for even, odd in pairs]
        alone = set(range(len(phases))) - {number for pair in pairs for number in pair}
        body += [channels(finish, number) for number in sorted(alone)]
        return b.seq(body)

    def _direct(self, n: Expr, first: Expr, group: Expr, strip: Expr, strips: int) -> tirx.Stmt:
        """Pointwise: vectors of the input's own pixels, stored through the epilogue; narrower vectors at the end."""
        c, step = self.c, self.vectors * self.lanes
        phases = [(c.rows[0], c.columns[0])]

        def piece(start: Expr, width: int) -> tirx.Stmt:
            def element(i: Expr, _: Expr, __: Expr, pixel: Expr) -> tirx.Expr:
                return c.data(n, group * c.in_channels + i, 0, start + pixel)

            def save(m: Expr, i: Expr, value: tirx.Expr) -> tirx.Stmt:
                indices = c.out_indices(n, first + m, 0, start + i)
                return b.seq(b.store(o, v, *indices) for o, v in self.epilogue.apply(value, indices))

            return self._accumulate(n, first, width, phases, element, save)

        whole, rest = divmod(c.width, step)
        if not rest:
            return piece(strip * step, step)
        tail = b.seq(piece(whole * step + start, width) for start, width in _pieces(rest, self.lanes))
        return tail if strips == 1 else tirx.IfThenElse(strip < whole, piece(strip * step, step), tail)

    def _accumulate(
        self,
        n: Expr,
        first: Expr,
        width: int,
        phases: list[Pair],
        element: Callable[[Expr, Expr, Expr, Expr], tirx.Expr],
        save: Callable[[Expr, Expr, tirx.Expr], tirx.Stmt],
    ) -> tirx.Stmt:
        """Sums in registers, `channels` by `width` for every phase: vectors of pixels against broadcast weights.

        Row m of the sums is output channel m % `channels` of phase m // `channels`; all phases read the same input.
        """
        c = self.c
        rows, columns = phases[0]
        sums = [b.registers("sum", self.channels * width, c.dtype) for _ in phases]
        lanes = min(self.lanes, width)

        def each(body: Callable[[Expr, Expr], tirx.Stmt]) -> tirx.Stmt:
            def vector(m: Expr, u: Expr) -> tirx.Stmt:
                return b.vectorized("v", lanes, lambda v: body(m, u * lanes + v))

            return b.unrolled("m", self.channels, lambda m: b.unrolled("u", width // lanes, lambda u: vector(m, u)))

        def clear(acc: tirx.Buffer, m: Expr, p: Expr) -> tirx.Stmt:
            return b.store(acc, b.const(0, c.dtype), m * width + p)

        def step(acc: tirx.Buffer, phase: Pair, i: Expr, ky: Expr, kx: Expr, m: Expr, p: Expr) -> tirx.Stmt:
            weight = c.weight(n, first + m, i, phase[0].kernel(ky, 0), phase[1].kernel(kx, 0))
            return b.store(acc, b.load(acc, m * width + p) + element(i, ky, kx, p) * weight, m * width + p)

        def multiply(i: Expr, ky: Expr, kx: Expr) -> tirx.Stmt:
            return b.seq(each(partial(step, acc, phase, i, ky, kx)) for acc, phase in zip(sums, phases, strict=True))

        def taps(i: Expr) -> tirx.Stmt:
            return b.loop("ky", rows.taps, lambda ky: b.unrolled("kx", columns.taps, lambda kx: multiply(i, ky, kx)))

        def finish(number: int, acc: tirx.Buffer, m: Expr, p: Expr) -> tirx.Stmt:
            return save(number * self.channels + m, p, b.load(acc, m * width + p))

        statements = [b.allocate(acc) for acc in sums]
        statements += [each(partial(clear, acc)) for acc in sums]
        if rows.taps and columns.taps:
            statements.append(b.loop("i", c.in_channels, taps))
        statements += [each(partial(finish, number, acc)) for number, acc in enumerate(sums)]
        return b.seq(statements)


def _interleave(source: tirx.Buffer, starts: Sequence[Expr], out: tirx.Buffer, count: int, lanes: int) -> tirx.Stmt:
    """`count` elements from either start of `source` in turn, in whole vectors."""

    def vectors(i: Expr) -> tirx.Stmt:
        pair = [tirx.BufferLoad(source, [tirx.Ramp(start + i * lanes, 1, lanes)]) for start in starts]
        halves = []
        for half in range(2):
            picks = [(half * lanes + j) // 2 + (j % 2) * lanes for j in range(lanes)]
            at = tirx.Ramp(i * (2 * lanes) + half * lanes, 1, lanes)
            halves.append(tirx.BufferStore(out, tirx.Shuffle(pair, picks), [at]))
        return b.seq(halves)

    return (
        b.unrolled("i", -(-count // lanes), vectors) if count <= 4 * lanes else b.loop("i", -(-count // lanes), vectors)
    )


def _pieces(extent: int, lanes: int) -> list[tuple[int, int]]:
    """(start, width) of whole vectors together, then ever narrower ones, that cover `extent`."""
    out, start = [], 0
    while extent:
        width = extent // lanes * lanes or 1 << (extent.bit_length() - 1)
        out.append((start, width))
        start, extent = start + width, extent - width
    return out
