"""Storages by path and URL, and trials of processes that were killed."""

from __future__ import annotations

import datetime
import sqlite3
import sys
from pathlib import Path

import optuna
import pytest
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.trial import TrialState, create_trial

from layoutsearch.search import storage as storage_module
from layoutsearch.search.owner import Owner
from layoutsearch.search.parameters import AssignmentSpace
from layoutsearch.search.storage import StorageError, open_storage, storage_errors
from layoutsearch.search.trials import recover
from tests.search.small_model import chain_skeleton
from tests.search.test_study import Run

optuna.logging.set_verbosity(optuna.logging.WARNING)
SPACE = AssignmentSpace.of(chain_skeleton())


@pytest.fixture(params=["journal", "sqlite"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The text of --storage."""
    return str(tmp_path / "j") if request.param == "journal" else f"sqlite:///{tmp_path}/studies.db"


def test_kinds_of_storage(tmp_path: Path) -> None:
    default = open_storage(None, tmp_path / "out")
    assert isinstance(default, JournalStorage)
    assert (tmp_path / "out" / "study.journal").exists()
    assert isinstance(open_storage(str(tmp_path / "elsewhere"), tmp_path), JournalStorage)
    assert isinstance(open_storage(f"sqlite:///{tmp_path}/s.db", tmp_path), RDBStorage)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sqlite://///no/such/folder/s.db", "unable to open database file; its folder has to exist"),
        ("nosuchdb://host/name", "is none; expected the path of a journal file, sqlite:///FILE or postgresql://"),
        ("postgresql://user:secret@127.0.0.1:port/x", "is none; expected"),
        ("mysql+oursql://user:secret@127.0.0.1/x", "--storage mysql"),
    ],
)
def test_what_cannot_be_used_is_an_error_of_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(StorageError, match=message) as caught:
        open_storage(text, tmp_path)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("line", ['{"a": 1}', "[1]", "3", '{"op_code": 99, "worker_id": "w"}', '{"op_code": 0}'])
def test_a_journal_with_a_line_of_something_else_is_an_error_of_one_line(tmp_path: Path, line: str) -> None:
    optuna.create_study(storage=open_storage(None, tmp_path), study_name="s").ask()
    path = tmp_path / "study.journal"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, *lines[1:]]) + "\n")
    with pytest.raises(StorageError, match="move the file away") as caught:
        open_storage(None, tmp_path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("driver", "package"), [("psycopg2", "psycopg2-binary"), ("psycopg", r"'psycopg\[binary\]'")])
def test_a_missing_driver_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, driver, None)
    with pytest.raises(StorageError, match=rf"the driver {driver} is missing; pip install {package}"):
        open_storage(f"postgresql+{driver}://user:secret@127.0.0.1/x", tmp_path)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, " * 100)
    with pytest.raises(StorageError, match="file is not a database; check it"):
        open_storage(f"sqlite:///{tmp_path}/text", tmp_path)


def test_a_database_that_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "_BUSY_S", 0.05)
    url = f"sqlite:///{tmp_path}/s.db"
    storage = open_storage(url, tmp_path)
    other = sqlite3.connect(tmp_path / "s.db")
    other.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(StorageError, match="database is locked: another process has held it"):
            open_storage(url, tmp_path)
        with pytest.raises(StorageError, match="database is locked"), storage_errors(storage):
            optuna.create_study(storage=storage)
    finally:
        other.close()


def test_optunas_progress_lines_stay_away_and_come_back(tmp_path: Path) -> None:
    optuna.logging.set_verbosity(optuna.logging.INFO)
    try:
        with storage_module.quiet():
            assert optuna.logging.get_verbosity() == optuna.logging.WARNING
        assert optuna.logging.get_verbosity() == optuna.logging.INFO
    finally:
        optuna.logging.set_verbosity(optuna.logging.WARNING)


PARAMS = SPACE.params((3, 0, 2, 1, 3, 1, 0))
HERE = Owner.current()
DEAD = Owner(HERE.host, HERE.boot, HERE.pid, HERE.started - 100)


def running(storage: BaseStorage, owner: Owner | None, params: dict[str, str], minutes_ago: float = 10) -> optuna.Study:
    """A study with a trial that is RUNNING."""
    study = optuna.create_study(storage=storage, study_name="s", load_if_exists=True)
    trial = create_trial(
        state=TrialState.RUNNING,
        params=params,
        distributions={name: SPACE.distributions[name] for name in params},
        user_attrs={"owner": owner.to_json()} if owner else {},
    )
    trial.datetime_start = datetime.datetime.now() - datetime.timedelta(minutes=minutes_ago)
    study.add_trial(trial)
    return study


def test_trials_of_dead_processes_are_told_and_asked_again(where: str, tmp_path: Path) -> None:
    storage = open_storage(where, tmp_path)
    study = running(storage, DEAD, PARAMS)
    assert recover(study, storage, SPACE.distributions) == [f"trial 0: its process {DEAD.pid} was killed"]
    dead, queued = study.trials
    assert (dead.state, dead.user_attrs["why"]) == (TrialState.FAIL, f"its process {DEAD.pid} was killed")
    assert (queued.state, queued.user_attrs) == (TrialState.WAITING, {"retry_of": 0})
    assert study.ask(SPACE.distributions).params == PARAMS
    assert recover(study, storage, SPACE.distributions) == []
    assert len(study.trials) == 2


@pytest.mark.parametrize(
    ("owner", "params", "minutes"),
    [
        (HERE, PARAMS, 10),
        (Owner("another machine", "", 1, 0.0), PARAMS, 10),
        (None, PARAMS, 10),
        (None, {}, 0),
    ],
    ids=["this process", "another machine", "a user's script", "being asked for"],
)
def test_other_trials_are_let_be(tmp_path: Path, owner: Owner | None, params: dict[str, str], minutes: float) -> None:
    storage = open_storage(None, tmp_path)
    study = running(storage, owner, params, minutes)
    assert recover(study, storage, SPACE.distributions) == []
    assert [t.state for t in study.trials] == [TrialState.RUNNING]


@pytest.mark.parametrize(
    ("owner", "params"), [(None, {}), (DEAD, {"conv0": PARAMS["conv0"]})], ids=["nameless", "half asked"]
)
def test_a_trial_without_all_parameters_is_told_only(
    tmp_path: Path, owner: Owner | None, params: dict[str, str]
) -> None:
    storage = open_storage(None, tmp_path)
    study = running(storage, owner, params)
    assert len(recover(study, storage, SPACE.distributions)) == 1
    assert [t.state for t in study.trials] == [TrialState.FAIL]


def test_a_queued_trial_killed_as_it_began_keeps_its_parameters(tmp_path: Path) -> None:
    storage = open_storage(None, tmp_path)
    study = running(storage, DEAD, PARAMS)
    recover(study, storage, SPACE.distributions)
    asked = study.ask()
    asked.set_user_attr("owner", DEAD.to_json())
    recover(study, storage, SPACE.distributions)
    assert study.ask(SPACE.distributions).params == PARAMS


def test_what_kills_its_process_three_times_is_let_be(tmp_path: Path) -> None:
    storage = open_storage(None, tmp_path)
    study = running(storage, DEAD, PARAMS)
    for _ in range(2):
        recover(study, storage, SPACE.distributions)
        asked = study.ask(SPACE.distributions)
        assert asked.params == PARAMS
        asked.set_user_attr("owner", DEAD.to_json())
    assert len(recover(study, storage, SPACE.distributions)) == 1
    assert [t.state for t in study.trials] == [TrialState.FAIL] * 3


def test_a_trial_is_queued_even_if_the_process_that_told_it_was_killed_before(tmp_path: Path) -> None:
    storage = open_storage(None, tmp_path)
    study = running(storage, DEAD, PARAMS)
    storage.set_trial_user_attr(study.trials[0]._trial_id, "retry", True)
    storage.set_trial_state_values(study.trials[0]._trial_id, TrialState.FAIL)
    recover(study, storage, SPACE.distributions)
    assert study.trials[1].user_attrs == {"retry_of": 0}


def test_a_run_tells_the_trials_of_dead_processes(tmp_path: Path) -> None:
    first = Run(tmp_path)
    trial = first.study.ask(SPACE.distributions)
    trial.set_user_attr("owner", DEAD.to_json())
    second = Run(tmp_path)
    assert second.reporter.notes == [f"trial 0: its process {DEAD.pid} was killed"]
    second.loop.run(max_trials=1)
    assert second.study.trials[1].params == trial.params
    assert second.study.trials[1].state is TrialState.COMPLETE
