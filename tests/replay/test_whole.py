"""Whole models in a replay: recorded times where there are some, else simulated ones that never change."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from layoutsearch.replay.clock import SimulatedBudget
from layoutsearch.replay.lab import ReplayLab, replay_identity
from layoutsearch.replay.table import Table, TableError
from layoutsearch.replay.whole import ReplayWhole, SimulatedTimes
from layoutsearch.search.assemble import build_program
from layoutsearch.search.export import PlanContext, make_plan
from layoutsearch.search.known import Request
from layoutsearch.search.setup import ModelSetup
from layoutsearch.search.solve import solve


@pytest.fixture(scope="module")
def lab(table: Table) -> ReplayLab:
    lab = ReplayLab(table)
    lab.measure([Request(workload, choice, 99) for workload, choice in table.candidates])
    lab.refine([Request(workload, choice, 99) for workload, choice in table.candidates], 21)
    lab.measure_transforms(table.skeleton.keys.values())
    return lab


def plan_of(setup: ModelSetup, table: Table, lab: ReplayLab, solution: tuple[int, ...]) -> object:
    context = PlanContext(setup.loaded, setup.graph, setup.fingerprint, setup.target, replay_identity(table))
    return make_plan(context, build_program(setup.skeleton, lab), solution, lab)


def test_recorded_assignments_take_their_recorded_time(table: Table) -> None:
    times = SimulatedTimes(table)
    for whole in table.wholes:
        samples = times.samples_us(whole.solution, seed=0, rounds=200)
        assert statistics.median(samples) == pytest.approx(table.whole_us[whole.solution], rel=0.01)


def test_other_assignments_are_as_far_from_the_sum_as_recorded_ones(table: Table) -> None:
    times = SimulatedTimes(table)
    ratios = [us / table.additive_us(solution) for solution, us in table.whole_us.items()]
    best = solve(table.problem).assignment
    assert best not in table.whole_us
    level = times.level_us(best)
    assert level == times.level_us(best)
    assert min(ratios) <= level / table.additive_us(best) * (1 + 1e-9)
    assert level / table.additive_us(best) <= max(ratios) * (1 + 1e-9)


def test_samples_depend_on_assignment_seed_and_round_alone(setup: ModelSetup, table: Table, lab: ReplayLab) -> None:
    solutions = [solve(table.problem).assignment, table.wholes[0].solution]
    plans = {f"p{i}": plan_of(setup, table, lab, s) for i, s in enumerate(solutions)}
    one = ReplayWhole(table, setup.graph)
    both = one.time(one.build(plans), rounds=8, seed=3, starts=2)  # type: ignore[arg-type]
    other = ReplayWhole(table, setup.graph)
    alone = other.time(other.build({"again": plans["p1"]}), rounds=8, seed=3, starts=2)  # type: ignore[dict-item]
    assert alone["again"] == both["p1"]
    assert {len(v) for v in both.values()} == {8}
    assert len(set(both["p0"])) > 1
    different = other.time(other.build({"again": plans["p1"]}), rounds=8, seed=4)  # type: ignore[dict-item]
    assert different["again"] != alone["again"]


def test_a_slower_schedule_makes_the_model_slower(setup: ModelSetup, table: Table) -> None:
    """A search that tried less has worse schedules in its plan."""
    lazy, solution = ReplayLab(table), solve(table.problem).assignment
    lazy.measure([Request(workload, choice, 1) for workload, choice in table.candidates])
    full = ReplayLab(table)
    full.measure([Request(workload, choice, 99) for workload, choice in table.candidates])
    full.refine([Request(workload, choice, 99) for workload, choice in table.candidates], 21)
    whole = ReplayWhole(table, setup.graph)
    plans = {"lazy": plan_of(setup, table, lazy, solution), "full": plan_of(setup, table, full, solution)}
    samples = whole.time(whole.build(plans), rounds=40, seed=0)  # type: ignore[arg-type]
    assert statistics.median(samples["lazy"]) > 1.05 * statistics.median(samples["full"])


def test_time_passes(setup: ModelSetup, table: Table, lab: ReplayLab) -> None:
    budget = SimulatedBudget(8.0)
    whole = ReplayWhole(table, setup.graph, budget)
    plans = {"a": plan_of(setup, table, lab, table.wholes[0].solution)}
    built = whole.build(plans)  # type: ignore[arg-type]
    assert budget.elapsed_s == pytest.approx(1.5 / 2)
    assert not Path(built["a"].path).exists()
    samples = whole.time(built, rounds=10_000, seed=0)
    assert budget.over()
    assert 2 <= len(samples["a"]) < 10_000


def test_a_table_without_whole_assignments_is_refused(table: Table) -> None:
    with pytest.raises(TableError, match="no whole assignments"):
        SimulatedTimes(replace(table, wholes=()))
