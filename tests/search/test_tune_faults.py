"""Whole runs in which candidates fail, or everything does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import tvm

from layoutsearch.errors import LayoutSearchError
from layoutsearch.layout.space import parse_space
from layoutsearch.measure.calibrate import CalibrationError
from layoutsearch.measure.profile import HOME_VARIABLE
from layoutsearch.search import kernels, labs, whole
from layoutsearch.search.budget import Budget
from layoutsearch.search.tune import TuneOptions, TuneResult, run_tune
from tests.cli.running import SPACE
from tests.models import nets


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children()}
    yield
    left = [child for child in psutil.Process().children() if child.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=5)
    assert not alive


def _tune(out: Path) -> TuneResult:
    options = TuneOptions(space=parse_space(SPACE, "test"), trials=1, threads=1, time_budget_s=20.0, out=out)
    return run_tune(nets.stem((1, 3, 16, 16)), options)


def test_candidates_that_crash_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCHW8c crashes the compiler in one kernel and the device in another; what is left is planned."""
    monkeypatch.setattr(kernels, "KERNELS", "tests.search.faulty_jobs:build_kernels")
    result = _tune(tmp_path / "out")
    assert result.plan is not None
    layouts = {str(op.choice) for op in result.plan.ops if op.choice and op.kind.startswith("conv2d")}
    assert layouts == {"NCHW,OIHW,NCHW"}
    assert result.failures["build_crash"] >= 1
    assert any("SIGSEGV" in note for note in result.notes)
    assert result.to_json()["failures"] == dict(result.failures)


def test_no_plan_at_all_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "PLAN", "tests.search.faulty_jobs:build_plan")
    with pytest.raises(LayoutSearchError, match=r"no plan could be validated.*no plan today") as caught:
        _tune(tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "out" / "records.sqlite") in str(caught.value)
    assert not (tmp_path / "out" / "plan.json").exists()


def test_a_budget_that_is_too_short_is_an_error_that_says_so(tmp_path: Path) -> None:
    options = TuneOptions(space=parse_space(SPACE, "test"), threads=1, time_budget_s=0.01, out=tmp_path / "out")
    with pytest.raises(LayoutSearchError, match="time"):
        run_tune(nets.stem((1, 3, 16, 16)), options)


def test_a_module_in_memory_is_tuned_as_a_file_is(tmp_path: Path) -> None:
    (tmp_path / "stem.json").write_text(tvm.ir.save_json(nets.stem((1, 3, 16, 16))))
    options = TuneOptions(
        space=parse_space(SPACE, "test"), trials=1, threads=1, time_budget_s=120.0, out=tmp_path / "out",
        records=tmp_path / "records.sqlite",
    )  # fmt: skip
    first = run_tune(nets.stem((1, 3, 16, 16)), options)
    second = run_tune(tmp_path / "stem.json", options)
    assert first.plan is not None
    assert second.plan is not None
    assert first.plan.fingerprint == second.plan.fingerprint
    assert second.kernels_measured < first.kernels_measured


def test_a_run_that_is_stopped_does_not_begin_to_calibrate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    budget = Budget()
    budget.interrupt()
    options = TuneOptions(space=parse_space(SPACE, "test"), trials=1, threads=1, out=tmp_path / "out")
    result = run_tune(nets.stem((1, 3, 16, 16)), options, budget=budget)
    assert result.interrupted
    assert result.plan is None
    assert not (tmp_path / "home" / "devices").exists()


def test_a_plan_of_an_earlier_run_has_to_be_within_the_limit_of_this_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = _tune(out).plan
    assert plan is not None
    # Found within a limit that was larger.
    replace(plan, validation={**plan.validation, "max_rel_error": 0.5}).save(out / "plan.json")
    again = _tune(out).plan
    assert again is not None
    assert again.validation["max_rel_error"] < 1e-3


def test_a_calibration_that_fails_costs_the_bound_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise CalibrationError("the server was killed")

    monkeypatch.setattr(labs, "profile_for", fail)
    monkeypatch.setattr(labs, "_CALIBRATE_FROM_S", 0.0)
    result = _tune(tmp_path / "out")
    assert result.plan is not None
    assert any("the server was killed" in note and "no lower bound" in note for note in result.notes)
