"""Does a plan do what it says, on this model? Layouts, transforms and numbers."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from layoutsearch.errors import MaterializeError
from layoutsearch.layout.build import build_graph
from layoutsearch.measure.builder import Builder
from layoutsearch.measure.device import Device
from layoutsearch.model.canonicalize import canonicalize
from layoutsearch.model.load import ModelInput
from layoutsearch.model.samples import relative_error, sample_inputs
from layoutsearch.plan.apply import apply_plan, assignment_of, target_of, vm_pipeline
from layoutsearch.plan.border import from_plan, to_plan
from layoutsearch.plan.compile import load_for
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.search.jobs import PLAN, REFERENCE, PlanJob, file_stamp
from layoutsearch.search.numerics import check_limit
from layoutsearch.search.whole import MAX_REL_ERROR

_BUILD_S = 900.0
_RUN_S = 600.0


@dataclass(frozen=True)
class CheckResult:
    """What `layoutsearch check` found; `mismatches` are lines for people, empty if all is well."""

    requested: int
    achieved: int
    transforms: int
    max_rel_error: float
    mismatches: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the plan does what it says."""
        return not self.mismatches

    def to_json(self) -> dict[str, Any]:
        """The object that `check --json` prints."""
        return {
            "ok": self.ok,
            "requested": self.requested,
            "achieved": self.achieved,
            "transforms": self.transforms,
            # JSON has no infinity.
            "max_rel_error": self.max_rel_error if math.isfinite(self.max_rel_error) else None,
            "mismatches": list(self.mismatches),
        }


def check_plan(
    model: str | os.PathLike[str],
    plan: LayoutPlan,
    device: AbstractContextManager[Device],
    inputs: Sequence[Sequence[np.ndarray]] | None = None,
    max_rel_error: float = MAX_REL_ERROR,
) -> CheckResult:
    """Apply `plan` to `model`, verify every layout, run it and the untouched module on the same inputs.

    Where a layout or transform is not as the plan says, nothing is run.

    Args:
        model: path of the model.
        plan: the plan.
        device: `Device.local(...)` or `Device.remote(...)`; entered only when there is something to run.
        inputs: sets of input arrays in the model's order; made up where None.
        max_rel_error: allowed, over the range of an output.

    Raises:
        PlanError: the plan does not belong to the model.
        RunFailed: a module does not build or run.
        LayoutSearchError: `max_rel_error` is not above 0.
    """
    check_limit(max_rel_error)
    loaded = load_for(model, plan)
    canonical = canonicalize(loaded.module)
    graph = build_graph(canonical)
    requested = assignment_of(plan, canonical, graph)
    try:
        applied = apply_plan(loaded.module, plan, target_of(plan))
        with target_of(plan):
            vm_pipeline(target=target_of(plan), proven=applied.proven)(applied.module)
    except MaterializeError as wrong:
        return CheckResult(len(requested), 0, 0, math.inf, (str(wrong),))
    mismatches = [f"{kernel}: {reports[0]}" for kernel, reports in applied.slow_loops.items()]
    with device as opened:
        opened.check_target(target_of(plan))
        error = _error(
            model, loaded.inputs, plan, opened, inputs or [sample_inputs(loaded.inputs, s) for s in range(2)]
        )
    if error > max_rel_error:
        mismatches.append(f"outputs differ by {error:.2e} of their range, at most {max_rel_error:g} is allowed")
    transforms = sum(call.is_transform for call in applied.proven.calls)
    return CheckResult(len(requested), len(requested), transforms, error, tuple(mismatches))


def _error(
    model: str | os.PathLike[str],
    model_inputs: Sequence[ModelInput],
    plan: LayoutPlan,
    device: Device,
    samples: Sequence[Sequence[np.ndarray]],
) -> float:
    path = str(Path(model).resolve())
    shapes = tuple((i.name, tuple(i.shape)) for i in model_inputs)
    with tempfile.TemporaryDirectory(prefix="layoutsearch-") as folder, Builder(workers=2) as builder:
        jobs = [
            (what, PlanJob(path, False, file_stamp(path), shapes, plan.to_json(), f"{folder}/{what}.so"))
            for what in ("plan", "reference")
        ]
        futures = [builder.submit(PLAN if what == "plan" else REFERENCE, job, _BUILD_S) for what, job in jobs]
        built, reference = [f.result().get() for f in futures]
        return max(
            relative_error(
                from_plan(plan, device.run_model(built, to_plan(plan, s), _RUN_S)),
                device.run_model(reference, s, _RUN_S),
            )
            for s in samples
        )
