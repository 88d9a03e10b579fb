"""The inner loops that a candidate will most likely get: the tile with the fewest estimated cycles.

The same arithmetic as the templates use to order their schedules, on plain numbers and with the machine's own figures:
multiply-adds and loads at two a cycle, the latency of an accumulation, a fixed part per tile, uneven shares of threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from layoutsearch.cost.machine import Machine
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.facts import ConvFacts
from layoutsearch.layout.layout import Layout
from layoutsearch.schedule.contraction import Phase, conv_phases, transposed_phases

_LATENCY = 4.0  # cycles of a multiply-add
_VECTORS = (1, 2, 3, 4, 6, 8, 12, 16)
_CHANNELS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14)


@dataclass(frozen=True)
class Tile:
    """The inner loops of a contraction.

    Attributes:
        cycles: of one core, were the work shared out evenly at `imbalance`.
        vectors: vectors of the tile along its vector axis.
        rows: accumulators along the other axis: pixels (`channels`), output channels (`flat`).
        lanes: elements of a vector that are used.
        tasks: pieces for the threads.
        imbalance: work of the busiest thread over the mean.
        flat: whether the vectors run over pixels.
    """

    cycles: float
    vectors: int
    rows: int
    lanes: int
    tasks: int
    imbalance: float
    flat: bool


@dataclass(frozen=True)
class _Sum:
    """A contraction in numbers."""

    batch: int
    out_channels: int
    in_channels: int  # of one group
    groups: int
    rows: tuple[Phase, ...]
    columns: tuple[Phase, ...]
    width: int
    pointwise: bool

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.in_channels == 1 and self.out_channels == self.groups


@lru_cache(maxsize=65536)
def best_tile(conv: ConvFacts, transposed: bool, choice: Candidate, machine: Machine) -> Tile:
    """The cheapest tile of a convolution under a candidate."""
    c = _sum(conv, transposed)
    if choice.winograd:
        return _winograd(c, conv, choice, machine)
    if choice.data.axes[-1].letter == choice.out.axes[-1].letter == "W":
        return _flat(c, machine)
    return _channels(c, choice, machine)


@lru_cache(maxsize=1024)
def matmul_tile(batch: int, rows: int, columns: int, depth: int, machine: Machine) -> Tile:
    """The cheapest tile of a matrix product of (rows, depth) and (depth, columns)."""
    one = Phase(0, 1, 1, 1, 1, 0, 1, 0, 1)
    pixels = Phase(0, 1, rows, 1, 1, 0, 1, 0, 1)
    c = _Sum(batch, columns, depth, 1, (one,), (pixels,), rows, True)
    return _channels(c, Candidate.uniform(Layout("NHWC")), machine)


def _sum(conv: ConvFacts, transposed: bool) -> _Sum:
    phases = []
    for axis in (0, 1):
        out, size, kernel = conv.out_size[axis], conv.in_size[axis], conv.kernel[axis]
        stride, dilation = conv.strides[axis], conv.dilation[axis]
        reach = (kernel - 1) * dilation + 1
        if transposed:
            pad = max(0, ((size - 1) * stride + reach - out + 1) // 2)
            phases.append(tuple(transposed_phases(out, kernel, stride, pad, dilation)))
        else:
            pad = max(0, ((out - 1) * stride + reach - size + 1) // 2)
            phases.append(tuple(conv_phases(out, kernel, stride, pad, dilation)))
    rows, columns = phases
    width, pointwise = conv.in_size[1], False
    if not transposed and conv.kernel == (1, 1) and conv.strides == (1, 1) and conv.in_size == conv.out_size:
        pixels = math.prod(conv.out_size)
        rows, columns = (Phase(0, 1, 1, 1, 1, 0, 1, 0, 1),), (Phase(0, 1, pixels, 1, 1, 0, 1, 0, 1),)
        width, pointwise = pixels, True
    return _Sum(
        conv.batch, conv.out_channels, conv.in_channels // conv.groups, conv.groups, rows, columns, width, pointwise
    )


def _imbalance(tasks: int, threads: int) -> float:
    return -(-tasks // threads) * threads / max(1, tasks)


def vector_width(span: int, blocks: tuple[int, ...], lanes: int) -> int:
    """Lanes of the widest vector along `span` channels that divides every block."""
    if not blocks:
        return min(lanes, 1 << (span.bit_length() - 1))
    return max(w for w in range(1, lanes + 1) if all(block % w == 0 for block in blocks) and (w & (w - 1) == 0))


def _channels(c: _Sum, choice: Candidate, machine: Machine) -> Tile:
    out, kernel = choice.out.block("C"), choice.kernel.block("O") if choice.kernel else 1
    blocks = tuple(b for b in (out, kernel, choice.data.block("C") if c.depthwise else 1) if b > 1)
    own, spaces, span = c.depthwise, 1, c.out_channels
    if c.groups > 1 and not own:
        grouped = c.out_channels // c.groups
        if vector_width(grouped, (*blocks, grouped) if blocks else (), machine.lanes) >= min(4, machine.lanes):
            spaces, span = c.groups, grouped
    lanes = vector_width(span, (*blocks, span) if blocks else (), machine.lanes)
    if c.groups == 1 and blocks == (kernel,) and kernel > machine.lanes and kernel % machine.lanes:
        # Weights packed by some vectors and a rest.
        spaces, span, lanes = c.out_channels // kernel, kernel, machine.lanes
    full, rest = divmod(span, lanes)
    registers = machine.registers // 2 + 1 if own else machine.registers - (1 if machine.broadcast_operand else 2)
    columns = max(p.count for p in c.columns)
    best: Tile | None = None
    # The narrower vectors of what is left over may join the last tile.
    most = full + rest.bit_count()
    for vectors in sorted(
        {*(v for v in _VECTORS if v <= max(1, full)), *([most] if full < most <= _VECTORS[-1] else [])}
    ):
        tiles = (-(-full // vectors) if rest == 0 else full // vectors + 1) * spaces
        held = 1 if own else vectors
        for rows in range(1, min(columns, max(1, (registers - held) // vectors)) + 1):
            height = sum(p.count for p in c.rows)
            tasks = tiles * c.batch * height * (-(-c.columns[0].count // rows) if height == 1 else 1)
            uneven = _imbalance(tasks, machine.threads)
            cycles = _row_cycles(c, own, vectors, rows) * tiles * c.batch * height * uneven / machine.threads
            if best is None or cycles < best.cycles:
                best = Tile(cycles, vectors, rows, lanes, tasks, uneven, False)
    assert best is not None
    return best


def _row_cycles(c: _Sum, own: bool, vectors: int, tile: int) -> float:
    """Cycles of one row of the output for one tile of channels."""
    taps = sum(p.taps * p.count for p in c.rows) / max(1, sum(p.count for p in c.rows))
    cycles = 0.0
    for phase in c.columns:
        whole, rest = divmod(phase.count, tile)
        for size, times in ((tile, whole), (rest, 1 if rest else 0)):
            if not times:
                continue
            if own:
                window = (size - 1) * min(phase.in_step, phase.taps) + phase.taps
                work = max(size * vectors * phase.taps / 2, vectors * (window + phase.taps) / 2, _LATENCY * phase.taps)
                step = work + 2
            else:
                work = max(size * vectors / 2, (size + vectors) / 2, _LATENCY)
                step = phase.taps * c.in_channels * (work + 0.5)
            cycles += times * (step * taps + size * vectors * 1.5 + 10)
    return cycles


def _winograd(c: _Sum, conv: ConvFacts, choice: Candidate, machine: Machine) -> Tile:
    """Products of a tile of tiles by vectors of channels, point by point, and the transforms before and behind."""
    m = choice.winograd
    points = (m + 2) ** 2
    block = choice.kernel.block("O") if choice.kernel else 1
    lanes = vector_width(c.out_channels, (block,) if block > 1 else (), machine.lanes)
    full = max(1, c.out_channels // lanes)
    tiles = conv.batch * math.prod(-(-extent // m) for extent in conv.out_size)
    chunks = c.in_channels / machine.lanes
    best: Tile | None = None
    for vectors in (v for v in _VECTORS if v <= full):
        strips = -(-full // vectors)
        for rows in range(1, min(tiles, max(1, (machine.registers - 1 - vectors) // vectors)) + 1):
            work = max(rows * vectors / 2, (rows + vectors) / 2, _LATENCY) + 0.5
            products = points * strips * -(-tiles // rows) * (c.in_channels * work + rows * vectors + 12)
            turned = tiles * (chunks * points * 3 + strips * vectors * (points * 2 + m * m * 2))
            tasks = strips * -(-tiles // rows)
            uneven = _imbalance(tasks, machine.threads)
            cycles = (products + turned) * uneven / machine.threads
            if best is None or cycles < best.cycles:
                best = Tile(cycles, vectors, rows, lanes, tasks, uneven, False)
    assert best is not None
    return best


def _flat(c: _Sum, machine: Machine) -> Tile:
    height = max(p.count for p in c.rows)
    together = len(c.columns) * len(c.rows)
    pitch = c.width + max(p.taps for p in c.columns) - 1
    taps = sum(p.taps for p in c.rows) * sum(p.taps for p in c.columns) * c.in_channels
    best: Tile | None = None
    for channels in (d for d in _CHANNELS if (c.out_channels // c.groups) % d == 0):
        for vectors in (1, 2, 3, 4, 6, 8):
            if channels * vectors * together + vectors + 1 > machine.registers and (channels, vectors) != (1, 1):
                continue
            for rows in sorted({min(height, r) for r in (1, 2, 4, 7, 8, 14, 16, 28, height)}):
                pixels = c.width if c.pointwise else (rows - 1) * pitch + c.columns[0].count
                tiles = -(-pixels // (vectors * machine.lanes))
                work = max(channels * vectors / 2, (channels + vectors / together) / 2, _LATENCY / together) + 0.5
                extra = 20.0 if c.pointwise else channels * vectors * 2.0 + 20
                task = tiles * (taps * work + extra) + (0 if c.pointwise else 60 + 8 * rows * channels)
                tasks = c.batch * (c.out_channels // channels) * (1 if c.pointwise else -(-height // rows))
                pieces = tasks * tiles if c.pointwise else c.batch * c.out_channels if c.depthwise else tasks
                uneven = _imbalance(pieces, machine.threads)
                cycles = task * tasks * uneven / machine.threads
                if best is None or cycles < best.cycles:
                    best = Tile(cycles, vectors, channels, machine.lanes, pieces, uneven, True)
    assert best is not None
    return best
