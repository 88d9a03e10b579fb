"""The lazy exact search on made-up models: where it ends, what it says on the way, what it measures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from layoutsearch.layout.transform import TransformKey
from layoutsearch.search.budget import Budget
from layoutsearch.search.gap import SearchState
from layoutsearch.search.known import Request
from layoutsearch.search.lazy import LazySearch
from layoutsearch.search.problem import NoAssignmentError
from layoutsearch.search.racing import FIRST_TRIES
from layoutsearch.search.solve import solve
from tests.search.synthetic import TRIES, World, WorldBounds, WorldLab, WorldModel, residual_skeleton


def make(
    seed: int = 0, budget: Budget | None = None, world: World | None = None, **kwargs: object
) -> tuple[World, WorldLab, LazySearch]:
    world = world or World(residual_skeleton(seed), seed)
    lab = WorldLab(world, budget)
    kwargs.setdefault("gap", 0.0)
    kwargs.setdefault("bounds", WorldBounds(world))
    return world, lab, LazySearch(world.skeleton, lab, WorldModel(world), seed=seed, **kwargs)  # type: ignore[arg-type]


def optimum(world: World) -> float:
    return solve(world.problem).cost


class StopAfter(Budget):
    """Over once the lab has spent so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(None)
        self.lab: WorldLab | None = None
        self._stop_after = seconds

    def over(self, reserve_s: float = 0.0) -> bool:
        return self.interrupted or (self.lab is not None and self.lab.seconds >= self._stop_after - reserve_s)


def test_all_measured_is_the_optimum_without_a_gap() -> None:
    world, _, search = make(1)
    state = search.exhaust()
    assert world.true_us(state.solution) == pytest.approx(optimum(world))
    assert state.cost_us == pytest.approx(optimum(world))
    assert state.gap == pytest.approx(0.0, abs=1e-9)
    assert state.strict_gap == pytest.approx(0.0, abs=1e-9)
    assert state.measured == state.candidates
    assert not search.next_batch()
    assert search.finished()


@pytest.mark.parametrize("seed", range(4))
def test_a_run_ends_near_the_optimum_with_a_part_of_the_measurements(seed: int) -> None:
    world, lab, search = make(seed, gap=0.02)
    state = search.run(Budget())
    everything = sum(len(times) for times in world.times.values()) + len(world.moves)
    assert world.true_us(state.solution) <= 1.03 * optimum(world)
    assert state.gap <= 0.02
    assert state.settled
    assert search.finished()
    assert lab.measured < 0.6 * everything
    assert state.measured < state.candidates


@pytest.mark.parametrize("seed", range(4))
def test_what_disturbed_a_layout_change_is_found_out(seed: int) -> None:
    world, lab, search = make(seed, gap=0.02)
    lab.disturbed = set(world.moves)
    state = search.run(Budget())
    assert world.true_us(state.solution) <= 1.03 * optimum(world)
    again = [key for key in world.moves if lab.transform(key).again]
    assert again
    assert all(lab.transform(key).best_us == world.moves[key] for key in again)


@pytest.mark.parametrize("seed", range(4))
def test_what_disturbed_a_kernel_is_found_out(seed: int) -> None:
    world, lab, search = make(seed, gap=0.02)
    best = solve(world.problem).assignment
    used = [(node.workload, node.choices[choice]) for node, choice in zip(world.skeleton.nodes, best, strict=True)]
    disturbed = [(workload, choice) for workload, choice in used if choice is not None][::5]
    lab.disturbed = {(workload.key, choice) for workload, choice in disturbed}
    state = search.run(Budget())
    assert world.true_us(state.solution) <= 1.03 * optimum(world)
    for workload, choice in disturbed:
        known = lab.of(workload, choice)
        assert not known.tries or known.best_us < 2 * min(world.times[workload.key, choice])


def test_what_ships_was_measured_frozen_kernels_too() -> None:
    world, lab, search = make(2, gap=0.3)
    state = search.run(Budget())
    for node, choice in zip(world.skeleton.nodes, state.solution, strict=True):
        assert lab.of(node.workload, node.choices[choice]).tries
    for key in world.skeleton.transforms(state.solution):
        assert lab.transform(key).tries
    assert search.requests(state.solution, frozen=True) == ([], [])


def test_contenders_are_timed_again() -> None:
    world, lab, search = make(3, gap=0.05)
    state = search.run(Budget())
    for node, choice in zip(world.skeleton.nodes, state.solution, strict=True):
        known = lab.of(node.workload, node.choices[choice])
        assert known.best is not None
        assert len(known.tries[known.best[0]].samples_us) > 7


def test_tries_go_to_what_may_win() -> None:
    _world, _lab, search = make(4, gap=0.01)
    search.run(Budget())
    used = {k for k in search.index.used(search.state().solution).tolist() if search.index.free[k]}
    tries = search.beliefs.kernel_evidence.tries
    winners = np.mean([tries[k] for k in used])
    losers = np.mean([t for k, t in enumerate(tries) if k not in used])
    assert winners > 2 * losers


def test_the_same_seed_measures_the_same() -> None:
    seen = []
    for _ in range(2):
        _world, lab, search = make(5, gap=0.05)
        state = search.run(Budget())
        seen.append((state, lab.measured, lab.refined))
    assert seen[0] == seen[1]


def test_a_state_does_not_depend_on_how_often_it_is_asked_for() -> None:
    _, _, search = make(5)
    _, _, other = make(5)
    search.propose(np.random.default_rng(0))
    assert search.state() == search.state() == other.state()


