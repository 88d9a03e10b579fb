"""The peer `metaschedule`: the untouched model in its original layouts, tuned by TVM's MetaSchedule for a stated time.

Its database can be kept and used again; `peer.json` beside it says of which model it is and how long it was tuned.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tvm

from layoutsearch.bench.metaschedule_jobs import BUILD, LOAD, TUNE, PeerJob, Tuned, repair
from layoutsearch.errors import LayoutSearchError
from layoutsearch.measure.builder import Builder, BuildResult
from layoutsearch.measure.results import Status
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.search.jobs import PlanJob

NAME = "metaschedule"
_ABOUT = "peer.json"
_LOAD_S, _BUILD_S = 300.0, 900.0


@dataclass(frozen=True)
class MetaScheduleOptions:
    """How the peer comes by its schedules.

    Attributes:
        budget_s: wall clock for tuning; None where a database is used as it is.
        database: folder that keeps the database; None for one that goes away.
    """

    budget_s: float | None = None
    database: Path | None = None

    def for_model(self, name: str) -> MetaScheduleOptions:
        """The same with a database of the model's own."""
        return self if self.database is None else replace(self, database=self.database / name)


@dataclass(frozen=True)
class Peer:
    """A built peer.

    Attributes:
        library: path of the compiled model.
        facts: for the result's JSON object: budget and time of all tuning, kernels, tuned ones, trials.
    """

    library: str
    facts: dict[str, Any]


def build_peer(
    job: PlanJob, threads: int, options: MetaScheduleOptions, scratch: Path, strategy: str = "evolutionary"
) -> Peer:
    """Tune the model of `job` for its plan's target and build it into `job.output`.

    Nothing else should run meanwhile: MetaSchedule times its kernels. What is built on the way lies in `scratch`.

    Raises:
        LayoutSearchError: neither a budget nor a database to use, a database of another model, or a failure of TVM's.
    """
    folder = options.database or scratch / NAME
    about = _about(job, threads)
    spent = _spent(folder, about)
    if options.budget_s is None and spent is None:
        raise LayoutSearchError(
            "--against metaschedule: nothing is tuned yet; give --metaschedule-budget, such as 600s, "
            "or the --metaschedule-db of an earlier run"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LayoutSearchError(f"--metaschedule-db {folder}: {error.strerror}; name another folder") from None
    spent = spent or {"budget_s": 0.0, "seconds": 0.0}
    peer = PeerJob(job, threads, str(folder), str(scratch), options.budget_s or 0.0, strategy)
    with Builder(workers=1) as builder:
        _value(builder.submit(LOAD, peer, _LOAD_S).result())
        if options.budget_s is not None:
            # Before it is tuned: a run that is killed leaves a database that says what it is.
            _write(folder, {**about, **spent})
            repair(folder)
            began = time.monotonic()
            result = builder.submit(TUNE, peer, options.budget_s).result()
            spent = {
                "budget_s": spent["budget_s"] + options.budget_s,
                "seconds": round(spent["seconds"] + time.monotonic() - began, 1),
            }
            _write(folder, {**about, **spent})
            if result.status is not Status.BUILD_TIMEOUT:  # which is how tuning ends, unless nothing is left to try
                _value(result)
        repair(folder)
        tuned: Tuned = _value(builder.submit(BUILD, peer, _BUILD_S).result())
    counts = {"kernels": tuned.tasks, "kernels_tuned": tuned.tuned, "trials": tuned.trials}
    return Peer(job.output, {f"{NAME}_{key}": value for key, value in {**spent, **counts}.items()})


def _about(job: PlanJob, threads: int) -> dict[str, Any]:
    """What must be the same for a database to be used again."""
    plan = LayoutPlan.from_json(job.plan)
    target = {k: v for k, v in plan.target.items() if v not in ("", [], None)}
    return {"model": plan.fingerprint, "target": target, "threads": threads, "tvm": tvm.__version__}


def _spent(folder: Path, about: dict[str, Any]) -> dict[str, float] | None:
    """Budget and seconds that went into the database in the folder; None without one.

    Raises:
        LayoutSearchError: it is of another model, or cannot be read.
    """
    path = folder / _ABOUT
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        spent = {name: float(found[name]) for name in ("budget_s", "seconds")}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise LayoutSearchError(f"{path} cannot be read; name another --metaschedule-db") from None
    for name, want in about.items():
        if found.get(name) != want:
            raise LayoutSearchError(
                f"--metaschedule-db {folder} was tuned for {name} {found.get(name)!r}, this is {want!r}; "
                "name another folder"
            )
    return spent


def _write(folder: Path, about: dict[str, Any]) -> None:
    path = folder / _ABOUT
    part = path.with_suffix(".part")
    part.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def _value(result: BuildResult) -> Any:
    if not result.ok:
        raise LayoutSearchError(f"--against metaschedule: {result.status.value}: {result.error}")
    return result.value
