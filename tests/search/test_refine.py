"""Choosing the whole assignments to time: the right ones, in few timings, and an end to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from layoutsearch.search.refine import Refinement, SharedOffset, expected_improvement


def timed(truth: np.ndarray, indices: tuple[int, ...], rng: np.random.Generator, speed: float = 1.0) -> dict:
    """Interleaved samples with half a percent of noise, on a machine of the given speed."""
    return {i: truth[i] * speed * np.exp(rng.normal(0, 0.005, 12)) for i in indices}


def run(additive: np.ndarray, truth: np.ndarray, seed: int, own_sd: float = 0.02) -> Refinement:
    rng = np.random.default_rng(seed)
    refinement = Refinement(list(additive), SharedOffset(len(additive), own_sd=own_sd))
    while chosen := refinement.next(3).indices:
        best = refinement.best
        anchor = () if best is None else (best,)
        refinement.observe(timed(truth, chosen + anchor, rng, speed=float(rng.uniform(0.8, 1.3))))
    return refinement


def test_the_first_batch_is_what_the_prediction_says() -> None:
    refinement = Refinement([30.0, 10.0, 20.0], SharedOffset(3))
    assert refinement.best is None
    assert refinement.next(2).indices == (1, 2)


@pytest.mark.parametrize("seed", range(20))
def test_finds_one_of_the_best_in_few_timings(seed: int) -> None:
    rng = np.random.default_rng(1000 + seed)
    additive = np.sort(rng.uniform(100, 130, 40))
    truth = additive * 1.15 * np.exp(rng.normal(0, 0.02, 40))
    refinement = run(additive, truth, seed)
    assert refinement.best is not None
    assert truth[refinement.best] <= truth.min() * 1.015
    assert len(refinement.timed) < 30


def test_stops_at_once_where_the_prediction_is_exact() -> None:
    additive = np.linspace(100, 200, 30)
    refinement = run(additive, additive * 1.2, seed=0, own_sd=0.001)
    assert refinement.best == 0
    assert len(refinement.timed) <= 6


def test_another_speed_of_the_machine_changes_nothing() -> None:
    refinement = Refinement([100.0, 101.0, 102.0], SharedOffset(3))
    refinement.observe({0: [110.0] * 4, 1: [120.0] * 4})
    refinement.observe({0: [220.0] * 4, 2: [200.0] * 4})
    assert refinement.best == 2
    assert refinement.predicted_us()[2] == pytest.approx(100.0)


def test_what_was_timed_is_not_timed_again() -> None:
    refinement = Refinement([100.0, 100.5], SharedOffset(2))
    refinement.observe({0: [100.0, 101.0, 102.0], 1: [99.0, 100.0, 101.0]})
    assert refinement.next(2).indices == ()
    assert sorted(refinement.timed) == [0, 1]


@settings(deadline=None)
@given(st.floats(-0.5, 0.5), st.floats(0.001, 0.3))
def test_expected_improvement_is_what_sampling_gives(mean: float, deviation: float) -> None:
    draws = norm.ppf((np.arange(20_000) + 0.5) / 20_000, mean, deviation)
    sampled = np.maximum(0, -np.expm1(draws))
    (exact,) = expected_improvement(np.array([mean]), np.array([deviation]))
    assert exact == pytest.approx(sampled.mean(), abs=1e-4)


def test_a_certain_gain_is_itself() -> None:
    gains = expected_improvement(np.log(np.array([0.9, 1.1])), np.zeros(2))
    assert gains == pytest.approx([0.1, 0.0])


@pytest.mark.parametrize("times", [[], [0.0], [float("inf")], [1.0, float("nan")]])
def test_times_have_to_be_times(times: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        Refinement(times, SharedOffset(max(1, len(times))))


def test_what_does_not_build_is_not_asked_for() -> None:
    refinement = Refinement([100.0, 101.0, 102.0], SharedOffset(3, own_sd=0.05))
    refinement.exclude(0)
    assert refinement.next(1).indices == (1,)
    refinement.observe({1: [111.0, 111.1, 111.2]})
    assert 0 not in refinement.next(3).indices
    assert refinement.measured_us(1) == pytest.approx(111.1)
