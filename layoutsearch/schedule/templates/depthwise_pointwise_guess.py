"""Which schedules of the `depthwise_pointwise` template to try, in which order."""

from __future__ import annotations

import math
from dataclasses import replace

from layoutsearch.schedule.contraction import Contraction
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.templates import channels_guess
from layoutsearch.schedule.value import Schedule

_MOST = 12
_ROWS = (1, 2, 3, 4, 6, 7, 8)
# Of AVX-512 kernels 1 to 4 rows of 112 and 56 pixels were best, more of narrower ones.
_PIXELS = 112
# Of the second cache, which weights and the rows of the input share.
_SHARE = 2
_HINTS = 2


def schedules(
    depthwise: Contraction, pointwise: Contraction, target: TargetInfo, apart: tuple[Schedule | None, Schedule | None]
) -> list[Schedule]:
    """Legal schedules, best guesses first. What the two do as kernels of their own (`apart`) is tried first."""
    width = depthwise.columns[0].count
    first = _tiles(apart[0], channels_guess.tiles(depthwise, target), width)
    ranked: list[tuple[int, Schedule]] = []
    for by_rows, rows in enumerate(_rows(depthwise, target)):
        strip = replace(pointwise.fused(), columns=(replace(pointwise.columns[0], count=rows * width),))
        second = _tiles(apart[1], channels_guess.tiles(strip, target), rows * width)
        for by_second, (vectors, tile) in enumerate(second):
            for by_first, (dw_vectors, dw_tile) in enumerate(first):
                knobs = {"rows": rows, "tile": tile, "vectors": vectors, "dw_tile": dw_tile, "dw_vectors": dw_vectors}
                # The tiles are what is best for kernels of their own; the height is what is new.
                rank = by_rows + 2 * by_second + 3 * by_first
                ranked.append((rank, Schedule.make("depthwise_pointwise", **knobs)))
    return [schedule for _, schedule in sorted(ranked, key=lambda pair: pair[0])][:_MOST]


def _tiles(known: Schedule | None, guesses: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """A few (vectors, tile) pairs, the known one first."""
    found = [(known.number("vectors"), known.number("tile"))] if known and known.template == "channels" else []
    return [pair for pair in dict.fromkeys([*found, *guesses]) if pair[1] <= most][: _HINTS + len(found)]


def _rows(depthwise: Contraction, target: TargetInfo) -> list[int]:
    """Heights of a strip: those that share the work out evenly first, then those of a good number of pixels."""
    height, width = depthwise.rows[0].count, depthwise.columns[0].count
    bytes_of_row = 4 * depthwise.out_channels * width

    def idle(rows: int) -> float:
        """Part of the threads' time that is lost at the end, in tenths."""
        tasks = depthwise.batch * -(-height // rows)
        return round(10 * (1 - depthwise.batch * height / rows / (-(-tasks // target.threads) * target.threads)))

    fits = [rows for rows in _ROWS if rows <= height and rows * bytes_of_row * _SHARE <= target.l2_bytes] or [1]
    return sorted(fits, key=lambda rows: (idle(rows), abs(math.log2(rows * width / _PIXELS)), rows))
