"""`bench cost-model` leaves whole models out, and its numbers are those of its CSV files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from layoutsearch.bench.cost_model import Evaluation, evaluate, load_tables
from layoutsearch.bench.cost_report import ALL, TARGETS, choice_regret, relative_error, summarize
from tests.bench.made_tables import made_table
from tests.cli.running import call, last_json, refused
from tests.models import nets


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    for seed, (name, module) in enumerate(
        {
            "residual": nets.residual(),
            "residual_large": nets.residual((1, 32, 20, 28)),
            "stem": nets.stem((1, 3, 40, 56)),
            "mixed": nets.mixed(),
        }.items()
    ):
        # Two tables of one model: an input size says nothing new.
        model = name.removesuffix("_large")
        made_table(model, module, seed).save(folder / f"{name}.jsonl.gz")
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Evaluation:
    return evaluate(load_tables(folder))


def test_every_candidate_of_every_table_is_predicted_once(folder: Path, found: Evaluation) -> None:
    for name, table in load_tables(folder).items():
        kernels = found.kernels[found.kernels["table"] == name]
        assert len(kernels) == len(table.candidates)
        assert set(zip(kernels["workload"], kernels["candidate"], strict=True)) == {
            (w.key, str(c) if c is not None else "") for w, c in table.candidates
        }
        assert len(found.transforms[found.transforms["table"] == name]) == len(set(table.skeleton.keys.values()))
        assert len(found.wholes[found.wholes["table"] == name]) == len(table.wholes)
    assert np.isfinite(found.kernels[["us", "predicted_us", "sigma"]].to_numpy()).all()


def test_nothing_of_a_model_is_known_when_it_is_predicted(folder: Path, found: Evaluation) -> None:
    """Other times in the table that is left out, the same predictions of it."""
    tables = load_tables(folder)
    tables["stem"] = made_table("stem", nets.stem((1, 3, 40, 56)), 99, whole_factor=3.0)
    again = evaluate(tables)
    for column, frame in (("predicted_us", "kernels"), ("predicted_us", "transforms")):
        first, second = (getattr(e, frame) for e in (found, again))
        assert np.array_equal(first[first["table"] == "stem"][column], second[second["table"] == "stem"][column])
    large = [e.kernels[e.kernels["table"] == "residual_large"]["predicted_us"] for e in (found, again)]
    assert not np.array_equal(*large)


def test_the_correction_finds_what_whole_models_add(found: Evaluation) -> None:
    numbers = summarize(found)[ALL]
    assert numbers["whole_error"] == pytest.approx(0.1, abs=0.03)
    assert numbers["whole_error_corrected"] < 0.04
    assert numbers["whole_error_own_5"] < 0.03


def test_the_regret_of_perfect_predictions_is_nil_and_of_the_worst_is_all() -> None:
    frame = pd.DataFrame(
        {
            "table": ["t"] * 4,
            "workload": ["a", "a", "b", "b"],
            "count": [3, 3, 1, 1],
            "us": [1.0, 2.0, 4.0, 6.0],
            "predicted_us": [1.0, 2.0, 4.0, 6.0],
        }
    )
    assert choice_regret(frame) == 0.0
    assert choice_regret(frame.assign(predicted_us=-frame["us"])) == pytest.approx((3 * 1 + 2) / (3 * 1 + 4))
    assert relative_error(frame["us"], 1.1 * frame["us"]) == pytest.approx(0.1)


def test_the_command_prints_one_object_and_writes_tables_and_plots(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], found: Evaluation
) -> None:
    code, out, _ = call(capfd, "bench", "cost-model", "--tables", folder, "--out", tmp_path, "--json")
    assert code == 0
    data = last_json(out)
    assert set(data["met"]) == set(TARGETS)
    assert set(data["models"]) == {"residual", "residual_large", "stem", "mixed", ALL}
    assert data["models"] == json.loads(json.dumps(summarize(found)))
    written = pd.read_csv(tmp_path / "kernels.csv")
    assert len(written) == data["models"][ALL]["kernels"]
    for name in ("kernels.png", "transforms.png", "wholes.png", "summary.csv", "wholes.csv", "choices.csv"):
        assert (tmp_path / name).stat().st_size > 0


def test_one_model_alone_cannot_be_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made_table("stem", nets.stem(), 0).save(tmp_path / "stem.jsonl.gz")
    assert "leaving one out takes two" in refused(capfd, "bench", "cost-model", "--tables", tmp_path)
