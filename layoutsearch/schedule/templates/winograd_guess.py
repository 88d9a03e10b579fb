"""Which schedules of the `winograd` template to try, in which order: by estimated cycles of a thread.

Products are bound by multiply-adds or loads; what decides between schedules beyond that is where the transformed inputs
and the weights come from each time they are walked.
"""

from __future__ import annotations

from layoutsearch.schedule.contraction import Contraction
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.templates.lanes import Lanes
from layoutsearch.schedule.templates.winograd import Tiling
from layoutsearch.schedule.value import Schedule

# Cycles by which a vector costs more than from the first cache: from the second, from another core's or the third, cold
# from memory that all threads share.
_SECOND, _THIRD, _COLD = 0.5, 5.0, 8.0
_VECTORS = (1, 2, 3, 4, 6)
_STRIPS = (1, 2, 4, 8, 16)
_ALIKE = 4
_MOST = 24


def schedules(c: Contraction, target: TargetInfo) -> list[Schedule]:
    """Legal schedules, best guesses first; of those alike in order and vectors, the best few."""
    lanes = Lanes.of(c, target)
    total = Tiling.of(c, 1, 1).total
    registers = target.registers - (1 if target.broadcast_operand else 2)
    found: dict[Schedule, float] = {}
    for vectors in lanes.numbers(_VECTORS):
        for tile in range(1, min(total, max(1, (registers - vectors) // vectors)) + 1):
            for strips in (s for s in _STRIPS if s == 1 or tile * s < 2 * total):
                tiling = Tiling.of(c, tile, strips)
                if tiling.tile != tile:
                    continue
                for outer in ("channels", "tiles"):
                    if outer == "tiles" and tiling.blocks < target.threads:
                        continue
                    schedule = Schedule.make("winograd", tile=tile, vectors=vectors, strips=strips, outer=outer)
                    found[schedule] = _cycles(c, lanes, tiling, vectors, outer == "channels", target)
    out: list[Schedule] = []
    seen: dict[tuple[object, ...], int] = {}
    for schedule in sorted(found, key=lambda s: found[s]):
        kind = (schedule["outer"], schedule["vectors"])
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= _ALIKE:
            out.append(schedule)
    return out[:_MOST]


def _cycles(c: Contraction, lanes: Lanes, tiling: Tiling, vectors: int, shared: bool, target: TargetInfo) -> float:
    """Estimated cycles of the busiest thread."""
    points, threads = (c.winograd + 2) ** 2, target.threads
    channel_tiles, blocks = lanes.tiles(vectors), tiling.blocks
    chunks = c.in_channels / target.lanes
    # What one thread does: (tiles of channels, block) pairs, blocks whose inputs it transforms.
    pairs = -(-channel_tiles * blocks // threads) if shared else -(-blocks // threads) * channel_tiles
    step = max(tiling.tile * vectors / 2, (tiling.tile + vectors) / 2, 4.0) + 0.5
    products = pairs * tiling.strips * points * (c.in_channels * step + tiling.tile * vectors + 20)
    outputs = pairs * tiling.block * vectors * points * 3.0
    transformed = tiling.total / threads if shared else -(-blocks // threads) * tiling.block
    inputs = transformed * chunks * points * 4.0
    return products + outputs + inputs + _traffic(c, lanes, tiling, channel_tiles, pairs, shared, target)


def _traffic(
    c: Contraction,
    lanes: Lanes,
    tiling: Tiling,
    channel_tiles: int,
    pairs: int,
    shared: bool,
    target: TargetInfo,
) -> float:
    """Cycles of one thread for vectors that are not in its first cache."""
    points, threads, half = (c.winograd + 2) ** 2, target.threads, target.l2_bytes // 2
    vector_bytes = 4 * target.lanes
    held = points * (tiling.total if shared else tiling.block) * c.in_channels / target.lanes
    walked = points * tiling.block * c.in_channels / target.lanes
    near = _SECOND if held * vector_bytes <= half else _THIRD
    inputs = pairs * walked * near
    if shared:
        # Once everything comes from the core that transformed it.
        inputs += held * (1 - 1 / threads) * _THIRD
    weights = points * c.in_channels * c.out_channels / lanes.width
    own = weights / threads if shared else weights
    again = max(0.0, pairs / channel_tiles - (1 / threads if shared else 1)) * weights
    return inputs + own * _COLD + again * (_SECOND if own * 4 * lanes.width <= half else _THIRD)
