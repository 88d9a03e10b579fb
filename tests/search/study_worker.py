"""Processes that the tests of journals and studies start, and kill: `python -m tests.search.study_worker MODE ...`.

append JOURNAL NAME     appends numbered entries for ever.
hold JOURNAL            takes the lock, says so and keeps it.
trials STORAGE SEED N S runs N trials of the small model, each measurement taking S seconds; says when one begins.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path

from layoutsearch.search.journal import JournalFile, OwnedLock

PADDING = "x" * 3000


def start(*args: object) -> subprocess.Popen[str]:
    """Start a worker; what it says comes through its standard output."""
    command = [sys.executable, "-m", "tests.search.study_worker", *map(str, args)]
    root = Path(__file__).resolve().parents[2]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)


def append(path: str, name: str) -> None:
    journal = JournalFile(Path(path))
    for number in itertools.count():
        journal.append_logs([{"op_code": 99, "worker": name, "n": number, "pad": PADDING}])
        if number == 0:
            print("appending", flush=True)


def hold(path: str) -> None:
    with OwnedLock(Path(path)).held():
        print("held", flush=True)
        time.sleep(600)


def trials(storage_text: str, seed: str, count: str, seconds: str) -> None:
    from layoutsearch.search.budget import Budget
    from layoutsearch.search.parameters import AssignmentSpace
    from layoutsearch.search.storage import open_storage
    from layoutsearch.search.study import StudySearch, make_sampler, open_study
    from tests.search.small_model import SmallLab, SmallSearch, chain_skeleton

    skeleton, budget = chain_skeleton(), Budget()
    lab = SmallLab(skeleton, budget)

    def before(workload: str) -> None:
        print(f"measuring {workload}", flush=True)
        time.sleep(float(seconds))

    lab.before = before  # type: ignore[method-assign]
    space, search = AssignmentSpace.of(skeleton), SmallSearch(skeleton, lab)
    storage = open_storage(storage_text, Path())
    study = open_study(storage, "small", make_sampler("solver", space, search, int(seed)))
    outcome = StudySearch(study, storage, space, skeleton, lab, search, budget).run(max_trials=int(count))
    print(f"done {outcome.trials}", flush=True)


if __name__ == "__main__":
    {"append": append, "hold": hold, "trials": trials}[sys.argv[1]](*sys.argv[2:])
