"""Which schedules of the `channels` template to try, in which order: by the estimated cycles of the inner loops."""

from __future__ import annotations

from layoutsearch.schedule.contraction import Contraction
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.templates.lanes import Lanes
from layoutsearch.schedule.value import Schedule

_VECTORS = (1, 2, 3, 4, 6, 8, 12, 16)
# Of a product with one row, whose weights are used once: the longer the piece of a row of weights, the closer to what
# the memory gives, though the sums leave the registers (of 34 GB/s, 16 vectors reached 24, 64 29, and 128 32).
_STREAMED = (32, 64, 128)


def schedules(c: Contraction, target: TargetInfo) -> list[Schedule]:
    """Legal schedules, best guesses first; the first few differ in every decision, so that a short tuning sees them."""
    fused, lanes = c.fused(), Lanes.of(c, target)
    has_taps = max(p.taps for p in fused.columns) > 1
    by_channels = "panels" if _has_panels(fused, lanes, target) else "channels"
    orders: tuple[str, ...] = (
        ("rows", by_channels) if _starts_with_rows(fused, lanes, target) else (by_channels, "rows")
    )
    if _is_streamed(fused, target):
        # There is nothing outside of the tiles of channels, and no panel is used twice.
        orders = ("rows",)
    flows = [("taps_outer", _ranked(fused, lanes, target, _short(fused, lanes)))]
    if has_taps and fused.reduce_block > 1:
        flows.append(("taps_inner", _ranked(fused, lanes, target, True)))
        if _short(fused, lanes):
            flows.reverse()
    out: list[Schedule] = []
    for rank in range(max(len(tiles) for _, tiles in flows)):
        # The second order of the outer loops follows one rank behind.
        for at, order in zip((rank, rank - 1), orders, strict=False):
            for reduce, tiles in flows:
                if 0 <= at < len(tiles):
                    vectors, tile = tiles[at]
                    out.append(Schedule.make("channels", tile=tile, vectors=vectors, reduce=reduce, outer=order))
    return out[:24]


def tiles(c: Contraction, target: TargetInfo) -> list[tuple[int, int]]:
    """(vectors, tile) pairs for loops over taps outside of those over channels, best guesses first."""
    fused, lanes = c.fused(), Lanes.of(c, target)
    return _ranked(fused, lanes, target, _short(fused, lanes))


def _is_streamed(c: Contraction, target: TargetInfo) -> bool:
    """Whether each weight is used once and comes from beyond the second cache, so that only its way here counts."""
    one = c.batch == 1 and sum(p.count for p in c.rows) == 1 and sum(p.count for p in c.columns) == 1
    return one and _weight_bytes(c) > target.l2_bytes


def _weight_bytes(c: Contraction) -> int:
    return 4 * c.out_channels * c.in_channels * sum(p.taps for p in c.rows) * sum(p.taps for p in c.columns)


def _short(c: Contraction, lanes: Lanes) -> bool:
    """Whether the innermost loop is short enough for LLVM to unroll it whole, which costs registers."""
    return lanes.mode == "own" or c.reduce_block <= 4


def _has_panels(c: Contraction, lanes: Lanes, target: TargetInfo) -> bool:
    """Whether panels of weights apply, and weights are more than the first cache keeps anyway."""
    rows = c.rows if c.merged_rows is None else (c.merged_rows,)
    return len(rows) == len(c.columns) == 1 and lanes.mode == "broadcast" and _weight_bytes(c) > target.l1_bytes


def _starts_with_rows(c: Contraction, lanes: Lanes, target: TargetInfo) -> bool:
    """Rows outermost where all weights stay in the cache next to the core, else each thread keeps to its channels."""
    return lanes.mode != "own" and _weight_bytes(c) * 4 <= target.l2_bytes


def _ranked(c: Contraction, lanes: Lanes, target: TargetInfo, tight: bool) -> list[tuple[int, int]]:
    """(vectors, tile) pairs by estimated cost, at most three tiles of one number of vectors in the first dozen.

    Args:
        c: The contraction, fused.
        lanes: Its vectors.
        target: The machine.
        tight: Keep a quarter of the registers free, for bodies that LLVM unrolls and reorders.
    """
    columns = max(p.count for p in c.columns)
    if lanes.mode == "own":
        # The window of inputs that the taps share takes the other half.
        registers = target.registers // 2 + 1
    elif tight:
        registers = target.registers * 3 // 4
    else:
        registers = target.registers - (1 if target.broadcast_operand else 2)
    ranked: list[tuple[float, int, int]] = []
    for vectors in lanes.numbers((*_VECTORS, *_STREAMED) if _is_streamed(c, target) else _VECTORS):
        held = 1 if lanes.mode == "own" else vectors
        for tile in range(1, min(columns, max(1, (registers - held) // vectors)) + 1):
            ranked.append((_cost(c, lanes, vectors, tile, target), vectors, tile))
    ranked.sort()
    out: list[tuple[int, int]] = []
    for _, vectors, tile in ranked:
        if sum(v == vectors for v, _ in out) < 3:
            out.append((vectors, tile))
    return out[:12]


def _cost(c: Contraction, lanes: Lanes, vectors: int, tile: int, target: TargetInfo) -> float:
    """Cycles, roughly: multiply-adds at two a cycle against loads at two a cycle and latency; per tile a fixed part."""
    tiles = lanes.tiles(vectors) * lanes.spaces
    row_taps = sum(p.taps * p.count for p in c.rows) / max(1, sum(p.count for p in c.rows))
    cycles = 0.0
    for phase in c.columns:
        whole, rest = divmod(phase.count, tile)
        for size, times in ((tile, whole), (rest, 1 if rest else 0)):
            if lanes.mode == "own":
                # The taps of a row share the inputs they have in common.
                window = (size - 1) * min(phase.in_step, phase.taps) + phase.taps
                step = max(size * vectors * phase.taps / 2, vectors * (window + phase.taps) / 2, 4.0 * phase.taps) + 2
            else:
                step = phase.taps * c.in_channels * (max(size * vectors / 2, (size + vectors) / 2, 4.0) + 0.5)
            cycles += times * (step * row_taps + size * vectors * 1.5 + 10)
    rows = sum(p.count for p in c.rows)
    tasks = tiles * c.batch * rows * (-(-c.columns[0].count // tile) if rows == 1 else 1)
    imbalance = -(-tasks // target.threads) * target.threads / tasks
    return cycles * tiles * c.batch * rows * imbalance
