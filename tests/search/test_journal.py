"""The journal file: Optuna's conformance suite, torn lines, and locks of processes that were killed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalFileSymlinkLock
from optuna.testing.pytest_storages import StorageTestCase

from layoutsearch.search.journal import JournalFile, OwnedLock, StorageError
from layoutsearch.search.owner import Owner
from tests.search.study_worker import PADDING, start

optuna.logging.set_verbosity(optuna.logging.WARNING)


class TestConformance(StorageTestCase):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> BaseStorage:
        return JournalStorage(JournalFile(tmp_path / "study.journal"))


@contextlib.contextmanager
def worker(*args: object) -> Iterator[subprocess.Popen[str]]:
    process = start(*args)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def journal_of_a_study(path: Path, trials: int = 3) -> bytes:
    study = optuna.create_study(storage=JournalStorage(JournalFile(path)), study_name="s")
    for _ in range(trials):
        trial = study.ask()
        trial.suggest_categorical("op", ["NCHW", "NHWC"])
        study.tell(trial, 1.0)
    return path.read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return journal_of_a_study(tmp_path_factory.mktemp("whole") / "study.journal")


def lines_of(data: bytes) -> list[dict[str, object]]:
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


ENTRY = {"op_code": 99, "n": 1}


@settings(max_examples=200)
@given(st.data())
def test_cut_anywhere_it_reopens_and_goes_on(whole: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(whole)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "study.journal"
        path.write_bytes(whole[:cut])
        journal = JournalFile(path)
        assert list(journal.read_logs(0)) == lines_of(whole[:cut])
        journal.append_logs([ENTRY])
        for reader in (journal, JournalFile(path), JournalFileBackend(str(path))):
            assert list(reader.read_logs(0)) == [*lines_of(whole[:cut]), ENTRY]


@settings(max_examples=60)
@given(st.data())
def test_cut_anywhere_while_it_is_open(whole: bytes, data: st.DataObject) -> None:
    """Another process dies in the middle of a line: the next append of this one mends it."""
    torn = data.draw(st.integers(1, 40))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "study.journal"
        path.write_bytes(whole)
        journal = JournalFile(path)
        before = list(journal.read_logs(0))
        with open(path, "ab") as file:
            file.write(json.dumps(ENTRY).encode()[:torn])
        assert list(journal.read_logs(len(before))) == []
        journal.append_logs([ENTRY, {"op_code": 98}])
        assert list(journal.read_logs(len(before))) == [ENTRY, {"op_code": 98}]
        assert list(JournalFile(path).read_logs(0)) == [*before, ENTRY, {"op_code": 98}]


def test_a_study_goes_on_after_a_torn_line(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "study.journal"
    path.write_bytes(whole[:-7])
    for expected in (3, 4):
        study = optuna.load_study(storage=JournalStorage(JournalFile(path)), study_name="s")
        assert len(study.trials) == expected
        study.tell(study.ask(), 2.0)
    states = [t.state.name for t in study.trials]
    # What was torn off is that the third trial had finished.
    assert states == ["COMPLETE", "COMPLETE", "RUNNING", "COMPLETE", "COMPLETE"]


def test_a_very_long_torn_line(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "study.journal"
    path.write_bytes(whole + b'{"pad":"' + b"x" * 300_000)
    assert len(list(JournalFile(path).read_logs(0))) == len(lines_of(whole))
    assert path.read_bytes() == whole


def test_it_is_read_on_from_any_line(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "study.journal"
    path.write_bytes(whole)
    journal, lines = JournalFile(path), lines_of(whole)
    for start_at in (0, len(lines), 3, 1, 5):
        assert list(journal.read_logs(start_at)) == lines[start_at:]


def test_a_damaged_line_is_an_error_that_names_it(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "study.journal"
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b'{"op_co{"op_code":4}\n', *lines[3:]]))
    with pytest.raises(StorageError, match=r"study\.journal: line 4 is damaged; .* records"):
        JournalStorage(JournalFile(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"SQLite format 3\x00", "is not a journal .* sqlite:///FILE"), (b"[1]\n", "is not a journal")],
)
def test_another_file_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(StorageError, match=message):
        JournalFile(path)
    assert path.read_bytes() == content


def test_a_folder_in_the_way_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot use .*: Is a directory; name another --storage") as caught:
        JournalFile(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bytes) -> None:
    path = tmp_path / "study.journal"
    path.write_bytes(whole)
    journal, write = JournalFile(path), os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if offset >= len(whole) + 20:
            raise OSError(28, "No space left on device")
        return write(fd, bytes(data)[:20], offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match="No space left on device; free some space"):
        journal.append_logs([{"op_code": 99, "pad": PADDING}])
    assert path.read_bytes() == whole


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    journal_of_a_study(path)
    with worker("hold", path) as holder:
        assert said(holder) == "held"
        holder.kill()
        # Not waited for: to its parent a killed process is a zombie at first.
        with OwnedLock(path, grace_s=float("inf")).held():
            pass
    assert not path.with_name(path.name + ".lock").is_symlink()


def test_a_living_owner_keeps_the_lock_however_long(tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    path.touch()
    entered = threading.Event()

    def wait() -> None:
        with OwnedLock(path, grace_s=0.0).held():
            entered.set()

    with worker("hold", path) as holder:
        assert said(holder) == "held"
        thread = threading.Thread(target=wait)
        thread.start()
        assert not entered.wait(1.0)
        holder.kill()
        thread.join(60)
    assert entered.is_set()


def test_threads_exclude_each_other(tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    path.touch()
    inside, most = [], []

    def work() -> None:
        for _ in range(20):
            with OwnedLock(path).held():
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.001)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 80
    assert max(most) == 1


FOREIGN = Owner("another machine", "", 1, 0.0)


@pytest.mark.parametrize(
    "take",
    [
        lambda path: os.symlink(str(FOREIGN), f"{path}.lock"),
        lambda path: JournalFileSymlinkLock(str(path)).acquire(),
        lambda path: JournalFileOpenLock(str(path)).acquire(),
    ],
    ids=["another machine", "optuna's link", "optuna's file"],
)
def test_a_lock_of_an_unknown_owner_is_waited_for_then_taken(tmp_path: Path, take: Callable[[Path], object]) -> None:
    path = tmp_path / "study.journal"
    path.touch()
    take(path)
    entered = threading.Event()

    def wait() -> None:
        with OwnedLock(path, grace_s=2.0).held():
            entered.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not entered.wait(0.3)
    thread.join(60)
    assert entered.is_set()


def test_a_lock_that_was_taken_from_us_is_not_released(tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    path.touch()
    link = path.with_name("study.journal.lock")
    with OwnedLock(path).held():
        link.unlink()
        os.symlink(str(FOREIGN), link)
    assert os.readlink(link) == str(FOREIGN)


def test_optunas_backend_waits_for_our_lock(tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    path.touch()
    appended = threading.Event()

    def append() -> None:
        JournalFileBackend(str(path)).append_logs([ENTRY])
        appended.set()

    thread = threading.Thread(target=append)
    with OwnedLock(path).held():
        thread.start()
        assert not appended.wait(0.3)
    thread.join(60)
    assert list(JournalFile(path).read_logs(0)) == [ENTRY]


@pytest.mark.slow
def test_killed_writers_tear_nothing(tmp_path: Path) -> None:
    """Writers are killed again and again: what each wrote is there up to some entry, without a hole."""
    path = tmp_path / "study.journal"
    names = itertools.count()
    living = [start("append", path, f"worker {next(names)}") for _ in range(2)]
    try:
        for process in living:
            assert said(process) == "appending"
        for round_ in range(6):
            time.sleep(0.05 * round_)
            victim = living.pop(0)
            os.kill(victim.pid, signal.SIGKILL)
            living.append(start("append", path, f"worker {next(names)}"))
            assert said(living[-1]) == "appending"
            victim.wait()
    finally:
        for process in living:
            process.kill()
            process.wait()
    JournalFile(path).append_logs([ENTRY])
    entries = list(JournalFile(path).read_logs(0))
    assert entries[-1] == ENTRY
    written: dict[str, list[int]] = {}
    for entry in entries[:-1]:
        written.setdefault(entry["worker"], []).append(entry["n"])
    assert len(written) == 8
    assert all(numbers == list(range(len(numbers))) for numbers in written.values())


def test_owners() -> None:
    here = Owner.current()
    assert here.host.split()[0] == socket.gethostname()
    assert not here.dead
    assert Owner.parse(str(here)) == here
    assert Owner(here.host, here.boot, here.pid, here.started - 60).dead, "the id was given to another process"
    assert Owner(here.host, "before the reboot", here.pid, here.started).dead
    assert not Owner("another machine", here.boot, here.pid, here.started - 60).dead
    assert Owner.parse("/some/study.journal") is None
    assert Owner.from_json({"host": "h"}) is None
