"""`bench search` on made-up tables: shares are counted, optima reached, and the numbers are those of the points."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from layoutsearch.bench.cost_model import load_tables
from layoutsearch.bench.samplers import METHODS, measured_shares
from layoutsearch.bench.search import LIMITS, OURS, SEARCHES, cases, compare
from layoutsearch.bench.search_report import TARGETS, met_targets, share_within, summarize
from layoutsearch.replay.table import Table
from tests.bench.made_tables import made_table
from tests.cli.running import call, last_json, refused
from tests.models import nets


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    for seed, (name, module) in enumerate({"residual": nets.residual(), "mixed": nets.mixed()}.items()):
        made_table(name, module, seed, wholes=0).save(folder / f"{name}.jsonl.gz")
    return folder


@pytest.fixture(scope="module")
def tables(folder: Path) -> dict[str, Table]:
    return load_tables(folder)


@pytest.fixture(scope="module")
def points(tables: dict[str, Table]) -> pd.DataFrame:
    return compare(cases(tables), seeds=2)


def test_every_search_answers_at_every_limit_and_keeps_it(points: pd.DataFrame) -> None:
    for (_, search, _), run in points.groupby(["table", "search", "seed"]):
        assert tuple(run["limit"]) == LIMITS, search
        assert (run["share"] <= run["limit"] + 1e-9).all(), search
        assert run["share"].is_monotonic_increasing
        assert (run["regret"] >= -1e-9).all()


def test_processes_change_nothing(tables: dict[str, Table], points: pd.DataFrame) -> None:
    again = compare(cases(tables), 1, (OURS, "greedy"), jobs=2)
    alone = points[(points["seed"] == 0) & points["search"].isin((OURS, "greedy"))]
    keys = ["table", "search", "limit"]
    pd.testing.assert_frame_equal(
        again.sort_values(keys, ignore_index=True), alone.sort_values(keys, ignore_index=True), check_exact=True
    )


def test_all_measured_is_the_optimum(points: pd.DataFrame) -> None:
    end = points[(points["search"] == OURS) & (points["limit"] == 1.0)]
    assert len(end) == 4
    np.testing.assert_allclose(end[["regret", "gap", "strict_gap"]], 0.0, atol=1e-9)
    assert (end["share"] == 1.0).all()
    assert (end["valid"] == 1.0).all()


def test_the_solver_beats_choosing_by_operator(points: pd.DataFrame) -> None:
    middle = points[points["limit"] == 0.5].groupby("search")["regret"].median()
    assert middle[OURS] <= middle.drop(OURS).min()


@pytest.mark.parametrize("method", METHODS)
def test_others_depend_on_their_seed_alone(tables: dict[str, Table], method: str) -> None:
    table = tables["residual"]
    runs = [list(measured_shares(table, method, seed, (0.3, 1.0))) for seed in (0, 0, 1)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_random_assignments_are_counted_by_what_they_use(tables: dict[str, Table]) -> None:
    table = tables["mixed"]
    free = sum(len(node.choices) for node, _ in table.skeleton.workloads.values() if len(node.choices) > 1)
    (_, share, solution), (_, all_of_it, _) = measured_shares(table, "random", 0, (0.5, 1.0))
    used = {(n.workload.key, c) for n, c in zip(table.skeleton.nodes, solution, strict=True) if len(n.choices) > 1}
    assert len(used) / free <= share + 1e-9
    assert all_of_it == 1.0, "150 trials see every candidate of a small model"


def test_the_model_of_a_case_knows_other_models_only(tables: dict[str, Table]) -> None:
    for case in cases(tables):
        assert case.others.kernels
        assert case.table.header.model not in {row.model for row in case.others.kernels}


def test_share_within_counts_the_last_time_outside() -> None:
    run = pd.DataFrame({"seed": 0, "limit": [0.0, 0.1, 0.2, 0.3, 1.0], "regret": [0.5, 0.01, 0.2, 0.03, 0.0]})
    assert share_within(run, 0.03) == 0.3
    assert share_within(run, 0.01) == 1.0
    assert share_within(run, 0.6) == 0.0
    assert share_within(run.iloc[:3], 0.03) is None


def test_the_summary_is_that_of_the_points(points: pd.DataFrame) -> None:
    summary = summarize(points)
    assert set(summary) == {"residual", "mixed"}
    numbers = summary["mixed"]
    ours = points[(points["table"] == "mixed") & (points["search"] == OURS)]
    assert numbers["gap_at_25pct"] == ours.loc[ours["limit"] == 0.25, "gap"].median()
    assert numbers["bound_valid"] == ours["valid"].mean()
    assert set(numbers["regret"]) == set(SEARCHES)
    assert set(met_targets(summary)) == {*TARGETS, "bound_valid"}
    assert met_targets({"m": {**dict.fromkeys(TARGETS, 0.0), "bound_valid": 1.0}})["share_at_3pct"]
    assert not met_targets({"m": {**dict.fromkeys(TARGETS, None), "bound_valid": 0.9}})["bound_valid"]


def test_the_command_prints_one_object_and_writes_its_files(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    args = ["bench", "search", "--tables", str(folder), "--seeds", "1", "--searches", "solver,greedy"]
    code, out, _ = call(capfd, *args, "--out", str(tmp_path), "--json")
    assert code == 0
    result = last_json(out)
    assert set(result["models"]) == {"residual", "mixed"}
    assert {"share_at_3pct", "share_at_1pct", "gap_at_25pct", "strict_gap_at_25pct", "bound_valid", "regret"} <= set(
        result["models"]["mixed"]
    )
    assert {path.name for path in tmp_path.iterdir()} == {"points.csv", "summary.csv", "residual.png", "mixed.png"}
    frame = pd.read_csv(tmp_path / "points.csv")
    assert set(frame["search"]) == {"solver", "greedy"}
    assert json.dumps(result)


def test_an_unknown_search_is_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "--searches" in refused(capfd, "bench", "search", "--tables", str(folder), "--searches", "solver,annealing")
