"""Tuning on the boards of a tracker: here a tracker and two servers on loopback, started as on real boards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from layoutsearch.measure.records import RecordStore
from layoutsearch.measure.tracker import TrackerClient
from layoutsearch.plan.plan import LayoutPlan
from tests.cli.running import call, environment, last_json, refused

Capture = pytest.CaptureFixture[str]
KEY = "board"


@contextmanager
def _process(module: str, *args: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    with subprocess.Popen(
        [sys.executable, "-m", module, "--port", "0", *args], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env=environment(), start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline().split()[1])
        finally:
            process.kill()


@contextmanager
def _rack(servers: int) -> Iterator[tuple[str, list[subprocess.Popen[str]]]]:
    """Address of the tracker, and the servers."""
    with ExitStack() as stack:
        _, port = stack.enter_context(_process("layoutsearch.measure.tracker"))
        tracker = f"127.0.0.1:{port}"
        options = ("--tracker", tracker, "--key", KEY, "--threads", "1")
        boards = [stack.enter_context(_process("layoutsearch.measure.server", *options))[0] for _ in range(servers)]
        TrackerClient(tracker).check_key(KEY)
        yield tracker, boards


def _tune(files: Path, out: Path, tracker: str) -> list[object]:
    return [
        "tune", files / "stem.json", "--space", files / "space.toml", "--threads", 1, "--trials", 1, "--out", out,
        "--rpc", tracker, "--device-key", KEY, "--time-budget", "25s", "--json",
    ]  # fmt: skip


def _kill_the_one_in_use(boards: list[subprocess.Popen[str]], out: Path, killed: list[int]) -> None:
    """Once kernels are being measured: kill the server whose session process is the client's, with all of its own."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        busy = [b for b in boards if psutil.Process(b.pid).children()]
        if busy and (out / "records.sqlite").exists():
            with RecordStore(out / "records.sqlite") as store:
                measured = sum(1 for _ in store.records())
            if measured >= 2:
                for process in [*psutil.Process(busy[0].pid).children(), psutil.Process(busy[0].pid)]:
                    os.kill(process.pid, signal.SIGKILL)
                killed.append(busy[0].pid)
                return
        time.sleep(0.02)


def test_one_server_dies_and_the_run_goes_on(files: Path, tmp_path: Path, capfd: Capture) -> None:
    out = tmp_path / "out"
    with _rack(2) as (tracker, boards):
        killed: list[int] = []
        killer = threading.Thread(target=_kill_the_one_in_use, args=(boards, out, killed))
        killer.start()
        code, said, err = call(capfd, *_tune(files, out, tracker))
        killer.join()
        assert len(killed) == 1
        assert [b.pid for b in boards if b.poll() is not None] == killed
        assert code == 0, err
        result = last_json(said)
        plan = LayoutPlan.load(result["plan"])
        assert plan.device["key"] == KEY
        assert plan.threads == 1
        with RecordStore(out / "records.sqlite") as store:
            records = list(store.records())
        assert {r.context.device for r in records} == {KEY}
        assert result["kernels_measured"] > 2

        code, said, err = call(
            capfd, "check", files / "stem.json", "--plan", out / "plan.json", "--rpc", tracker, "--device-key", KEY,
            "--json",
        )  # fmt: skip
        assert code == 0, err
        assert last_json(said)["ok"] is True


def test_keys_and_threads_that_the_rack_does_not_have(files: Path, tmp_path: Path, capfd: Capture) -> None:
    with _rack(1) as (tracker, _):
        args = _tune(files, tmp_path / "out", tracker)
        other = ["phone" if a == KEY else a for a in args]
        line = refused(capfd, *other)
        assert "phone" in line
        assert KEY in line
        threads = [64 if a == 1 and args[i - 1] == "--threads" else a for i, a in enumerate(args)]
        line = refused(capfd, *threads)
        assert "threads" in line
        assert "64" in line
