"""How a run is asked for, and what it comes to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from layoutsearch.layout.desired import DesiredLayouts
from layoutsearch.layout.space import SearchSpace
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.search.tuners import KernelTuner
from layoutsearch.search.whole import MAX_REL_ERROR

DEFAULT_TRIALS = 8


@dataclass(frozen=True)
class TuneResult:
    """What a run came to.

    Attributes:
        plan: the best validated plan, None if the run was stopped before there was one.
        path: where it lies.
        seconds: how long the run took.
        interrupted: whether the user stopped it.
        kernels_measured: kernels that were timed in this run (those from records not counted).
        note: one line for people.
        failures: how many kernels failed in this run, by status.
        notes: what went wrong on the way, a line each.
    """

    plan: LayoutPlan | None
    path: Path
    seconds: float
    interrupted: bool
    kernels_measured: int
    note: str
    failures: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The object that `tune --json` prints."""
        plan = self.plan
        validation = plan.validation if plan else {}

        def median(name: str) -> float | None:
            summary = validation.get(name)
            return summary["median"] if summary else None

        return {
            "plan": str(self.path) if plan else None,
            "baseline_us": median("baseline_us"),
            "plan_us": median("plan_us"),
            "speedup": validation.get("speedup"),
            "speedup_ci": validation.get("speedup_ci"),
            "predicted_us": plan.objective["predicted_us"] if plan else None,
            "transforms": len(plan.transforms) if plan else None,
            "ops": len(plan.ops) if plan else None,
            "pairs": len(plan.fusions) if plan else None,
            "accepted": bool(validation.get("accepted", False)),
            "seconds": round(self.seconds, 1),
            "kernels_measured": self.kernels_measured,
            "interrupted": self.interrupted,
            "note": self.note,
            "failures": dict(self.failures),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class TuneOptions:
    """How to tune; every field has the command line's default."""

    shapes: Mapping[str, Sequence[int]] | None = None
    target: tvm.target.Target | str | dict[str, Any] | None = None
    threads: int | None = None
    space: str | os.PathLike[str] | SearchSpace | None = None
    desired_layouts: DesiredLayouts | None = None
    trials: int = DEFAULT_TRIALS
    time_budget_s: float | None = None
    rpc: str | None = None
    device_key: str | None = None
    out: str | os.PathLike[str] | None = None
    records: str | os.PathLike[str] | None = None
    resume: bool = False
    seed: int = 0
    sampler: str = "solver"
    storage: str | None = None
    inputs: Sequence[Sequence[np.ndarray]] | None = None
    max_rel_error: float = MAX_REL_ERROR
    kernel_tuner: str = KernelTuner.TEMPLATE.value
    io_layout: str | Sequence[str] | Mapping[str, str] | None = None
    externs: Sequence[str] = ()
