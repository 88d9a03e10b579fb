"""Whole models: built in workers as production builds them, checked against the untouched module, timed interleaved."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from layoutsearch.measure.builder import Builder, BuildResult
from layoutsearch.measure.device import Device
from layoutsearch.measure.results import RunFailed
from layoutsearch.model.samples import relative_error
from layoutsearch.plan.border import from_plan, to_plan
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.search.budget import Budget
from layoutsearch.search.jobs import PLAN, REFERENCE, PlanJob
from layoutsearch.search.reference import cached_outputs
from layoutsearch.search.reporter import Reporter

MAX_REL_ERROR = 1e-3
"""Of an output's range, by default."""
_BUILD_S = 900.0
_RUN_S = 600.0
_POLL_S = 0.2


@dataclass(frozen=True)
class ModelSource:
    """Where workers load the model from; see `jobs.PlanJob`."""

    model: str
    is_json: bool
    stamp: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    def job(self, plan: LayoutPlan, output: str) -> PlanJob:
        """A build job for `plan`."""
        return PlanJob(self.model, self.is_json, self.stamp, self.shapes, plan.to_json(), output)


@dataclass(frozen=True)
class Built:
    """A whole model on disk.

    Attributes:
        path: of the library.
        max_rel_error: the largest error against the untouched module.
        inputs: what it is timed with, where it takes its inputs in other layouts than the model; else None.
    """

    path: str
    max_rel_error: float
    inputs: tuple[np.ndarray, ...] | None = field(default=None, compare=False, repr=False)


class Whole(Protocol):
    """Builds, validates and times plans: on a device, or from a recorded table."""

    @property
    def weights(self) -> str:
        """Key of what plans are validated against."""

    @property
    def once_s(self) -> float:
        """Seconds that a run waits once, for what plans are validated against."""

    def build(self, plans: Mapping[str, LayoutPlan]) -> dict[str, Built]:
        """Build and validate plans; those that fail are left out."""

    def time(
        self, built: Mapping[str, Built], rounds: int, seed: int, starts: int = 1, finish: bool = False
    ) -> dict[str, tuple[float, ...]]:
        """Interleaved samples by label, equally many of each; with `finish` all of them, whatever the time."""


