"""Which schedules of the `winograd` template to try, in which order: by estimated cycles of its three steps."""

from __future__ import annotations

from layoutsearch.schedule.contraction import Contraction
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.templates.lanes import Lanes
from layoutsearch.schedule.templates.winograd import Tiling
from layoutsearch.schedule.value import Schedule


def schedules(c: Contraction, target: TargetInfo) -> list[Schedule]:
    """Legal schedules, best guesses first, the first few different in every decision."""
    lanes = Lanes.of(c, target)
    points = (c.winograd + 2) ** 2
    total = Tiling.of(c, 1, 1).total
    # Both the transformed inputs of a block and a part of the weights should stay in the second cache.
    held = max(1, target.l2_bytes // 2 // (4 * points * c.in_channels))
    found: dict[Schedule, float] = {}
    for vectors in (v for v in (1, 2, 3, 4, 6) if v <= max(1, lanes.full)):
        registers = target.registers - (1 if target.broadcast_operand else 2)
        for tile in range(1, min(total, max(1, (registers - vectors) // vectors)) + 1):
            for strips in (1, 2, 4, 8, 16):
                if strips > 1 and tile * (strips // 2) >= total:
                    break
                for outer in ("channels", "tiles"):
                    tiling = Tiling.of(c, tile, strips)
                    if tiling.tile != tile or (outer == "tiles" and tiling.blocks == 1 and target.threads > 1):
                        continue
                    schedule = Schedule.make("winograd", tile=tile, vectors=vectors, strips=strips, outer=outer)
                    found[schedule] = _cost(c, lanes, tiling, vectors, outer, held, target)
    ranked = sorted(found, key=lambda s: found[s])
    out: list[Schedule] = []
    seen: dict[tuple[object, ...], int] = {}
    for schedule in ranked:
        kind = (schedule["outer"], schedule["vectors"])
        if seen.get(kind, 0) < 4:
            seen[kind] = seen.get(kind, 0) + 1
            out.append(schedule)
    return out[:24]


def _cost(
    c: Contraction, lanes: Lanes, tiling: Tiling, vectors: int, outer: str, held: int, target: TargetInfo
) -> float:
    """Cycles, roughly: multiply-adds and loads at two a cycle, transforms, weights again for every block."""
    points, m, threads = (c.winograd + 2) ** 2, c.winograd, target.threads
    channel_tiles = lanes.tiles(vectors)
    covered = tiling.blocks * tiling.strips
    step = max(tiling.tile * vectors / 2, (tiling.tile + vectors) / 2, 4.0) + 0.5
    products = points * channel_tiles * covered * (c.in_channels * step + tiling.tile * vectors + 12)
    tiles = tiling.blocks * tiling.block if outer == "tiles" else tiling.total
    inputs = tiles * c.in_channels / target.lanes * points * 3
    outputs = tiling.blocks * tiling.block * c.out_channels / lanes.width * (points * 2 + m * m * 2)
    # A vector of weights from the second cache takes about as long as two multiply-adds, from further out as four.
    readers = threads if outer == "tiles" else 1
    weights = points * c.in_channels * c.out_channels / lanes.width
    fits = weights * lanes.width * 4 <= target.l2_bytes // 2
    again = weights * tiling.blocks * (0.5 if fits else 2.0) + weights * readers * 2.0
    spills = 0.0
    in_cache = tiling.block if outer == "tiles" else tiling.total
    if in_cache > held:
        again_inputs = points * in_cache * c.in_channels / target.lanes
        spills = again_inputs * (channel_tiles if outer == "channels" else channel_tiles) * tiling.blocks * 1.0
        spills /= tiling.blocks if outer == "channels" else 1
    tasks = tiling.blocks if outer == "tiles" else channel_tiles * tiling.blocks
    imbalance = -(-tasks // threads) * threads / tasks
    return (products + outputs + again + spills) * imbalance + inputs * (imbalance if outer == "tiles" else 1.0)
