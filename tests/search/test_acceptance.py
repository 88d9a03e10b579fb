"""Acceptance on simulated noise: seldom a win without a gain, nearly always one with it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from layoutsearch.search.acceptance import compare, summarize

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


@pytest.mark.parametrize("noise", [quiet, spikes, drift, two_speeds])
@pytest.mark.parametrize("rounds", [6, 12, 30])
def test_false_wins_are_rare(noise: Noise, rounds: int) -> None:
    rng = np.random.default_rng(5)
    trials = 400
    wins = sum(compare(*noise(rng, rounds), seed=k, min_effect=0.0).accepted for k in range(trials))
    # At most 2.5 % by construction; three standard errors on top.
    assert wins / trials <= 0.025 + 3 * np.sqrt(0.025 * 0.975 / trials)


@pytest.mark.parametrize("noise", [quiet, spikes, drift])
def test_a_true_gain_of_five_percent_is_accepted(noise: Noise) -> None:
    rng = np.random.default_rng(6)
    results = [compare(1.05 * base, cand, seed=k) for k in range(100) for base, cand in [noise(rng, 40)]]
    assert np.mean([r.accepted for r in results]) >= 0.95
    assert np.mean([r.ci[0] <= 1.05 <= r.ci[1] for r in results]) >= 0.9
    assert np.median([r.speedup for r in results]) == pytest.approx(1.05, abs=0.01)


def test_a_loss_is_never_accepted() -> None:
    rng = np.random.default_rng(7)
    assert not any(compare(*(np.array([[1.0], [1.05]]) * quiet(rng, 20)), seed=k).accepted for k in range(100))


def test_drift_common_to_both_cancels() -> None:
    slow_down = np.linspace(1, 2, 30)
    rng = np.random.default_rng(8)
    base = 105 * slow_down * np.exp(rng.normal(0, 0.01, 30))
    assert compare(base, 100 * slow_down).accepted


def test_a_gain_below_the_least_effect_is_not_worth_it() -> None:
    rng = np.random.default_rng(9)
    cand = 100 * np.exp(rng.normal(0, 1e-4, 50))
    small = compare(1.005 * cand, cand)
    assert small.ci[0] > 1
    assert not small.accepted
    assert compare(1.005 * cand, cand, min_effect=0.001).accepted


def test_few_rounds_cannot_win() -> None:
    assert not compare([200.0] * 5, [100.0] * 5).accepted
    assert compare([200.0] * 6, [100.0] * 6).accepted
    assert not compare([200.0] * 6, [100.0] * 6, confidence=0.99).accepted


def test_identical_times_are_no_win() -> None:
    same = compare([100.0] * 20, [100.0] * 20, min_effect=0.0)
    assert (same.speedup, same.ci, same.p_value, same.accepted) == (1.0, (1.0, 1.0), 1.0, False)


def test_the_result_is_a_function_of_its_arguments() -> None:
    base, cand = quiet(np.random.default_rng(0), 25)
    assert compare(base, cand, seed=3) == compare(list(base), list(cand), seed=3)


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


def test_summarize() -> None:
    found = summarize([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (found.median, found.lower_quartile, found.upper_quartile, found.count) == (3.0, 2.0, 4.0, 5)
    assert found.spread == pytest.approx(2 / 3)
