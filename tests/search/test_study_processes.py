"""Real processes on one study: killed in the middle of a trial, and two at once."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from layoutsearch.search.parameters import AssignmentSpace
from layoutsearch.search.storage import open_storage
from tests.search.small_model import chain_skeleton
from tests.search.study_worker import start

optuna.logging.set_verbosity(optuna.logging.WARNING)
SPACE = AssignmentSpace.of(chain_skeleton())


@pytest.fixture(params=["journal", "sqlite"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The text of --storage."""
    return str(tmp_path / "j") if request.param == "journal" else f"sqlite:///{tmp_path}/studies.db"


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_of_a_trial(where: str, tmp_path: Path) -> None:
    """Its trial is run again, by the next process."""
    killed = start("trials", where, 0, 5, 0.05)
    assert killed.stdout is not None
    for _ in range(9):
        assert killed.stdout.readline().startswith("measuring")
    killed.kill()  # and not waited for
    resumed = start("trials", where, 0, 5, 0)
    output, _ = resumed.communicate(timeout=120)
    killed.communicate()
    assert output.endswith("done 5\n")
    trials = optuna.load_study(study_name="small", storage=open_storage(where, tmp_path)).trials
    states = [t.state for t in trials]
    assert states.count(TrialState.FAIL) == 1
    assert TrialState.RUNNING not in states
    assert TrialState.WAITING not in states
    (dead,) = (t for t in trials if t.state is TrialState.FAIL)
    (retried,) = (t for t in trials if "retry_of" in t.user_attrs)
    assert retried.user_attrs["retry_of"] == dead.number
    assert retried.params == dead.params


@pytest.mark.slow
def test_two_workers_on_one_study(where: str, tmp_path: Path) -> None:
    workers = [start("trials", where, seed, 5, 0.01) for seed in (0, 1)]
    for process in workers:
        output, _ = process.communicate(timeout=120)
        assert output.endswith("done 5\n")
    trials = optuna.load_study(study_name="small", storage=open_storage(where, tmp_path)).trials
    assert [t.number for t in trials] == list(range(10))
    assert {t.state for t in trials} <= {TrialState.COMPLETE, TrialState.PRUNED}
    by_worker: dict[int, set[tuple[int, ...]]] = {}
    for trial in trials:
        by_worker.setdefault(trial.user_attrs["owner"]["pid"], set()).add(SPACE.solution(trial.params))
    assert len(by_worker) == 2
    first, second = by_worker.values()
    assert first != second