class WholeLab:
    """Builds, validates and times plans. One per run. Implements `Whole` on a device.

    `reference` is where the outputs of the untouched module are kept, and their key; see `search.reference`.
    """

    def __init__(
        self,
        device: Device,
        builder: Builder,
        source: ModelSource,
        samples: Sequence[Sequence[np.ndarray]],
        reference: tuple[Path, str],
        folder: Path,
        budget: Budget,
        reporter: Reporter,
        max_rel_error: float = MAX_REL_ERROR,
    ) -> None:
        self._max_rel_error = max_rel_error
        self._device, self._builder, self._source = device, builder, source
        self._samples, self._folder = samples, folder
        self._cache, self._cache_key = reference
        self._budget, self._reporter = budget, reporter
        self._files = itertools.count()
        self._reference: list[tuple[np.ndarray, ...]] | None = None
        self._once_s = 0.0

    @property
    def weights(self) -> str:
        """Key of the reference outputs: structure, weights, inputs."""
        return self._cache_key

    @property
    def once_s(self) -> float:
        """What the reference outputs took beyond the first build."""
        return self._once_s

    def build(self, plans: Mapping[str, LayoutPlan]) -> dict[str, Built]:
        """Build and validate plans; one that fails to build, to run or to be right is left out with a note.

        A user who wants to stop waits for the first plan of a run only.
        """
        futures = {
            label: self._builder.submit(PLAN, self._source.job(plan, self._output()), _BUILD_S)
            for label, plan in plans.items()
        }
        reference_plan = next(iter(plans.values()), None)
        first, began = self._reference is None, time.monotonic()
        if self._reference is None and reference_plan is not None:
            plan = reference_plan
            self._reference = cached_outputs(self._cache, self._cache_key, lambda: self._references(plan))
        referenced_s = time.monotonic() - began
        built = {}
        for label, future in futures.items():
            result = self._wait(future, stoppable=not first)
            if result is None:
                return {}
            if first and not self._once_s:
                self._once_s = max(0.0, referenced_s - result.wall_s)
            if not result.ok:
                self._reporter.note(f"{label}: {result.status.value}: {result.error}")
                continue
            try:
                error = self._error(result.value, plans[label])
            except RunFailed as failure:
                self._reporter.note(f"{label}: {failure.status.value}: {failure.message}")
                continue
            if error > self._max_rel_error:
                self._reporter.note(
                    f"{label}: error {error:.1e} of the output's range, {self._max_rel_error:g} is allowed; refused"
                )
                continue
            self._reporter.step(f"built {label}")
            plan = plans[label]
            own = tuple(to_plan(plan, self._samples[0])) if plan.io_layouts else None
            built[label] = Built(result.value, error, own)
        return built

    def time(
        self, built: Mapping[str, Built], rounds: int, seed: int, starts: int = 1, finish: bool = False
    ) -> dict[str, tuple[float, ...]]:
        """Interleaved samples by label, equally many of each; what fails on the way is left out.

        The rounds are shared out between `starts` processes on the device: where a process happens to place its memory
        can speed a model up or slow it down for as long as it lives.
        """
        samples: dict[str, list[float]] = {label: [] for label in built}
        for start in range(starts):
            left = [label for label in built if len(samples[label]) == max(map(len, samples.values()))]
            # Which is loaded first may matter, so that it has to be each one's turn.
            turn = start % max(1, len(left))
            turned = {label: built[label] for label in left[turn:] + left[:turn]}
            self._time_once(turned, -(-rounds // starts), seed + start, samples, finish)
            if self._ended(finish):
                break
        longest = max((len(s) for s in samples.values()), default=0)
        return {label: tuple(s) for label, s in samples.items() if len(s) == longest and s}

    def _ended(self, finish: bool) -> bool:
        return self._budget.interrupted if finish else self._budget.over()

    def _time_once(
        self, built: Mapping[str, Built], rounds: int, seed: int, samples: Mapping[str, list[float]], finish: bool
    ) -> None:
        paths = {label: b.path for label, b in built.items()}
        own = {label: b.inputs for label, b in built.items() if b.inputs is not None}
        with self._device.models(paths, self._samples[0], seed=seed, own=own) as models:
            for _ in range(rounds):
                taken = models.round()
                for label, value in taken.items():
                    samples[label].append(value)
                self._reporter.step("whole models, interleaved")
                if not models.alive or (self._ended(finish) and all(len(samples[name]) >= 2 for name in models.alive)):
                    break
            for label, failure in models.failures.items():
                self._reporter.note(f"{label}: {failure.status.value}: {failure.message}")

    def _wait(self, future: Future[BuildResult], stoppable: bool) -> BuildResult | None:
        """The result of a build; None if the user wants to stop first."""
        while not (stoppable and self._budget.interrupted):
            if wait([future], timeout=_POLL_S).done:
                return future.result()
        return None

    def _references(self, plan: LayoutPlan) -> list[tuple[np.ndarray, ...]]:
        output = self._output()
        path = self._builder.submit(REFERENCE, self._source.job(plan, output), _BUILD_S).result().get()
        outputs = [self._device.run_model(path, inputs, _RUN_S) for inputs in self._samples]
        Path(path).unlink(missing_ok=True)
        return outputs

    def _error(self, path: str, plan: LayoutPlan) -> float:
        assert self._reference is not None
        worst = 0.0
        for inputs, reference in zip(self._samples, self._reference, strict=True):
            outputs = self._device.run_model(path, to_plan(plan, inputs), _RUN_S)
            worst = max(worst, relative_error(from_plan(plan, outputs), reference))
        return worst

    def _output(self) -> str:
        return str(self._folder / f"model_{next(self._files)}.so")
