"""What measurements say of predictions: closed forms, draws, and that intervals hold when the errors are as stated."""

from __future__ import annotations

import math

import numpy as np
import pytest

from layoutsearch.cost.improvement import FULL_TRIES, Improvement
from layoutsearch.cost.mixture import Parts, Prior, covariance, fit_mixture
from layoutsearch.cost.posterior import Evidence, Posterior

WORKLOADS, EACH = 12, 5
SIZE = WORKLOADS * EACH


def prior(between: float = 0.2, within: float = 0.15, floor: float = 0.0) -> Prior:
    """Twelve workloads of three kinds with five layouts each, all predicted to take 100 us."""
    workload = np.repeat(np.arange(WORKLOADS), EACH)
    return Prior(
        log_us=np.full(SIZE, math.log(100.0)),
        between=np.full(SIZE, between),
        within=np.full(SIZE, within),
        kind=workload // 4,
        group=workload,
        family=(workload // 4) * EACH + np.tile(np.arange(EACH), WORKLOADS),
        floor=np.full(SIZE, floor),
    )


def evidence(us: dict[int, float], tries: int = FULL_TRIES, noise: float = 0.0, dead: tuple[int, ...] = ()) -> Evidence:
    best, count, closed = np.full(SIZE, np.inf), np.zeros(SIZE, dtype=np.intp), np.zeros(SIZE, dtype=np.bool_)
    for k, time in us.items():
        best[k], count[k] = time, tries
    closed[list(dead)] = True
    return Evidence(best, count, closed, np.full(SIZE, noise) * np.isfinite(best))


def drawn(posterior: Posterior, size: int = 4000) -> np.ndarray:
    return posterior.draw(np.random.default_rng(0), size)


def width(us: dict[int, float]) -> float:
    """How far down a cost that is not measured may go."""
    posterior = Posterior(prior(), evidence(us))
    return float(np.log(posterior.mean() / posterior.optimistic(0.05))[-1])


def test_nothing_measured_is_the_prediction() -> None:
    posterior = Posterior(prior(), evidence({}))
    np.testing.assert_allclose(np.median(drawn(posterior), axis=0), 100.0, rtol=0.03)
    assert (posterior.optimistic(0.05) < 80).all()
    np.testing.assert_array_equal(posterior.strict(), 0.0)


def test_what_is_measured_and_over_is_certain() -> None:
    posterior = Posterior(prior(), evidence({3: 250.0}))
    for us in (posterior.mean(), posterior.optimistic(0.05), posterior.strict()):
        assert us[3] == pytest.approx(250.0)
    np.testing.assert_allclose(drawn(posterior)[:, 3], 250.0)


def test_a_slow_candidate_tells_most_of_its_siblings_then_of_its_kind() -> None:
    mean = Posterior(prior(), evidence({0: 130.0, 2: 130.0, 3: 130.0})).mean() / Posterior(prior(), evidence({})).mean()
    sibling, kind, other = mean[1], mean[EACH + 1], mean[-1]
    assert sibling > kind > other > 1.0


def test_siblings_vary_together() -> None:
    costs = np.log(drawn(Posterior(prior(between=0.4, within=0.05), evidence({}))))
    assert np.corrcoef(costs[:, 0], costs[:, 1])[0, 1] > 0.9
    assert abs(np.corrcoef(costs[:, 0], costs[:, -1])[0, 1]) < 0.5


def test_one_far_out_does_not_widen_the_rest() -> None:
    rng = np.random.default_rng(1)
    fine = {k: 100.0 * math.exp(0.03 * rng.standard_normal()) for k in range(0, SIZE, 2)}
    assert width({**fine, 20: 600.0}) < 1.5 * width(fine) < width({})


def test_the_size_of_errors_is_learned() -> None:
    small = {k: 100.0 * math.exp(0.01 * x) for k, x in enumerate(np.random.default_rng(2).standard_normal(40))}
    large = {k: 100.0 * math.exp(0.5 * x) for k, x in enumerate(np.random.default_rng(2).standard_normal(40))}
    assert width(small) < width({}) < width(large)


def test_what_does_not_run_costs_infinity_and_tells_nothing() -> None:
    posterior = Posterior(prior(), evidence({}, dead=(4,)))
    for us in (posterior.mean(), posterior.optimistic(0.1), posterior.strict(), drawn(posterior).min(axis=0)):
        assert us[4] == np.inf
        assert np.isfinite(np.delete(us, 4)).all()


def test_nothing_is_below_the_floor_but_what_was_measured_there() -> None:
    posterior = Posterior(prior(floor=90.0), evidence({0: 50.0}))
    for us in (posterior.mean(), posterior.optimistic(0.01), posterior.strict(), drawn(posterior).min(axis=0)):
        assert (np.delete(us, 0) >= 90.0).all()
        assert us[0] == pytest.approx(50.0)


def test_few_tries_leave_something_to_gain() -> None:
    posterior = Posterior(prior(floor=1.0), evidence({0: 100.0}, tries=2))
    costs = drawn(posterior)[:, 0]
    assert costs.max() <= 100.0 + 1e-9
    assert costs.mean() == pytest.approx(posterior.mean()[0], rel=0.01)
    assert np.quantile(costs, 0.05) == pytest.approx(posterior.optimistic(0.05)[0], rel=0.02)
    assert posterior.strict()[0] == 1.0, "the search of this candidate is not over"


def test_a_first_measurement_was_lucky() -> None:
    posterior = Posterior(prior(), evidence({0: 100.0}, noise=0.1))
    costs = drawn(posterior)[:, 0]
    assert costs.mean() > 103.0
    assert np.log(costs).std() > 0.1
    assert posterior.mean()[0] == pytest.approx(costs.mean(), rel=0.01)


@pytest.mark.parametrize(("scale", "least"), [(0.5, 0.01), (1.0, 0.04), (2.0, 0.04)])
def test_quantiles_hold_whatever_the_true_size_of_errors(scale: float, least: float) -> None:
    """A candidate's own error is never taken for much smaller than stated: then they hold more often than they say."""
    below = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        known = prior()
        error = 0.1 * rng.standard_normal() + 0.15 * rng.standard_normal(WORKLOADS)[known.group]
        true = 100 * np.exp(scale * (error + 0.08 * rng.standard_t(3, SIZE)))
        seen = rng.permutation(SIZE)[: SIZE // 2]
        posterior = Posterior(known, evidence({int(k): float(true[k]) for k in seen}))
        hidden = np.setdiff1d(np.arange(SIZE), seen)
        below.append(np.mean(true[hidden] < np.quantile(posterior.draw(rng, 400), 0.1, axis=0)[hidden]))
    assert least < np.mean(below) < 0.16


def test_parts_of_a_fit() -> None:
    rng = np.random.default_rng(3)
    known = prior()
    seen = np.arange(SIZE)
    shared_by_workload = 0.6 * rng.standard_normal(WORKLOADS)[known.group]
    fit = fit_mixture(known, seen, shared_by_workload + 0.02 * rng.standard_normal(SIZE), np.full(SIZE, 1e-4))
    assert fit.parts.group > Parts().group
    assert fit.parts.own < Parts().own
    assert fit.spread.shape == (SIZE,)


def test_gains_shrink_with_tries_and_end() -> None:
    mean, variance, factor = Improvement().moments(np.array([1, 2, 3, 8, 20, FULL_TRIES, 99]))
    assert (np.diff(mean[:6]) < 0).all()
    assert (np.diff(factor[:6]) > 0).all()
    assert mean[-1] == mean[-2] == variance[-1] == 0.0
    assert factor[-1] == 1.0


@pytest.mark.parametrize("tries", [1, 4, 16])
def test_gains_are_drawn_as_their_moments_say(tries: int) -> None:
    improvement, at = Improvement(), np.array([tries])
    gains = improvement.draw(at, np.random.default_rng(0), 200_000)[:, 0]
    mean, variance, factor = (float(x[0]) for x in improvement.moments(at))
    assert gains.mean() == pytest.approx(mean, rel=0.02)
    assert gains.var() == pytest.approx(variance, rel=0.05)
    assert np.exp(-gains).mean() == pytest.approx(factor, rel=0.01)
    for quantile in (0.02, 0.1, 0.9):
        assert improvement.quantile(at, quantile)[0] == pytest.approx(np.quantile(gains, 1 - quantile), rel=0.05)


def test_a_run_tells_how_its_searches_go_on() -> None:
    steady = Improvement.fit([[100.0] * 6] * 200)
    late = Improvement.fit([[100.0, 100.0, 100.0, 100.0, 50.0, 50.0]] * 200)
    mean = [i.moments(np.array([2]))[0][0] for i in (steady, Improvement(), late)]
    assert mean[0] < mean[1] < mean[2]
    assert late.moments(np.array([8]))[0][0] < mean[1]


def test_a_floor_that_a_measurement_is_below_is_refuted_and_none_need_be_trusted() -> None:
    low = prior(floor=50.0)
    assert Posterior(low, evidence({3: 60.0, 4: 50.0})).refuted == 0
    posterior = Posterior(low, evidence({3: 40.0, 4: 60.0}, dead=(5,)))
    assert posterior.refuted == 1
    strict = posterior.strict(trust=False)
    assert strict[[3, 4, 5, 6]] == pytest.approx([40.0, 60.0, np.inf, 0.0])
    assert Posterior(low, evidence({3: 49.0}, noise=0.05)).refuted == 0, "it may have been luck"


def spanning(sizes: tuple[float, ...]) -> Prior:
    """One kind of kernel; each workload has one candidate that is predicted to take as long as stated, in us."""
    count = len(sizes)
    each = np.arange(count)
    alike = np.zeros(count, dtype=np.intp)
    return Prior(np.log(sizes), np.full(count, 0.3), np.full(count, 0.1), alike, each, each, np.zeros(count))


def seen(us: list[float]) -> Evidence:
    best = np.array(us)
    ran = np.isfinite(best)
    return Evidence(best, np.where(ran, FULL_TRIES, 0), np.zeros(len(us), dtype=np.bool_), np.zeros(len(us)))


def test_large_kernels_say_less_of_small_ones_than_of_their_like() -> None:
    large = [2 * us for us in (900.0, 1000.0, 1100.0)]
    posterior = Posterior(spanning((900.0, 1000.0, 1100.0, 1050.0, 4.0)), seen([*large, math.inf, math.inf]))
    like, small = posterior.mean()[3:] / np.array([1050.0, 4.0])
    assert like > 1.5
    assert 1.0 < small < 1 + 0.6 * (like - 1)


def test_drawn_errors_are_as_alike_as_stated() -> None:
    sizes = tuple(math.exp(x) for x in np.linspace(0.3, 6.0, 9))
    stated = spanning(sizes)
    posterior = Posterior(stated, seen([math.inf] * 9))
    each = np.arange(9)
    logs = np.log(posterior.draw(np.random.default_rng(1), 40_000)) - stated.log_us
    shared = covariance(stated, each, each, posterior.parts)
    apart = ~np.eye(9, dtype=bool)
    np.testing.assert_allclose(np.cov(logs.T)[apart], shared[apart], atol=0.005)


def test_what_is_far_above_its_like_is_told() -> None:
    times = {k: 100.0 + k % 7 for k in range(20)}
    excess = Posterior(prior(), evidence({**times, 12: 300.0})).excess
    assert int(np.argmax(excess)) == 12
    assert excess[12] > 3
    assert np.delete(excess, 12).max() < 1
    # Where all take three times as long, the model is wrong, and no single one of them is in doubt.
    assert Posterior(prior(), evidence({k: 3 * us for k, us in times.items()})).excess.max() < 1
