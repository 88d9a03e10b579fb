"""Which way kernels are shared out between threads: what is timed, what is best, what becomes of a plan."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.transform import TransformKey
from layoutsearch.measure.results import Measurement
from layoutsearch.plan.plan import LayoutPlan, PlanFusion
from layoutsearch.schedule import Schedule
from layoutsearch.search.known import Known
from layoutsearch.search.sharing import (
    BY_CHANNELS,
    BY_ROWS,
    Parts,
    best_ways,
    designs,
    shared_kernels,
    way_of,
    with_ways,
)
from layoutsearch.search.workloads import Workload
from tests.search.pair_case import Case, schedule, took

PLENTY = 1e12


def channels(outer: str, tile: int = 2) -> Schedule:
    return Schedule.make("channels", tile=tile, vectors=1, reduce="taps_outer", outer=outer)


def all_in(plan: LayoutPlan, outer: str) -> LayoutPlan:
    """The plan with every convolution in one schedule that took 10 us."""
    ops = tuple(
        replace(op, schedule=channels(outer), measured_us=10.0) if op.kind.startswith("conv2d") and op.schedule else op
        for op in plan.ops
    )
    return replace(plan, ops=ops)


class Knows:
    """The same is known of every kernel."""

    def __init__(self, tries: Mapping[str, Measurement] | None = None) -> None:
        self.tries = dict(tries or {})

    def of(self, workload: Workload, choice: Candidate | None) -> Known:
        return Known(self.tries)

    def transform(self, key: TransformKey) -> Known:
        raise AssertionError


def key(schedule: Schedule) -> str:
    return json.dumps(schedule.to_json(), sort_keys=True, separators=(",", ":"))


@pytest.mark.parametrize(
    ("made", "way"),
    [
        (channels("rows"), BY_ROWS),
        (channels("channels"), BY_CHANNELS),
        (channels("panels"), BY_CHANNELS),
        (Schedule.make("winograd", tile=2, vectors=1, strips=1, outer="tiles"), BY_ROWS),
        (Schedule.make("winograd", tile=2, vectors=1, strips=1, outer="channels"), BY_CHANNELS),
        (Schedule.make("loops"), None),
        (schedule(1), None),
        (None, None),
    ],
)
def test_way_of(made: Schedule | None, way: int | None) -> None:
    assert way_of(made) == way


def test_equal_kernels_are_one(case: Case) -> None:
    found = shared_kernels(all_in(case.plan, "rows"), case.graph, case.nodes, Knows(), PLENTY)
    # A stem, one expansion, depthwise with stride 1 and 2, and two projections.
    assert [len(kernel.ops) for kernel in found] == [1, 3, 2, 2, 1, 1]
    assert all(kernel.now == BY_ROWS for kernel in found)
    assert all(kernel.schedules == (channels("rows"), channels("channels")) for kernel in found)
    assert all(kernel.us == (10.0, None) for kernel in found)


def test_the_fastest_of_the_other_way_is_taken(case: Case) -> None:
    known = Knows(
        {
            key(channels("rows")): took(10.0),
            key(channels("panels", 3)): took(12.0),
            key(channels("channels", 4)): took(11.0),
            key(Schedule.make("loops")): took(1.0),
        }
    )
    found = shared_kernels(all_in(case.plan, "rows"), case.graph, case.nodes, known, PLENTY)
    assert {(kernel.schedules[BY_CHANNELS], kernel.us[BY_CHANNELS]) for kernel in found} == {
        (channels("channels", 4), 11.0)
    }
    slow = Knows({key(channels("channels", 4)): took(16.0)})
    assert shared_kernels(all_in(case.plan, "rows"), case.graph, case.nodes, slow, PLENTY) == []


def test_kernels_that_leave_nothing_in_a_cache_stay(case: Case) -> None:
    every = shared_kernels(all_in(case.plan, "rows"), case.graph, case.nodes, Knows(), PLENTY)
    moved = sorted(
        node.workload.facts.read_bytes + node.workload.facts.written_bytes
        for node in case.nodes
        if case.graph.by_name[node.root].kind.startswith("conv2d")
    )
    some = shared_kernels(all_in(case.plan, "rows"), case.graph, case.nodes, Knows(), moved[2])
    assert 0 < len(some) < len(every)
    assert shared_kernels(all_in(case.plan, "rows"), case.graph, case.nodes, Knows(), moved[0] - 1) == []


def test_pairs_stay(case: Case) -> None:
    plan = all_in(case.plan, "rows")
    first, second = case.works()[0].ops[0]
    plan = replace(plan, fusions=(PlanFusion(first, second, schedule(1)),))
    found = shared_kernels(plan, case.graph, case.nodes, Knows(), PLENTY)
    assert not {first, second} & {op for kernel in found for op in kernel.ops}


def test_a_plan_in_other_ways(case: Case) -> None:
    plan = all_in(case.plan, "rows")
    kernels = shared_kernels(plan, case.graph, case.nodes, Knows(), PLENTY)
    assert with_ways(plan, kernels, tuple(kernel.now for kernel in kernels)) == plan
    ways = tuple(BY_CHANNELS if number == 1 else BY_ROWS for number in range(len(kernels)))
    changed = {new.id: new for old, new in zip(plan.ops, with_ways(plan, kernels, ways).ops, strict=True) if old != new}
    assert set(changed) == set(kernels[1].ops)
    for op in changed.values():
        assert op.schedule == channels("channels")
        assert op.measured_us is None
        assert "by channels" in op.why


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_designs(order: list[int]) -> None:
    numbers = {kernel: i for i, kernel in enumerate(dict.fromkeys(order))}
    order = [numbers[kernel] for kernel in order]
    every = designs(order, len(numbers))
    assert (BY_ROWS,) * len(numbers) in every
    assert (BY_CHANNELS,) * len(numbers) in every
    assert len(every) == len(set(every)) <= 6
    assert all(len(ways) == len(numbers) for ways in every)
    if len(numbers) == len(order):
        # No kernel twice: every way of two neighbours is seen.
        for one, two in itertools.pairwise(order):
            assert {(ways[one], ways[two]) for ways in every} == set(itertools.product((0, 1), repeat=2))


@st.composite
def truths(draw: st.DrawFn) -> tuple[list[int], int, np.ndarray]:
    """Kernels in order, their number, and microseconds at each place by both ways: shape (places, 2, 2)."""
    count = draw(st.integers(2, 4))
    order = draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=9))
    return order, count, np.random.default_rng(draw(st.integers(0, 99))).uniform(1, 9, size=(len(order), 2, 2))


def times(order: Sequence[int], truth: np.ndarray, ways: Sequence[int]) -> list[float]:
    before = [order[0], *order[:-1]]
    return [float(truth[i, ways[b], ways[k]]) for i, (b, k) in enumerate(zip(before, order, strict=True))]


@given(truths())
def test_best_against_all(given_truth: tuple[list[int], int, np.ndarray]) -> None:
    order, count, truth = given_truth
    every = list(itertools.product((BY_ROWS, BY_CHANNELS), repeat=count))
    found = best_ways(order, count, [(ways, times(order, truth, ways)) for ways in every])
    best = min(sum(times(order, truth, ways)) for ways in every)
    assert sum(times(order, truth, found)) == pytest.approx(best)


def test_a_change_of_ways_that_was_never_seen_is_no_gain() -> None:
    """Two kernels by turns cannot be seen apart where only two designs were timed."""
    order = [0, 1, 0, 1]
    observed = [((0, 0), [5.0, 1.0, 5.0, 1.0]), ((1, 1), [1.0, 5.0, 1.0, 6.0])]
    assert best_ways(order, 2, observed) == (0, 0)


def test_what_is_between_belongs_to_the_kernel_before() -> None:
    parts = Parts(("stem", "a", "", "pool", "b", "a", "c"), (9.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0))
    assert parts.by_kernel({"a": 0, "b": 1}) == ([0, 1, 0], [7.0, 8.0, 48.0])
