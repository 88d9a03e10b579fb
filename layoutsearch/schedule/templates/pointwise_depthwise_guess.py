"""Which schedules of the `pointwise_depthwise` template to try, in which order."""

from __future__ import annotations

from dataclasses import replace

from layoutsearch.schedule.contraction import Contraction
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.templates import channels_guess
from layoutsearch.schedule.templates.pointwise_depthwise import reach, rows_read, shared_lanes
from layoutsearch.schedule.value import Schedule

_MOST = 12
_VECTORS = (2, 1, 4, 3)
# Of the second cache, which weights and the data of the first share.
_SHARE = 2


def schedules(
    pointwise: Contraction, depthwise: Contraction, target: TargetInfo, apart: tuple[Schedule | None, Schedule | None]
) -> list[Schedule]:
    """Legal schedules, best guesses first; none where the two have different vectors of channels."""
    lanes = shared_lanes(pointwise, depthwise, target)
    if lanes is None:
        return []
    # As it runs here: a row at a time.
    row = replace(
        pointwise,
        height=1,
        rows=(replace(pointwise.rows[0], count=1),),
        merged_rows=replace(pointwise.rows[0], count=1),
    )
    first, second = channels_guess.tiles(row, target), channels_guess.tiles(depthwise, target)
    ranked: list[tuple[float, Schedule]] = []
    for by_vectors, vectors in enumerate(v for v in _VECTORS if v <= lanes.most):
        tiles = [_best(known, guesses, vectors) for known, guesses in zip(apart, (first, second), strict=True)]
        channels = vectors * lanes.width
        for by_rows, rows in enumerate(_heights(depthwise, channels, lanes.tiles(vectors), target)):
            for one in tiles[0][:2]:
                for two in tiles[1][:2]:
                    rank = by_vectors + by_rows + 2 * tiles[0].index(one) + 2 * tiles[1].index(two)
                    knobs = {"rows": rows, "tile": min(one, pointwise.width), "vectors": vectors, "dw_tile": two}
                    ranked.append((rank, Schedule.make("pointwise_depthwise", **knobs)))
    return list(dict.fromkeys(s for _, s in sorted(ranked, key=lambda pair: pair[0])))[:_MOST]


def _best(known: Schedule | None, guesses: list[tuple[int, int]], vectors: int) -> list[int]:
    """Tiles for so many vectors, that of the known schedule first."""
    same = known is not None and known.template == "channels" and known.number("vectors") == vectors
    found = [known.number("tile")] if same and known is not None else []
    return list(dict.fromkeys([*found, *(tile for v, tile in guesses if v == vectors)])) or [1]


def _heights(depthwise: Contraction, channels: int, tiles: int, target: TargetInfo) -> list[int]:
    """Heights of a strip, by what is computed twice and what threads wait at the end."""
    rows = depthwise.rows[0]
    costs: dict[int, float] = {}
    for strips in range(1, rows.count + 1):
        height = -(-rows.count // strips)
        slab = min(depthwise.height, (height - 1) * rows.in_step + reach(rows)) * depthwise.width * channels * 4
        if slab * _SHARE > target.l2_bytes and height > 1:
            continue
        tasks = depthwise.batch * tiles * -(-rows.count // height)
        idle = -(-tasks // target.threads) * target.threads / tasks
        made = 0
        for start in range(0, rows.count, height):
            low, high = rows_read(rows, start, min(height, rows.count - start), depthwise.height)
            made += high - low
        costs.setdefault(height, idle * made)
    return sorted(costs, key=lambda h: (costs[h], -h))[:3]