def test_a_search_that_goes_on_measures_nothing_twice() -> None:
    budget = StopAfter(25)
    world, lab, search = make(6, budget, gap=0.03)
    budget.lab = lab
    search.run(budget)
    first = lab.measured
    assert 0 < first <= 26
    budget._stop_after = math.inf
    resumed = LazySearch(world.skeleton, lab, WorldModel(world), WorldBounds(world), seed=6, gap=0.03)  # type: ignore[arg-type]
    state = resumed.run(budget)
    _, _whole_lab, whole = make(6, gap=0.03)
    assert state.gap <= 0.03
    assert world.true_us(state.solution) == pytest.approx(world.true_us(whole.run(Budget()).solution), rel=0.03)
    assert lab.measured == sum(len(k.tries) for k in (*lab._known.values(), *lab._moved.values()))
    assert resumed.run(budget) == state
    assert resumed.next_batch() == [] or state.gap > 0


def test_an_interrupt_stops_at_once() -> None:
    budget = Budget()
    budget.interrupt()
    _, lab, search = make(7, budget)
    state = search.run(budget)
    assert lab.measured == 0
    assert not state.settled


def test_the_reserve_is_kept() -> None:
    budget = StopAfter(60)
    _, lab, search = make(7, budget)
    budget.lab = lab
    search.run(budget, reserve_s=40)
    assert lab.seconds <= 20 + FIRST_TRIES


def test_bounds_are_in_order_and_the_strict_one_always_holds() -> None:
    world, _, search = make(8)
    best = optimum(world)
    states: list[SearchState] = []
    while True:
        states.append(search.state())
        found = search.next_batch()
        if not found or not search.measure(found):
            break
    for state in states:
        assert 0 < state.strict_bound_us <= state.lower_bound_us <= state.cost_us
        assert state.strict_bound_us <= best * (1 + 1e-9)
        assert state.regret_us >= 0
    assert states[-1].gap < 0.01 < states[0].gap
    shares = [state.measured for state in states]
    assert shares == sorted(shares)


def test_the_statistical_bound_holds_as_often_as_it_says() -> None:
    """Over 40 models and five moments of each search; the model errs as it says, tails included."""
    below = []
    for seed in range(40):
        world, _, search = make(seed, world=World(residual_skeleton(seed, blocks=3), seed), bounds=None)
        best = optimum(world)
        for _ in range(5):
            below.append(search.state().lower_bound_us > best * (1 + 1e-9))
            search.measure(search.next_batch())
    # 95 %, and two standard deviations of 40 searches.
    assert np.mean(below) < 0.05 + 2 * math.sqrt(0.05 * 0.95 / 40)


def test_without_bounds_the_strict_bound_says_little_but_is_one() -> None:
    world, _, search = make(9, bounds=None)
    assert search.state().strict_bound_us == 0.0
    search.exhaust()
    assert search.state().strict_bound_us == pytest.approx(optimum(world))


def test_what_does_not_run_is_not_used() -> None:
    skeleton = residual_skeleton(10)
    first = next(n for n in skeleton.nodes if len(n.choices) > 1)
    dead = [(first.workload.key, i) for i in range(len(first.choices) - 1)]
    world, _lab, search = make(10, world=World(skeleton, 10, dead=dead))
    state = search.run(Budget())
    assert state.solution[skeleton.nodes.index(first)] == len(first.choices) - 1
    assert world.true_us(state.solution) <= 1.01 * optimum(world)


def test_a_kernel_of_which_nothing_runs() -> None:
    skeleton = residual_skeleton(11)
    node = skeleton.nodes[0]
    dead = [(node.workload.key, i) for i in range(len(node.choices))]
    _, _, search = make(11, world=World(skeleton, 11, dead=dead))
    with pytest.raises(NoAssignmentError):
        search.run(Budget())


def test_proposals_differ_use_what_is_good_and_need_less_and_less() -> None:
    world, lab, search = make(12)
    rng = np.random.default_rng(0)
    proposals = [search.propose(rng) for _ in range(10)]
    assert len(set(proposals)) > 5
    requests, keys = search.requests(proposals[0])
    assert len(set(requests)) == len(requests)
    assert all(isinstance(r, Request) and r.tries == FIRST_TRIES for r in requests)
    assert all(isinstance(k, TransformKey) for k in keys)
    assert "reshape0" not in {r.workload.key for r in requests}, "a frozen kernel decides nothing"
    lab.measure(requests)
    lab.measure_transforms(keys)
    assert search.requests(proposals[0]) == ([], [])
    assert len(search.requests(proposals[1])[0]) < len(requests) + 1
    cost = search.evaluate(proposals[0])
    assert cost >= world.true_us(proposals[0]) * 0.9
    lab.measure([Request(r.workload, r.choice, TRIES) for r in requests])
    assert search.evaluate(proposals[0]) <= cost + 1e-9


def test_limits_on_new_candidates() -> None:
    _, _, search = make(14)
    search.measure(search.next_batch(new=3))
    assert search.state().measured <= 3
    before = search.state().measured
    while found := search.next_batch(new=0):
        if not search.measure(found):
            break
    assert search.state().measured == before


def test_the_digest_tells_searches_apart() -> None:
    assert make(15)[2].digest == make(15)[2].digest
    assert len({make(15)[2].digest, make(16)[2].digest, make(15, gap=0.5)[2].digest}) == 3


def test_bounds_that_a_measurement_refutes_bound_nothing() -> None:
    """A device that was calibrated while it was busy has limits that are too low, and bounds that are too high."""

    world = World(residual_skeleton(2, blocks=2), 2)
    _, _, search = make(2, world=world, bounds=WorldBounds(world, 1.5))
    assert search.state().refuted == 0
    state = search.exhaust()
    assert state.refuted > 0
    assert state.strict_bound_us <= optimum(world) * (1 + 1e-9)
