"""Times of kernels within the model, on a device."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path

import numpy as np

from layoutsearch.errors import DeviceError
from layoutsearch.measure.builder import Builder
from layoutsearch.measure.device import Device
from layoutsearch.measure.in_situ import time_steps
from layoutsearch.measure.results import RunFailed
from layoutsearch.plan.border import to_plan
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.search.budget import Budget
from layoutsearch.search.jobs import STEPS, BuiltMarked
from layoutsearch.search.reporter import Reporter
from layoutsearch.search.sharing import Parts
from layoutsearch.search.whole import ModelSource

_BUILD_S, _POLL_S = 900.0, 0.2
# Process starts of each plan, each one's turn after the other's, and blocks of runs in each.
_PASSES, _ROUNDS = 3, 2


class PartsLab:
    """Builds plans with marks between their kernels and times these. Implements `PartsTimer`.

    Args:
        device: where to run; its server must be ours.
        builder: builds the models.
        source: where workers load the model from.
        inputs: of the model.
        folder: for what is built.
        budget: when to stop.
        reporter: told of progress.
    """

    def __init__(
        self,
        device: Device,
        builder: Builder,
        source: ModelSource,
        inputs: Sequence[np.ndarray],
        folder: Path,
        budget: Budget,
        reporter: Reporter,
    ) -> None:
        self._device, self._builder, self._source, self._inputs = device, builder, source, inputs
        self._folder, self._budget, self._reporter = folder, budget, reporter
        self._files = itertools.count()

    def parts(self, plans: Mapping[str, LayoutPlan], reserve_s: float) -> dict[str, Parts]:
        """See PartsTimer."""
        built = self._build(plans, reserve_s)
        samples: dict[str, list[list[float]]] = {label: [] for label in built}
        try:
            for number in range(_PASSES):
                # Backwards every other time: what drifts hits none more than another.
                for label in list(built)[:: -1 if number % 2 else 1]:
                    if self._budget.over(reserve_s):
                        return {}
                    self._time(plans[label], built[label], samples[label])
                    self._reporter.step("kernels within the model")
        except (DeviceError, RunFailed) as failure:
            self._reporter.note(f"kernels cannot be timed within the model: {failure}")
            return {}
        finally:
            for found in built.values():
                Path(found.marked).unlink(missing_ok=True)
        return {
            label: Parts(_roots(built[label]), tuple(statistics.median(step) for step in zip(*taken, strict=True)))
            for label, taken in samples.items()
        }

    def _build(self, plans: Mapping[str, LayoutPlan], reserve_s: float) -> dict[str, BuiltMarked]:
        """The plans that can be timed; none if the budget is over first."""
        futures = {
            label: self._builder.submit(STEPS, self._source.job(plan, self._output()), _BUILD_S)
            for label, plan in plans.items()
        }
        while wait(futures.values(), timeout=_POLL_S).not_done:
            if self._budget.over(reserve_s):
                for future in futures.values():
                    future.cancel()
                return {}
        found = {}
        for label, future in futures.items():
            result = future.result()
            if not result.ok:
                self._reporter.note(f"a model with marks between its kernels: {result.status.value}: {result.error}")
            elif result.value.steps is not None:
                found[label] = result.value
        return found

    def _time(self, plan: LayoutPlan, built: BuiltMarked, samples: list[list[float]]) -> None:
        """Add the samples of all steps, one list a run."""
        assert built.steps is not None
        times = time_steps(
            self._device,
            None,
            built.marked,
            to_plan(plan, self._inputs),
            steps=len(built.steps),
            starts=1,
            rounds=_ROUNDS,
        )
        samples += [list(run) for run in zip(*times.steps_us, strict=True)]

    def _output(self) -> str:
        return str(self._folder / f"steps_{next(self._files)}.so")


def _roots(built: BuiltMarked) -> tuple[str, ...]:
    return tuple(step.ops[0] if step.ops else "" for step in built.steps or ())
