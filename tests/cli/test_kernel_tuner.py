"""`tune --kernel-tuner`: MetaSchedule's schedules beside the templates', from the first measurement to the plan."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from layoutsearch.measure.records import KernelRecord, RecordStore
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.schedule.value import Schedule
from layoutsearch.search.known import WHOLE
from layoutsearch.search.tuners import NO_MORE, is_proposed
from tests.cli.running import call, command, environment, last_json, refused, run

Capture = pytest.CaptureFixture[str]


def arguments(files: Path, out: Path, tuner: str) -> list[object]:
    rest = ["--space", files / "space.toml", "--threads", 1, "--trials", 2, "--time-budget", "60s"]
    return ["tune", files / "outputs.json", *rest, "--kernel-tuner", tuner, "--out", out, "--json"]


def records(out: Path) -> list[KernelRecord]:
    if not (out / "records.sqlite").exists():
        return []
    with RecordStore(out / "records.sqlite") as store:
        return list(store.records())


def proposed(out: Path) -> list[KernelRecord]:
    return [r for r in records(out) if is_proposed(r.schedule) and r.schedule != NO_MORE]


def templates(found: list[KernelRecord]) -> set[str]:
    return {json.loads(r.schedule)["template"] for r in found if r.schedule != WHOLE}


def check(capfd: Capture, files: Path, out: Path) -> None:
    """The plan does what it says, from the file on disk."""
    code, text, err = call(capfd, "check", files / "outputs.json", "--plan", out / "plan.json", "--json")
    assert (code, err) == (0, "")
    assert last_json(text)["ok"]


@pytest.mark.slow
def test_both_killed_and_resumed(files: Path, tmp_path: Path, capfd: Capture) -> None:
    out = tmp_path / "out"
    first = subprocess.Popen(
        command(*arguments(files, out, "both")),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(), start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 240
    while not proposed(out) and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert first.poll() is None
    first.kill()
    first.wait()
    before = records(out)
    assert proposed(out)
    message = refused(capfd, *arguments(files, out, "metaschedule"), "--resume")
    assert "kernel_tuner 'both', this one 'metaschedule'" in message
    done = run(*arguments(files, out, "both"), "--resume")
    assert done.returncode == 0, done.stderr
    after = records(out)
    assert after[: len(before)] == before
    assert max(Counter((r.workload, r.candidate, r.schedule, r.repeat) for r in after).values()) == 1
    # They race where there is a template, and go on where there is none.
    conv = {r.workload for r in after if templates([r]) & {"flat", "channels"}}
    assert {r.workload for r in proposed(out)} & conv
    check(capfd, files, out)


@pytest.mark.slow
def test_metaschedule_where_there_is_no_template(files: Path, tmp_path: Path, capfd: Capture) -> None:
    done = run(*arguments(files, tmp_path, "metaschedule"))
    assert done.returncode == 0, done.stderr
    result = last_json(done.stdout)
    assert (result["failures"], result["notes"]) == ({}, [])
    tuned = proposed(tmp_path)
    assert tuned
    for record in tuned:
        others = [r for r in records(tmp_path) if (r.workload, r.candidate) == (record.workload, record.candidate)]
        assert templates(others) == {"loops", "metaschedule"}
        assert Schedule.from_json(json.loads(record.schedule))
    LayoutPlan.load(tmp_path / "plan.json")
    check(capfd, files, tmp_path)


def test_a_replay_has_no_other_schedules(files: Path, tmp_path: Path, capfd: Capture) -> None:
    table = Path(__file__).parents[1] / "replay" / "golden" / "v1_residual.jsonl.gz"
    line = refused(capfd, *arguments(files, tmp_path, "both"), "--replay", table)
    assert "--replay has the schedules it was recorded with; leave --kernel-tuner away" in line


def test_an_unknown_tuner(files: Path, tmp_path: Path, capfd: Capture) -> None:
    assert "'ansor' is not one of 'template', 'metaschedule', 'both'" in refused(
        capfd, *arguments(files, tmp_path, "ansor")
    )


@pytest.mark.parametrize("bench", [["model", "m.onnx", "--plan", "plan.json"], ["suite"]])
def test_a_budget_of_the_peer_that_is_none(capfd: Capture, bench: list[str]) -> None:
    line = refused(capfd, "bench", *bench, "--against", "metaschedule", "--metaschedule-budget", "soon")
    assert "--metaschedule-budget 'soon' is not a duration" in line
