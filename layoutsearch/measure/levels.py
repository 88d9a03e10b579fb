"""From a curve of bandwidth over working sets to the levels of a memory hierarchy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from layoutsearch.measure.profile import MEMORY, MemoryLevel

# A working set of less than that many times the level before still has a good part of its hits there.
_CLEAR = 1.5
# What a shared last cache holds is a guess, so memory is judged further away from it.
_CLEAR_OF_LAST = 2.5
# A level is slower than the one before it by at least this factor; less is noise.
_DROP = 0.6
# From one size to the next the curve falls by less than this within a level.
_FLAT = 0.87


@dataclass(frozen=True)
class CurvePoint:
    """Bandwidth with one working set.

    Attributes:
        bytes: everything that the kernel goes over again and again, all threads together.
        gb_s: the most bytes a second, read and written together.
    """

    bytes: int
    gb_s: float


def levels_of(
    points: Sequence[CurvePoint], capacities: Sequence[int] | None, memory_gb_s: float, whole: int = 0
) -> tuple[MemoryLevel, ...]:
    """Levels with their bandwidth, caches first and memory last.

    The bandwidth of a level is the highest of the working sets that it holds and the one before it does not: noise only
    ever makes the curve too low. No level is slower than one further out.

    Args:
        points: the curve, in any order.
        capacities: bytes of the caches, all threads together, fastest first; None where the device cannot tell, so
            that they come from where the curve falls.
        memory_gb_s: a bandwidth that memory is known to have, of operands that are in no cache.
        whole: bytes of the last cache with what neighbours may take of it: what fits there says nothing of memory.
    """
    ordered = sorted(points, key=lambda p: p.bytes)
    if capacities is None:
        capacities = falls(ordered)
    found: list[MemoryLevel] = []
    inner = 0
    for index, capacity in enumerate(capacities):
        rates = _rates(ordered, inner, capacity)
        if not rates:  # no working set of its own: the curve ends before it, or the level before is as large
            continue
        found.append(MemoryLevel(f"l{index + 1}", capacity, max(rates)))
        inner = capacity
    beyond = [p for p in ordered if p.bytes > whole] or ordered
    found.append(MemoryLevel(MEMORY, 0, max([memory_gb_s, *_rates(beyond, max(inner, whole), None, _CLEAR_OF_LAST)])))
    for index in range(len(found) - 2, -1, -1):
        level, outer = found[index], found[index + 1]
        found[index] = MemoryLevel(level.name, level.bytes, max(level.gb_s, outer.gb_s))
    return tuple(found)


def _rates(points: Sequence[CurvePoint], inner: int, capacity: int | None, apart: float = _CLEAR) -> list[float]:
    """Bandwidths beyond `inner` bytes and within `capacity`, clear of the level before where there are such."""
    within = [p for p in points if inner < p.bytes and (capacity is None or p.bytes <= capacity)]
    found = ([p.gb_s for p in within if p.bytes >= limit * inner] for limit in (apart, _CLEAR, 0.0))
    return next(filter(None, found), [])


def falls(points: Sequence[CurvePoint]) -> list[int]:
    """Working sets, growing, behind which the bandwidth has fallen to a lower level for good.

    Points on a slope count to the faster level: a capacity that is too large makes a bound low, not wrong.
    """
    sizes: dict[int, CurvePoint] = {}
    for point in points:
        # Kernels of several kinds have working sets that are nearly the same.
        about = round(2 * math.log2(point.bytes))
        known = sizes.get(about, point)
        sizes[about] = CurvePoint(max(known.bytes, point.bytes), max(known.gb_s, point.gb_s))
    if not sizes:
        return []
    steps = [sizes[about] for about in sorted(sizes)]
    # The best that this working set or a larger one reached: noise and start-up costs only ever lower a point.
    best = [p.gb_s for p in steps]
    for index in range(len(best) - 2, -1, -1):
        best[index] = max(best[index], best[index + 1])
    found = []
    plateau = best[0]
    index = 1
    while index < len(best):
        if best[index] >= _DROP * plateau:
            index += 1
            continue
        while index + 1 < len(best) and best[index + 1] < _FLAT * best[index]:
            index += 1
        found.append(steps[index - 1].bytes)
        plateau = best[index]
        index += 1
    return found
