"""Which schedules of the `flat` template to try, in which order: by the estimated cycles of the inner loops."""

from __future__ import annotations

from layoutsearch.schedule.contraction import Contraction
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.templates.planes import Margin, bundles
from layoutsearch.schedule.value import Schedule


def schedules(c: Contraction, target: TargetInfo) -> list[Schedule]:
    """Legal schedules, best guesses first."""
    fused = c.fused()
    height = max(p.count for p in fused.rows)
    together = max(len(bundle) for bundle in bundles(fused))
    pitch = Margin.of(fused.columns, fused.width).length
    ranked: list[tuple[float, Schedule]] = []
    for channels in (d for d in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14) if c.out_per_group % d == 0):
        for vectors in (1, 2, 3, 4, 6, 8):
            if channels * vectors * together + vectors + 1 > target.registers:
                continue
            for rows in sorted({min(height, r) for r in (1, 2, 4, 7, 8, 14, 16, 28, height)}):
                schedule = Schedule.make("flat", channels=channels, vectors=vectors, rows=rows)
                ranked.append((_cost(fused, channels, vectors, rows, pitch, target, together), schedule))
    ranked.sort(key=lambda pair: pair[0])
    out: list[Schedule] = []
    for _, schedule in ranked:
        # At most three row counts of one tile, so that a short tuning sees different tiles.
        same = [s for s in out if (s["channels"], s["vectors"]) == (schedule["channels"], schedule["vectors"])]
        if len(same) < 3:
            out.append(schedule)
    return out[:24]


def _cost(
    c: Contraction, channels: int, vectors: int, rows: int, pitch: int, target: TargetInfo, together: int
) -> float:
    """Cycles, roughly: multiply-adds and loads at two a cycle, scratch traffic, and the share of dropped pixels."""
    direct = c.pointwise
    step = vectors * target.lanes
    taps = sum(p.taps for p in c.rows) * sum(p.taps for p in c.columns) * c.in_channels
    height = max(p.count for p in c.rows)
    pixels = c.width if direct else (rows - 1) * pitch + c.columns[0].count
    tiles = -(-pixels // step)
    per_tap = max(channels * vectors / 2, (channels + vectors / together) / 2, 4.0 / together) + 0.5
    scratch = 0.0 if direct else channels * vectors * 2.0
    task = tiles * (taps * per_tap + scratch + 20) + (0 if direct else 60 + 8 * rows * channels)
    tasks = c.batch * (c.out_channels // channels) * (-(-height // rows) if not direct else 1)
    shared = tasks * tiles if direct else c.batch * c.out_channels if c.depthwise else tasks
    imbalance = -(-shared // target.threads) * target.threads / shared
    spill = 1.0 if direct or channels * pixels * 4 <= target.l1_bytes else 1.1
    return task * tasks * imbalance * spill
