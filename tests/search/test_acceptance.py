"""Acceptance on simulated noise: seldom a win without a gain, nearly always one with it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layoutsearch.search.acceptance import (
    FINAL_ROUNDS,
    FINAL_STARTS,
    MIN_EFFECT,
    ROUNDS_PER_START,
    Comparison,
    compare,
    summarize,
)

Noise = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def quiet(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    return tuple(100 * np.exp(rng.normal(0, 0.03, (2, n))))


def spikes(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    extra = 1 + (rng.random((2, n)) < 0.1) * rng.exponential(0.5, (2, n))
    return tuple(100 * np.exp(rng.normal(0, 0.01, (2, n))) * extra)


def drift(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    common = np.exp(np.cumsum(rng.normal(0, 0.03, n)))
    return tuple(100 * common * np.exp(rng.normal(0, 0.02, (2, n))))


def two_speeds(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    return tuple(100 * np.where(rng.random((2, n)) < 0.5, 1.0, 1.3) * np.exp(rng.normal(0, 0.01, (2, n))))


def starts(
    rng: np.random.Generator, n: int, per_start: int, between: float, within: float, kind: str
) -> tuple[np.ndarray, np.ndarray]:
    """Rounds of `n` starts: each start has its own speed of either side, each round its noise, and all of it drifts."""
    own = rng.normal(0, between, (2, n, 1))
    if kind == "modes":
        own = own + 0.03 * (rng.random((2, n, 1)) < 0.5)
    if kind == "slow starts":
        own = own + 0.08 * (rng.random((2, n, 1)) < 0.1)
    shape = (2, n, per_start)
    noise = rng.standard_t(3, shape) / math.sqrt(3) if kind == "heavy tails" else rng.normal(0, 1, shape)
    common = np.cumsum(rng.normal(0, 0.005, n * per_start)).reshape(n, per_start)
    times = 100 * np.exp(own + within * noise + common)
    return times[0].ravel(), times[1].ravel()


def rate(wins: int, trials: int, at_most: float) -> None:
    assert wins / trials <= at_most + 3 * math.sqrt(at_most * (1 - at_most) / trials)


@pytest.mark.parametrize("noise", [quiet, spikes, drift, two_speeds])
@pytest.mark.parametrize("rounds", [6, 12, 24])
def test_false_wins_are_rare_among_independent_rounds(noise: Noise, rounds: int) -> None:
    rng = np.random.default_rng(5)
    trials = 150
    rate(sum(compare(*noise(rng, rounds), seed=k, min_effect=0.0).accepted for k in range(trials)), trials, 0.025)


@pytest.mark.parametrize("kind", ["normal", "modes", "slow starts", "heavy tails"])
@pytest.mark.parametrize(("between", "within"), [(0.003, 0.01), (0.02, 0.02), (0.01, 0.05)])
def test_false_wins_are_rare_however_much_starts_differ(kind: str, between: float, within: float) -> None:
    rng = np.random.default_rng(6)
    trials = 150
    wins = 0
    for k in range(trials):
        samples = starts(rng, FINAL_STARTS, ROUNDS_PER_START, between, within, kind)
        wins += compare(*samples, per_start=ROUNDS_PER_START, seed=k, min_effect=0.0).accepted
    rate(wins, trials, 0.025)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_false_wins_are_rare_with_few_starts(n: int) -> None:
    rng = np.random.default_rng(7)
    trials = 200
    found = [compare(*starts(rng, n, 8, 0.02, 0.02, "normal"), per_start=8, seed=k) for k in range(trials)]
    rate(sum(c.accepted for c in found), trials, 0.05)
    big = [compare(*(np.array([[1.5], [1.0]]) * starts(rng, n, 8, 0.005, 0.01, "normal")), per_start=8) for _ in "1234"]
    assert all(c.accepted for c in big)


def test_rounds_taken_for_independent_are_not_where_starts_differ() -> None:
    """What telling starts apart is for: without it, half of the A/A comparisons of starts that differ are wins."""
    rng = np.random.default_rng(8)
    samples = [starts(rng, 4, 10, 0.02, 0.005, "normal") for _ in range(100)]
    naive = sum(compare(*s).accepted for s in samples)
    assert naive > 20
    rate(sum(compare(*s, per_start=10).accepted for s in samples), 100, 0.025)


@pytest.mark.parametrize("noise", [quiet, spikes, drift])
def test_a_true_gain_of_five_percent_is_accepted(noise: Noise) -> None:
    rng = np.random.default_rng(6)
    results = [compare(1.05 * base, cand, seed=k) for k in range(100) for base, cand in [noise(rng, 40)]]
    assert np.mean([r.accepted for r in results]) >= 0.95
    assert np.mean([r.ci[0] <= 1.05 <= r.ci[1] for r in results]) >= 0.9
    assert np.median([r.speedup for r in results]) == pytest.approx(1.05, abs=0.01)


@pytest.mark.parametrize(
    ("kind", "between", "within"),
    [("normal", 0.003, 0.03), ("normal", 0.01, 0.02), ("heavy tails", 0.01, 0.02), ("modes", 0.003, 0.01)],
)
def test_a_true_gain_of_three_percent_is_accepted_at_the_default_budget(
    kind: str, between: float, within: float
) -> None:
    assert FINAL_ROUNDS == FINAL_STARTS * ROUNDS_PER_START
    rng = np.random.default_rng(9)
    found = []
    for k in range(150):
        base, cand = starts(rng, FINAL_STARTS, ROUNDS_PER_START, between, within, kind)
        found.append(compare(1.03 * base, cand, per_start=ROUNDS_PER_START, seed=k))
    assert np.mean([c.accepted for c in found]) >= 0.8
    assert np.mean([c.ci[0] <= 1.03 <= c.ci[1] for c in found]) >= 0.9


def test_the_best_of_several_on_fresh_samples_is_no_more_often_a_false_win() -> None:
    """The samples that chose the best of twenty equals flatter it; new ones do not know which was chosen."""
    rng = np.random.default_rng(10)
    trials = 200
    reused = fresh = 0
    for k in range(trials):
        base = 100 * np.exp(rng.normal(0, 0.02, 12))
        challengers = 100 * np.exp(rng.normal(0, 0.02, (20, 12)))
        best = int(np.argmin(challengers.mean(axis=1)))
        reused += compare(base, challengers[best], min_effect=0.0, seed=k).accepted
        fresh += compare(*(100 * np.exp(rng.normal(0, 0.02, (2, 12)))), min_effect=0.0, seed=k).accepted
    assert reused / trials > 0.1
    rate(fresh, trials, 0.025)


def test_reused_samples_need_a_stricter_confidence() -> None:
    rng = np.random.default_rng(11)
    trials = 200
    wins = 0
    for k in range(trials):
        base = 100 * np.exp(rng.normal(0, 0.02, 16))
        challengers = 100 * np.exp(rng.normal(0, 0.02, (8, 16)))
        best = int(np.argmin(challengers.mean(axis=1)))
        wins += compare(base, challengers[best], min_effect=0.0, confidence=1 - 0.05 / 8, seed=k).accepted
    rate(wins, trials, 0.05)


def test_a_loss_is_never_accepted() -> None:
    rng = np.random.default_rng(7)
    assert not any(compare(*(np.array([[1.0], [1.05]]) * quiet(rng, 20)), seed=k).accepted for k in range(100))


def test_drift_common_to_both_cancels() -> None:
    slow_down = np.linspace(1, 2, 30)
    rng = np.random.default_rng(8)
    base = 105 * slow_down * np.exp(rng.normal(0, 0.01, 30))
    assert compare(base, 100 * slow_down).accepted
    assert compare(base, 100 * slow_down, per_start=3).accepted


def test_a_gain_below_the_least_effect_is_not_worth_it() -> None:
    rng = np.random.default_rng(9)
    cand = 100 * np.exp(rng.normal(0, 1e-4, 50))
    small = compare((1 + MIN_EFFECT / 2) * cand, cand)
    assert small.ci[0] > 1
    assert not small.accepted
    assert compare((1 + 2 * MIN_EFFECT) * cand, cand).accepted
    assert compare((1 + MIN_EFFECT / 2) * cand, cand, min_effect=0.001).accepted


def test_one_start_says_nothing_of_others() -> None:
    one = compare([200.0] * 10, [100.0] * 10, per_start=10)
    assert one.ci == (0.0, math.inf)
    assert not one.accepted
    assert (one.starts, one.rounds) == (1, 10)


def test_a_start_cut_short_counts_as_one() -> None:
    assert compare([2.0] * 23, [1.0] * 23, per_start=4).starts == 6


def test_few_starts_win_only_if_all_agree() -> None:
    assert compare([2.0, 2.01, 2.0, 1.99], [1.0] * 4).accepted
    assert not compare([2.0, 2.01, 2.0, 0.99], [1.0] * 4).accepted
    assert compare([200.0] * 6, [100.0] * 6).accepted


def test_identical_times_are_no_win() -> None:
    same = compare([100.0] * 20, [100.0] * 20, min_effect=0.0)
    assert (same.speedup, same.ci, same.p_value, same.accepted) == (1.0, (1.0, 1.0), 1.0, False)


def test_the_result_is_a_function_of_its_arguments() -> None:
    base, cand = quiet(np.random.default_rng(0), 25)
    assert compare(base, cand, seed=3) == compare(list(base), list(cand), seed=3)


times = st.lists(st.tuples(st.floats(1, 1000), st.floats(1, 1000)), min_size=2, max_size=24)


def close(a: Comparison, b: Comparison) -> bool:
    return (a.speedup, *a.ci) == pytest.approx((b.speedup, *b.ci), rel=1e-6)


@settings(deadline=None, max_examples=60)
@given(times, st.integers(1, 5), st.floats(1e-3, 1e3))
def test_the_unit_does_not_matter(pairs: list[tuple[float, float]], per_start: int, scale: float) -> None:
    base, cand = (np.array(side) for side in zip(*pairs, strict=True))
    assert close(compare(base, cand, per_start=per_start), compare(scale * base, scale * cand, per_start=per_start))


@settings(deadline=None, max_examples=60)
@given(times, st.integers(1, 5))
def test_swapping_the_sides_inverts_the_result(pairs: list[tuple[float, float]], per_start: int) -> None:
    base, cand = (np.array(side) for side in zip(*pairs, strict=True))
    one, other = compare(base, cand, per_start=per_start), compare(cand, base, per_start=per_start)
    assert other.speedup == pytest.approx(1 / one.speedup, rel=1e-9)
    if one.starts > 1:
        assert other.ci == pytest.approx((1 / one.ci[1], 1 / one.ci[0]), rel=1e-6)
    # Of more than 12 starts the p-values are shares of random swaps.
    assert one.p_value + other.p_value >= 1 - (1e-3 if one.starts <= 12 else 0.05)
    assert not (one.accepted and other.accepted)


@settings(deadline=None, max_examples=60)
@given(times, st.integers(1, 5), st.floats(1.0, 3.0))
def test_a_larger_gain_is_never_accepted_less(pairs: list[tuple[float, float]], per_start: int, gain: float) -> None:
    base, cand = (np.array(side) for side in zip(*pairs, strict=True))
    if compare(base, cand, per_start=per_start).accepted:
        assert compare(gain * base, cand, per_start=per_start).accepted


def test_wrong_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="come in pairs"):
        compare([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="non-empty"):
        compare([], [])
    with pytest.raises(ValueError, match="candidate_us: times must be finite"):
        compare([1.0], [float("nan")])
    with pytest.raises(ValueError, match="above 0"):
        summarize([1.0, 0.0])
    with pytest.raises(ValueError, match=r"confidence 1\.5"):
        compare([1.0], [1.0], confidence=1.5)
    with pytest.raises(ValueError, match="per_start is 0"):
        compare([1.0], [1.0], per_start=0)


def test_summarize() -> None:
    found = summarize([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (found.median, found.lower_quartile, found.upper_quartile, found.count) == (3.0, 2.0, 4.0, 5)
    assert found.spread == pytest.approx(2 / 3)
