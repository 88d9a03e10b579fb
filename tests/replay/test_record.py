"""Recording on the live device: everything is there, nothing is measured twice, and a killed recording goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tvm

from layoutsearch.errors import LayoutSearchError
from layoutsearch.measure.records import RecordStore
from layoutsearch.replay.record import RecordOptions, record_table
from layoutsearch.replay.table import Table
from layoutsearch.search.known import WHOLE
from layoutsearch.search.reporter import NoteKeeper, Silent
from layoutsearch.search.solve import solve
from tests.cli.running import last_json, run
from tests.models import nets
from tests.replay.made import model_files

ASSIGNMENTS = 4


class Stop(Exception):
    """Stands for a kill: raised in the middle of a recording."""


class StopAfter(Silent):
    """Stops after so many steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def step(self, what: str, count: int = 1) -> None:
        self.left -= 1
        if self.left < 0:
            raise Stop


def rows(path: Path) -> list[tuple[str, str, str]]:
    with RecordStore(path) as store:
        return [(r.workload, r.candidate, r.schedule) for r in store.records()]


@pytest.mark.usefixtures("profiled")
def test_a_recording_that_is_stopped_goes_on(tmp_path: Path) -> None:
    model, space = model_files(tmp_path)
    options = RecordOptions(
        tmp_path / "t.jsonl.gz", space=str(space), threads=1, records=tmp_path / "r.sqlite", tries=2,
        assignments=ASSIGNMENTS, rounds=4, starts=2,
    )  # fmt: skip
    with pytest.raises(Stop):
        record_table(str(model), options, StopAfter(12))
    assert not options.out.exists()
    before = rows(tmp_path / "r.sqlite")
    assert before

    table = record_table(str(model), options, NoteKeeper(Silent()))
    after = rows(tmp_path / "r.sqlite")
    assert after[: len(before)] == before
    check(table, options.tries)
    # What was measured more than once was measured better: a refinement of a schedule that ran.
    refined = {(a.workload, a.candidate, a.schedule) for a in table.kernels if a.refined is not None}
    assert refined
    moved = {(a.workload, a.candidate, a.schedule) for a in table.transforms if a.schedule != WHOLE}
    assert moved
    assert {row for row in after if after.count(row) > 1} == refined | moved
    assert all(after.count(row) == 2 for row in refined | moved)
    assert all(a.refined is None for a in table.transforms)

    # The same again, from the records alone: nothing is measured.
    again = record_table(str(model), options)
    assert rows(tmp_path / "r.sqlite") == after
    assert replace(again, header=table.header) == table
    loaded = Table.load(options.out)
    assert loaded == again
    assert loaded.kernels == table.kernels


def check(table: Table, tries: int) -> None:
    """Every candidate, every transform, and whole assignments that differ."""
    for workload, choice in table.candidates:
        attempts = table.attempts(workload.key, str(choice) if choice is not None else "")
        timed = [a for a in attempts if a.schedule != WHOLE]
        assert len(timed) == tries or any(a.schedule == WHOLE for a in attempts)
        assert len(timed) <= tries
        assert all(a.build_s > 0 and a.measurement.wall_s > 0 for a in timed)
    assert {(a.workload, a.candidate) for a in table.transforms} == {
        (key.workload, key.candidate) for key in table.skeleton.keys.values()
    }
    assert solve(table.problem).proven
    assert len(table.whole_us) == ASSIGNMENTS
    labels = [whole.label for whole in table.wholes]
    assert labels[0] == "optimum"
    assert any(label.startswith("uniform") for label in labels)
    assert all(len(whole.samples_us) == 4 and whole.starts == 2 and whole.build_s > 0 for whole in table.wholes)
    assert table.wholes[0].solution == solve(table.problem).assignment


def test_a_model_without_layouts_has_nothing_to_record(tmp_path: Path) -> None:
    path = tmp_path / "dense.json"
    path.write_text(tvm.ir.save_json(nets.without_convolution()))
    with pytest.raises(LayoutSearchError, match="nothing to record"):
        record_table(str(path), RecordOptions(tmp_path / "t.jsonl.gz", threads=1))


@pytest.mark.usefixtures("profiled")
def test_command(tmp_path: Path) -> None:
    model, space = model_files(tmp_path)
    out = tmp_path / "sub" / "t.jsonl.gz"
    done = run(
        "bench", "record", model, "--out", out, "--space", space, "--threads", 1, "--tries", 1, "--assignments", 2,
        "--rounds", 2, "--starts", 1, "--no-transforms", "--records", tmp_path / "r.sqlite", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = last_json(done.stdout)
    table = Table.load(out)
    assert summary["candidates"] == len(table.candidates)
    assert summary["bytes"] == out.stat().st_size
    assert len(table.whole_us) == 2
    # Only what the assignments use.
    used = {key for whole in table.wholes for key in table.skeleton.transforms(whole.solution)}
    assert {(a.workload, a.candidate) for a in table.transforms} >= {(key.workload, key.candidate) for key in used}
