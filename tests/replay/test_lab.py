"""A replayed search sees what a live one would have seen, in the same order and once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from layoutsearch.measure.records import RecordStore
from layoutsearch.measure.results import Measurement, Status
from layoutsearch.replay.clock import SimulatedBudget
from layoutsearch.replay.lab import WORKERS, ReplayLab
from layoutsearch.replay.table import RecordedTry, Table, TableError
from layoutsearch.search.assemble import build_program
from layoutsearch.search.known import WHOLE, Request
from layoutsearch.search.setup import ModelSetup
from layoutsearch.search.solve import solve
from tests.replay.made import made_table

TRIES = 5


def requests(table: Table, tries: int) -> list[Request]:
    return [Request(workload, choice, tries) for workload, choice in table.candidates]


def test_tries_come_in_recorded_order(table: Table) -> None:
    lab = ReplayLab(table)
    for workload, choice in table.candidates:
        attempts = [a for a in table.attempts(workload.key, str(choice or "")) if a.schedule != WHOLE]
        for count in range(1, TRIES):
            lab.measure([Request(workload, choice, count)])
            known = lab.of(workload, choice)
            assert list(known.tries) == [a.schedule for a in attempts[:count]]
            assert list(known.tries.values()) == [a.measurement for a in attempts[:count]]
            assert not known.closed
        lab.measure([Request(workload, choice, TRIES)])
        assert lab.of(workload, choice).closed
    assert lab.measured == TRIES * len(table.candidates)
    assert lab.failures == {"crash": len(table.candidates)}


def test_asking_again_measures_nothing(table: Table) -> None:
    lab = ReplayLab(table)
    lab.measure(requests(table, 3))
    lab.measure_transforms(table.skeleton.keys.values())
    measured, spent = lab.measured, lab.budget.elapsed_s
    assert measured == 3 * len(table.candidates) + len(set(table.skeleton.keys.values()))
    assert lab.candidates_measured == len(table.candidates)
    lab.measure(requests(table, 3))
    lab.measure(requests(table, 1))
    lab.measure_transforms(table.skeleton.keys.values())
    assert (lab.measured, lab.budget.elapsed_s) == (measured, spent)
    lab.measure(requests(table, 99))
    lab.measure(requests(table, 99))
    assert lab.measured == measured + 2 * len(table.candidates)


def test_time_passes_as_recorded(table: Table) -> None:
    lab = ReplayLab(table)
    workload, choice = table.candidates[0]
    lab.measure([Request(workload, choice, 2)])
    first, second = table.attempts(workload.key, str(choice or ""))[:2]
    expected = sum(a.build_s / WORKERS + a.measurement.wall_s for a in (first, second))
    assert lab.budget.elapsed_s == pytest.approx(expected)


def test_the_budget_ends_the_measuring(table: Table) -> None:
    budget = SimulatedBudget(2.0)
    lab = ReplayLab(table, budget=budget)
    lab.measure(requests(table, TRIES))
    assert 0 < lab.measured < TRIES * len(table.candidates)
    assert budget.over()
    longest = max(sum(a.build_s + a.last.wall_s for a in attempts) for attempts in table.tries.values())
    assert budget.elapsed_s < 2.0 + longest
    before = lab.measured
    lab.measure_transforms(table.skeleton.keys.values())
    lab.refine(requests(table, 2), 21)
    assert lab.measured == before

    kept = ReplayLab(table, budget=SimulatedBudget(2.0))
    kept.measure(requests(table, TRIES), reserve_s=2.0)
    assert kept.measured == 0


def test_refinements_replace_and_are_made_once(table: Table) -> None:
    lab = ReplayLab(table)
    lab.measure(requests(table, TRIES))
    workload, choice = table.candidates[0]
    refined = {a.schedule: a.refined for a in table.attempts(workload.key, str(choice or "")) if a.refined}
    assert refined
    before = lab.measured
    lab.refine([Request(workload, choice, 2)], 21)
    for schedule, measurement in refined.items():
        assert lab.of(workload, choice).tries[schedule] == measurement
    assert lab.measured == before + len(refined)
    lab.refine([Request(workload, choice, 2)], 21)
    assert lab.measured == before + len(refined)


def test_all_that_is_recorded_gives_the_tables_optimum(table: Table) -> None:
    lab = ReplayLab(table)
    lab.measure(requests(table, 99))
    lab.refine(requests(table, 99), 21)
    lab.measure_transforms(table.skeleton.keys.values())
    program = build_program(table.skeleton, lab)
    assert program.problem == table.problem
    assert solve(program.problem).cost == pytest.approx(solve(table.problem).cost)


def test_the_store_is_where_it_starts_from(table: Table, tmp_path: Path) -> None:
    with RecordStore(tmp_path / "r.sqlite") as store:
        first = ReplayLab(table, store)
        first.measure(requests(table, 2))
        first.refine(requests(table, 1), 21)
        again = ReplayLab(table, store)
        for workload, choice in table.candidates:
            assert again.of(workload, choice) == first.of(workload, choice)
        again.measure(requests(table, 2))
        assert again.measured == 0
        assert again.budget.elapsed_s == 0
        again.measure(requests(table, TRIES))
        again.measure_transforms(table.skeleton.keys.values())
        counts = Counter((r.workload, r.candidate, r.schedule) for r in store.records())
        refined = {(a.workload, a.candidate, a.schedule) for a in (*table.kernels, *table.transforms) if a.refined}
        assert all(count == 1 or (key in refined and count == 2) for key, count in counts.items())
        assert set(counts) == {(a.workload, a.candidate, a.schedule) for a in (*table.kernels, *table.transforms)}


def test_a_resumed_run_recalls_before_it_measures(table: Table, tmp_path: Path) -> None:
    """It sees what it saw, in that order, measures nothing of it again, and then goes on."""
    with RecordStore(tmp_path / "r.sqlite") as store:
        began, whole = store.mark(), ReplayLab(table)
        killed = ReplayLab(table, store, began=began)
        killed.measure(requests(table, 3))
        killed.refine(requests(table, 1), 21)
        resumed = ReplayLab(table, store, began=began)
        workload, choice = table.candidates[0]
        assert not resumed.of(workload, choice).tries
        for tries in (1, 2, 3):
            for lab in (resumed, whole):
                lab.measure(requests(table, tries))
            assert all(resumed.of(*pair) == whole.of(*pair) for pair in table.candidates)
        assert resumed.measured == 0
        for lab in (resumed, whole):
            lab.refine(requests(table, 1), 21)
        assert all(resumed.of(*pair) == whole.of(*pair) for pair in table.candidates)
        assert resumed.measured == 0
        for lab in (resumed, whole):
            lab.measure(requests(table, TRIES))
        assert all(resumed.of(*pair) == whole.of(*pair) for pair in table.candidates)
        assert resumed.measured == (TRIES - 3) * len(table.candidates)
        assert not resumed.recall(requests(table, TRIES), table.skeleton.keys.values())


def test_a_run_killed_before_the_last_word_on_a_candidate_says_it_when_resumed(table: Table, tmp_path: Path) -> None:
    workload, choice = table.candidates[0]
    last = [a for a in table.attempts(workload.key, str(choice or "")) if a.schedule != WHOLE][-1]
    request, key = Request(workload, choice, TRIES), next(iter(table.skeleton.keys.values()))
    with RecordStore(tmp_path / "whole.sqlite") as store:
        ReplayLab(table, store).measure([request])
        ReplayLab(table, store).measure_transforms([key])
        rows = list(store.records())
    assert [r.schedule for r in rows].count(WHOLE) == 2
    with RecordStore(tmp_path / "torn.sqlite") as store:
        began = store.mark()
        store.add(*(row for row in rows if row.schedule != WHOLE))
        resumed = ReplayLab(table, store, began=began)
        assert resumed.recall([request], [key])
        assert resumed.of(workload, choice).closed
        assert resumed.transform(key).closed
        assert list(resumed.of(workload, choice).tries)[-1] == last.schedule
        assert [r.schedule for r in store.records()][-2:] == [WHOLE, WHOLE]
        assert resumed.measured == 0


def test_records_of_another_table_are_not_mixed_up(table: Table, setup: ModelSetup, tmp_path: Path) -> None:
    other = made_table(setup, seed=9)
    with RecordStore(tmp_path / "r.sqlite") as store:
        ReplayLab(other, store).measure(requests(other, 2))
        lab = ReplayLab(table, store)
        workload, choice = table.candidates[0]
        assert not lab.of(workload, choice).tries


def test_a_table_that_stopped_early_closes_the_candidate(table: Table) -> None:
    """No record says that the templates have no further schedule; there is none to replay."""
    short = replace(table, kernels=tuple(a for a in table.kernels if a.schedule != WHOLE))
    lab = ReplayLab(short)
    workload, choice = short.candidates[0]
    lab.measure([Request(workload, choice, 99)])
    assert lab.of(workload, choice).closed
    assert lab.of(workload, choice).reason == ""


def test_a_candidate_that_does_not_build(table: Table) -> None:
    workload, choice = table.candidates[0]
    text = str(choice or "")
    failure = RecordedTry(workload.key, text, WHOLE, Measurement(Status.BUILD_CRASH, (), "killed", 3.0), 1.0)
    rest = tuple(a for a in table.kernels if (a.workload, a.candidate) != (workload.key, text))
    lab = ReplayLab(replace(table, kernels=(failure, *rest)))
    lab.measure([Request(workload, choice, 4)])
    known = lab.of(workload, choice)
    assert (known.closed, known.reason, known.best_us) == (True, "killed", float("inf"))
    assert lab.failures == {"build_crash": 1}
    assert lab.measured == 0
    assert lab.budget.elapsed_s > 0


def test_an_unknown_workload_is_one_clear_error(table: Table) -> None:
    workload, choice = table.candidates[0]
    stranger = replace(workload, key="f" * 16)
    lab = ReplayLab(table)
    with pytest.raises(TableError, match=r"made\.jsonl\.gz has no measurement of .*bench record") as caught:
        lab.measure([Request(stranger, choice, 1)])
    assert "\n" not in str(caught.value)
