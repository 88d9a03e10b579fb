"""Finalists next to variants of themselves, within the whole model: which of those are faster beyond doubt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.search.acceptance import compare
from layoutsearch.search.budget import Budget
from layoutsearch.search.finals import Samples, WholeTimes, plan_digest
from layoutsearch.search.reporter import Reporter
from layoutsearch.search.whole import Built, Whole

_STARTS, _ROUNDS_PER_START = 6, 6
# Without so much beyond what the final comparison takes no variant is built.
_WHOLE_S = 10.0


@dataclass(frozen=True)
class Variant:
    """A finalist changed, where that made it faster.

    Attributes:
        plan: not validated.
        built: it on disk.
        samples: of the rounds that compared it.
        speedup: over the plan as it was.
    """

    plan: LayoutPlan
    built: Built
    samples: tuple[float, ...]
    speedup: float


class Variants:
    """Builds variants of finalists and times them by turns with what they are variants of.

    Afterwards `is_complete` says whether there was time for all of it.

    Args:
        stage: what the timings are kept as.
        suffix: of a variant's label, as `with pairs`.
        whole: builds and times whole models.
        times: keeps whole timings.
        budget: when to stop.
        reporter: told of progress.
    """

    def __init__(
        self, stage: str, suffix: str, whole: Whole, times: WholeTimes, budget: Budget, reporter: Reporter
    ) -> None:
        self._stage, self._suffix = stage, suffix
        self._whole, self._times, self._budget, self._reporter = whole, times, budget, reporter
        self.is_complete = True

    def stopped(self, why: str = "") -> dict[str, Variant]:
        """Nothing was found, since there was no time; says `why`."""
        self.is_complete = False
        if why:
            self._reporter.note(why)
        return {}

    def faster(
        self,
        plans: Mapping[str, LayoutPlan],
        changed: Mapping[str, LayoutPlan],
        built: Mapping[str, Built],
        seed: int,
        reserve_s: float,
    ) -> dict[str, Variant]:
        """The variants that are faster, by label of the finalist.

        Args:
            plans: finalists by label.
            changed: variants of some of them.
            built: the finalists on disk.
            seed: of the order of runs and of the bootstrap.
            reserve_s: seconds to keep for what comes after.
        """
        if not changed:
            return {}
        if self._budget.over(reserve_s + _WHOLE_S):
            return self.stopped(f"no time was left to time models {self._suffix}")
        fresh = self._whole.build({self._label(label): plan for label, plan in changed.items()})
        if self._budget.interrupted:
            return self.stopped()
        left = {label: plan for label, plan in changed.items() if self._label(label) in fresh}
        if not left:
            return {}
        samples = self._recorded(plans, left) or self._timed(plans, left, {**built, **fresh}, seed)
        found = {}
        for label, plan in left.items():
            speedup = self._verdict(label, samples, seed)
            if speedup is not None:
                other = self._label(label)
                found[label] = Variant(plan, fresh[other], samples[other], speedup)
        return found

    def _label(self, label: str) -> str:
        return f"{label} {self._suffix}"

    def _verdict(self, label: str, samples: Samples, seed: int) -> float | None:
        """By how much a variant is faster, if it is so beyond doubt."""
        other = self._label(label)
        if label not in samples or other not in samples:
            return None
        found = compare(samples[label], samples[other], per_start=_ROUNDS_PER_START, seed=seed)
        self._reporter.best(f"{other}: {found.speedup:.3f}x{'' if found.accepted else ', not taken'}")
        return found.speedup if found.accepted else None

    def _recorded(self, plans: Mapping[str, LayoutPlan], changed: Mapping[str, LayoutPlan]) -> Samples | None:
        """The samples of a run that compared exactly these."""
        digests = {plan_digest(plan): label for label, plan in self._compared(plans, changed).items()}
        for run in self._times.runs(self._stage):
            if run.keys() == digests.keys():
                return {digests[digest]: values for digest, values in run.items()}
        return None

    def _timed(
        self,
        plans: Mapping[str, LayoutPlan],
        changed: Mapping[str, LayoutPlan],
        built: Mapping[str, Built],
        seed: int,
    ) -> Samples:
        """Fresh interleaved rounds of each finalist and its variant."""
        compared = self._compared(plans, changed)
        rounds = _STARTS * _ROUNDS_PER_START
        self._reporter.stage(f"models {self._suffix}", rounds)
        samples = self._whole.time({label: built[label] for label in compared}, rounds, seed + 2, _STARTS)
        whole = all(len(samples.get(label, ())) == rounds for label in compared)
        if whole and not self._budget.interrupted:
            self._times.add(self._stage, {plan_digest(plan): samples[label] for label, plan in compared.items()})
        self.is_complete &= whole
        return samples

    def _compared(self, plans: Mapping[str, LayoutPlan], changed: Mapping[str, LayoutPlan]) -> dict[str, LayoutPlan]:
        variants = {self._label(label): plan for label, plan in changed.items()}
        return {**{label: plans[label] for label in changed}, **variants}
