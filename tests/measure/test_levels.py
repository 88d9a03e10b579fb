"""From curves to levels, on curves that were made up."""

from __future__ import annotations

import random

import pytest

from layoutsearch.measure.levels import CurvePoint, falls, levels_of

KIB, MIB = 1 << 10, 1 << 20
CAPACITIES = (96 * KIB, 4 * MIB, 32 * MIB)
RATES = (800.0, 300.0, 60.0, 20.0)


def curve(rates: tuple[float, ...] = RATES, capacities: tuple[int, ...] = CAPACITIES, step: float = 2**0.5) -> list:
    """What a working set gets that is gone over again and again, with some hits in the level before it."""
    points = []
    size = 16.0 * KIB
    while size <= 128 * MIB:
        level = sum(size > capacity for capacity in capacities)
        rate = rates[level]
        if level:
            kept = max(0.0, 2.0 * capacities[level - 1] - size) / size
            rate = 1.0 / ((1 - kept) / rate + kept / rates[level - 1])
        points.append(CurvePoint(int(size), rate))
        size *= step
    return points


def noisy(points: list[CurvePoint], seed: int) -> list[CurvePoint]:
    """Three kernels, most samples disturbed a little, some a lot; noise never makes a point faster."""
    draw = random.Random(seed)
    return [
        CurvePoint(p.bytes, p.gb_s * draw.uniform(0.9, 1.0) * (0.2 if draw.random() < 0.1 else 1.0))
        for p in points
        for _ in range(3)
    ]


def test_known_caches_get_the_rate_of_the_working_sets_that_they_alone_hold() -> None:
    levels = levels_of(curve(), CAPACITIES, 0.0)
    assert [level.name for level in levels] == ["l1", "l2", "l3", "memory"]
    assert [level.bytes for level in levels] == [*CAPACITIES, 0]
    for level, rate in zip(levels, RATES, strict=True):
        assert rate * (1 - 1e-9) <= level.gb_s <= 1.35 * rate


@pytest.mark.parametrize("seed", range(20))
def test_without_known_caches_they_come_from_the_falls_of_the_curve(seed: int) -> None:
    levels = levels_of(noisy(curve(), seed), None, 0.0)
    assert len(levels) >= 4
    assert levels[0].gb_s == pytest.approx(RATES[0], rel=0.1)
    assert levels[-1].gb_s == pytest.approx(RATES[-1], rel=0.3)
    for capacity in CAPACITIES:
        # Too large at most by what is still on the slope, too small at most by a step and a disturbed point.
        assert any(0.45 * capacity <= level.bytes <= 2.1 * capacity for level in levels), levels


@pytest.mark.parametrize("capacities", [CAPACITIES, None])
@pytest.mark.parametrize("seed", range(20))
def test_levels_get_slower_outwards_and_larger(capacities: tuple[int, ...] | None, seed: int) -> None:
    levels = levels_of(noisy(curve(), seed), capacities, 25.0)
    rates = [level.gb_s for level in levels]
    assert rates == sorted(rates, reverse=True)
    sizes = [level.bytes for level in levels[:-1]]
    assert sizes == sorted(set(sizes))
    assert levels[-1].name == "memory"
    assert levels[-1].bytes == 0
    assert levels[-1].gb_s >= 25.0


def test_a_flat_curve_has_no_cache() -> None:
    points = [CurvePoint(KIB << i, 10.0 + i % 2) for i in range(12)]
    assert falls(points) == []
    (memory,) = levels_of(points, None, 5.0)
    assert memory.gb_s == 11.0


def test_a_single_disturbed_working_set_is_no_level() -> None:
    points = [CurvePoint(KIB << i, 1.0 if i == 5 else 100.0) for i in range(12)]
    assert falls(points) == []


def test_start_up_costs_of_tiny_working_sets_are_no_level() -> None:
    points = [CurvePoint(KIB << i, min(100.0, 5.0 * 2**i)) for i in range(12)]
    assert falls(points) == []


def test_a_cache_beyond_the_curve_is_left_out_and_memory_still_has_a_rate() -> None:
    small = [p for p in curve() if p.bytes <= 2 * MIB]
    levels = levels_of(small, CAPACITIES, 18.0)
    assert [level.name for level in levels] == ["l1", "l2", "memory"]
    assert levels[-1].gb_s == 18.0


def test_a_last_cache_that_holds_twice_what_was_told_does_not_make_memory_fast() -> None:
    """As within a virtual machine, which can count on a part of it."""
    levels = levels_of(curve(), (*CAPACITIES[:2], CAPACITIES[2] // 2), 0.0)
    assert levels[-1].gb_s <= RATES[-2] / 1.5


def test_what_fits_into_the_whole_last_cache_says_nothing_of_memory() -> None:
    """A quarter is counted on and all of it is there, as for a guest whose neighbours rest: the curve falls at last."""
    counted = (*CAPACITIES[:2], CAPACITIES[2] // 4)
    assert levels_of(curve(), counted, 0.0)[-1].gb_s > 2 * RATES[-1]
    assert levels_of(curve(), counted, 0.0, CAPACITIES[2])[-1].gb_s <= 1.35 * RATES[-1]
