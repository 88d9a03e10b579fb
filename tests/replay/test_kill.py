"""kill -9 in the middle of a search, and `tune --resume`: as if nothing had happened.

Searches run on a table in simulated time, each in a process of its own, and are killed from outside when their record
store has grown to a number of measurements drawn at random.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import sqlite3
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from layoutsearch.replay.table import Table
from layoutsearch.search.setup import ModelSetup
from tests.replay.made import made_table, model_files

KILLS = 20
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["layoutsearch.search.tune", "layoutsearch.replay.session", "layoutsearch.cli.main"])

Row = tuple[Any, ...]


def _tune(arguments: list[str], home: str, log: str) -> None:
    """In a process of its own: the command line."""
    from layoutsearch.cli.main import main

    os.environ["LAYOUTSEARCH_HOME"] = home
    with open(log, "w", buffering=1) as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        sys.argv = ["layoutsearch", "tune", *arguments]
        main()


@dataclass(frozen=True)
class Search:
    """One run folder, and the table it replays."""

    folder: Path
    table: Path
    model: Path
    space: Path

    def start(self, *extra: str) -> Any:
        self.folder.mkdir(exist_ok=True)
        arguments = [
            self.model, "--replay", self.table, "--space", self.space, "--out", self.folder, "--trials", 4,
            "--time-budget", "10h", "--json", *extra,
        ]  # fmt: skip
        log = self.folder / f"log{len(extra)}.txt"
        process = _PROCESSES.Process(
            target=_tune, args=([str(a) for a in arguments], str(self.folder / "home"), str(log))
        )
        process.start()
        return process

    def finish(self, *extra: str) -> None:
        process = self.start(*extra)
        process.join(300)
        assert process.exitcode == 0, (self.folder / f"log{len(extra)}.txt").read_text()

    def kill_after(self, count: int) -> bool:
        """Start, and kill when so many rows are in the store; False if it ended before."""
        process = self.start()
        deadline = time.monotonic() + 300
        while process.is_alive() and self.count() < count and time.monotonic() < deadline:
            time.sleep(0.003)
        process.kill()
        process.join()
        return process.exitcode != 0

    def count(self) -> int:
        found = self._rows("SELECT (SELECT count(*) FROM kernels) + (SELECT count(*) FROM models)")
        return int(found[0][0]) if found else 0

    def kernels(self) -> list[Row]:
        return self._rows("SELECT workload, candidate, schedule, status, samples_us FROM kernels ORDER BY id")

    def wholes(self) -> list[Row]:
        return self._rows("SELECT model, samples_us FROM models ORDER BY id")

    def _rows(self, query: str) -> list[Row]:
        path = self.folder / "records.sqlite"
        if not path.exists():
            return []
        try:
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as connection:
                return list(connection.execute(query))
        except sqlite3.OperationalError:
            return []  # the tables are just being made

    def plan(self) -> dict[str, Any]:
        """plan.json without the time at which it was made."""
        data = json.loads((self.folder / "plan.json").read_text())
        del data["tool"]["created"]
        data.pop("digests")
        return data  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def replayed(setup: ModelSetup, tmp_path_factory: pytest.TempPathFactory) -> tuple[Table, Search]:
    """A search that nobody disturbed."""
    folder = tmp_path_factory.mktemp("kill")
    model, space = model_files(folder)
    table = made_table(setup, tries=6)
    table.save(folder / "made.jsonl.gz")
    search = Search(folder / "undisturbed", folder / "made.jsonl.gz", model, space)
    search.finish()
    return table, search


def once_each(table: Table, rows: list[Row]) -> bool:
    """No schedule has two records, but for those whose second is the refinement that the table has."""
    refined = {(a.workload, a.candidate, a.schedule) for a in (*table.kernels, *table.transforms) if a.refined}
    counts = Counter(row[:3] for row in rows)
    distinct = Counter({key: len({row for row in rows if row[:3] == key}) for key in counts})
    return counts == distinct and all(n == 1 or (n == 2 and key in refined) for key, n in counts.items())


def test_undisturbed(replayed: tuple[Table, Search]) -> None:
    table, search = replayed
    assert once_each(table, search.kernels())
    assert len(search.wholes()) > 0
    assert search.plan()["device"]["key"] == "replay:local"


def test_resuming_a_finished_search_measures_nothing(replayed: tuple[Table, Search]) -> None:
    _, search = replayed
    before, plan = (search.kernels(), search.wholes()), search.plan()
    search.finish("--resume")
    assert (search.kernels(), search.wholes()) == before
    assert search.plan() == plan


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(KILLS))
def test_killed_and_resumed(replayed: tuple[Table, Search], tmp_path: Path, seed: int) -> None:
    table, undisturbed = replayed
    search = Search(tmp_path / "killed", undisturbed.table, undisturbed.model, undisturbed.space)
    # Kill points in equal parts of the run, so that none of its stages is left out.
    point = 1 + int((seed + random.Random(seed).random()) / KILLS * (undisturbed.count() - 1))
    assert search.kill_after(point), "the search ended before it was killed"
    kernels, wholes = search.kernels(), search.wholes()
    assert len(kernels) + len(wholes) >= point

    search.finish("--resume")
    assert search.kernels()[: len(kernels)] == kernels
    assert search.wholes()[: len(wholes)] == wholes
    assert once_each(table, search.kernels())
    assert search.plan() == undisturbed.plan()
    assert search.kernels() == undisturbed.kernels()
    assert search.wholes() == undisturbed.wholes()
