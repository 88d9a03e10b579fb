"""A run that is stopped, in every way it can be, leaves its best plan, its records, and no process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from layoutsearch.measure.records import RecordStore
from layoutsearch.plan.plan import LayoutPlan
from tests.cli.conftest import Tuned
from tests.cli.running import SPACE, call, command, environment, last_json, refused

Capture = pytest.CaptureFixture[str]


class Run:
    """`layoutsearch tune` that goes on, at the head of a process group as a shell starts it."""

    def __init__(self, files: Path, out: Path, *args: object) -> None:
        self.out = out
        self._files = files
        rest = ["--space", files / "space.toml", "--threads", 1, "--trials", 2, "--out", out, "--json", *args]
        self.process = subprocess.Popen(
            command("tune", files / "stem.json", *rest),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True,
        )  # fmt: skip
        self.helpers: dict[int, psutil.Process] = {}

    def wait_for(self, what: str) -> None:
        """Until a plan lies on disk, or until kernels are measured and there is none yet."""
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and self.process.poll() is None:
            self._note_helpers()
            if what == "plan" and (self.out / "plan.json").exists():
                return
            if what == "records" and _count(self.out) > 0:
                return
            time.sleep(0.02)
        raise AssertionError(f"no {what}: {self.process.poll()} {self.process.communicate()}")

    def _note_helpers(self) -> None:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self.helpers.setdefault(child.pid, child)

    def end(self, timeout_s: float = 60) -> tuple[int, str, str]:
        """Exit code, output and errors; nothing that the run started may be left, and nobody may hold its output."""
        self._note_helpers() if self.process.poll() is None else None
        out, err = self.process.communicate(timeout=timeout_s)
        _, alive = psutil.wait_procs(list(self.helpers.values()), timeout=10)
        assert self.helpers
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
        return self.process.returncode, out, err


def _count(out: Path) -> int:
    if not (out / "records.sqlite").exists():
        return 0
    with RecordStore(out / "records.sqlite") as store:
        return sum(1 for r in store.records() if r.measurement.ok)


def _most_alike(records: Path) -> int:
    """How often the same was measured with the same number of samples, at most."""
    with RecordStore(records) as store:
        found = Counter((r.context, r.workload, r.candidate, r.schedule, r.repeat) for r in store.records())
    return max(found.values())


@contextmanager
def _tuning(files: Path, out: Path, *args: object) -> Iterator[Run]:
    run = Run(files, out, *args)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()


@pytest.mark.parametrize(("number", "to_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_signal_writes_and_exits_130(files: Path, tmp_path: Path, number: signal.Signals, to_group: bool) -> None:
    """To the process alone, and to its group as Ctrl-C at a terminal does."""
    with _tuning(files, tmp_path / "out") as run:
        run.wait_for("plan")
        before = _count(run.out)
        if to_group:
            os.killpg(run.process.pid, number)
        else:
            run.process.send_signal(number)
        began = time.monotonic()
        code, out, err = run.end()
    assert code == 130, err
    assert time.monotonic() - began < 30
    assert "Traceback" not in err
    assert "stopping after the measurement in flight" in err
    result = last_json(out)
    assert result["interrupted"] is True
    plan = LayoutPlan.load(result["plan"])
    assert plan.validation["max_rel_error"] is not None
    assert json.loads((run.out / "run.json").read_text())["state"] == "interrupted"
    assert _count(run.out) >= before > 0


def test_before_there_is_a_plan(files: Path, tmp_path: Path) -> None:
    with _tuning(files, tmp_path / "out") as run:
        run.wait_for("records")
        run.process.send_signal(signal.SIGINT)
        code, out, err = run.end()
    assert code == 130, err
    result = last_json(out)
    assert result["interrupted"] is True
    assert (result["plan"] is None) == (not (run.out / "plan.json").exists())
    assert result["plan"] or "stopped before a plan was validated" in result["note"]
    assert _count(run.out) > 0


def test_a_second_signal_stops_at_once(files: Path, tmp_path: Path) -> None:
    with _tuning(files, tmp_path / "out") as run:
        run.wait_for("records")
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.05)
        run.process.send_signal(signal.SIGINT)
        code, _, err = run.end(timeout_s=20)
    assert code == 130, err
    assert "Traceback" not in err


def test_kill_9_then_resume(files: Path, tmp_path: Path, capfd: Capture) -> None:
    with _tuning(files, tmp_path / "out") as run:
        run.wait_for("plan")
        run.process.kill()
        code, _, _ = run.end()
    assert code == -signal.SIGKILL
    assert LayoutPlan.load(run.out / "plan.json")
    before = _count(run.out)
    assert before > 0
    again = ["--space", files / "space.toml", "--threads", 1, "--trials", 2, "--out", run.out, "--json"]
    code, _out, err = call(capfd, "tune", files / "stem.json", *again, "--resume", "--time-budget", "20s")
    assert code == 0, err
    assert _count(run.out) >= before
    assert _most_alike(run.out / "records.sqlite") == 1


def test_resume_refuses_another_run(files: Path, tmp_path: Path, tuned: Tuned, capfd: Capture) -> None:
    rest = ["--space", files / "space.toml", "--quiet", "--resume", "--out", tuned.out]
    assert "threads 1" in refused(capfd, "tune", files / "stem.json", *rest, "--threads", 2)
    assert "another model" in refused(capfd, "tune", files / "residual.json", *rest, "--threads", 1)
    line = refused(capfd, "tune", files / "stem.json", *rest, "--threads", 1, "--target", "llvm -mcpu=core2")
    assert "target" in line
    assert "core2" in line
    one = [*rest, "--threads", 1, "--trials", 2]
    assert "max_rel_error" in refused(capfd, "tune", files / "stem.json", *one, "--max-rel-error", 0.1)
    other = tmp_path / "space.toml"
    other.write_text(SPACE.replace("layouts = [", 'layouts = ["NHWC", '))
    assert "--space" in refused(capfd, "tune", files / "stem.json", *one, "--space", other)
    assert "no run" in refused(capfd, "tune", files / "stem.json", *rest[:-1], tmp_path / "empty", "--threads", 1)
    assert LayoutPlan.load(tuned.plan)


def test_a_second_run_starts_from_the_records(files: Path, tmp_path: Path, tuned: Tuned, capfd: Capture) -> None:
    rest = ["--space", files / "space.toml", "--threads", 1, "--trials", 2, "--time-budget", "20s", "--json"]
    records = tuned.out / "records.sqlite"
    code, _, err = call(capfd, "tune", files / "stem.json", *rest, "--records", records, "--out", tmp_path / "out")
    assert code == 0, err
    # The time that is left goes to what is not known; nothing is measured twice, but for the better once.
    assert _most_alike(records) == 1


def test_two_runs_do_not_share_a_folder(files: Path, tmp_path: Path, capfd: Capture) -> None:
    rest = ["--space", files / "space.toml", "--threads", 1, "--trials", 2]
    with _tuning(files, tmp_path / "out") as run:
        run.wait_for("records")
        line = refused(capfd, "tune", files / "stem.json", *rest, "--out", run.out, "--quiet")
        assert "--out" in line
        assert str(run.process.pid) in line
        run.process.kill()
        run.end()
    code, _, err = call(capfd, "tune", files / "stem.json", *rest, "--out", run.out, "--time-budget", "10s", "--json")
    assert code == 0, err
