"""After the finalists are known: pairs of their kernels as one kernel each, where the whole model says so too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.search.acceptance import compare
from layoutsearch.search.budget import Budget
from layoutsearch.search.finals import Samples, WholeTimes, plan_digest
from layoutsearch.search.pairs import PairTimer, chosen, join_candidates, pairs_of
from layoutsearch.search.reporter import Reporter
from layoutsearch.search.whole import Built, Whole
from layoutsearch.search.workloads import KernelNode

STAGE = "pairs"
_STARTS, _ROUNDS_PER_START = 6, 6
# Without so much beyond what the final comparison takes nothing is begun, nothing is measured, and nothing is built.
_LEAST_S, _MEASURE_S, _WHOLE_S = 25.0, 20.0, 10.0
# Of the measurements, in all and for a pair.
_BASE_S, _EACH_S, _MOST_S = 30.0, 3.0, 75.0


@dataclass(frozen=True)
class Joined:
    """A finalist with pairs, where it is faster than without.

    Attributes:
        plan: not validated.
        built: it on disk.
        samples: of the rounds that compared it.
        speedup: over the plan without.
    """

    plan: LayoutPlan
    built: Built
    samples: tuple[float, ...]
    speedup: float


class Joining:
    """Finds the pairs of finalists.

    Afterwards `is_complete` says whether there was time for all of it.

    Args:
        timer: of pairs.
        graph: of the model.
        nodes: its kernels.
        whole: builds and times whole models.
        times: keeps whole timings.
        budget: when to stop.
        reporter: told of progress.
    """

    def __init__(
        self,
        timer: PairTimer,
        graph: LayoutGraph,
        nodes: Sequence[KernelNode],
        whole: Whole,
        times: WholeTimes,
        budget: Budget,
        reporter: Reporter,
    ) -> None:
        self._timer, self._graph, self._nodes = timer, graph, nodes
        self._whole, self._times, self._budget, self._reporter = whole, times, budget, reporter
        self.is_complete = True

    @property
    def wanted_s(self) -> float:
        """Seconds to keep for it; none where the model has no pair in any layout."""
        count = len(join_candidates(self._graph, self._nodes))
        return min(_MOST_S, _BASE_S + _EACH_S * count) if count else 0.0

    def improve(
        self, plans: Mapping[str, LayoutPlan], built: Mapping[str, Built], seed: int, reserve_s: float
    ) -> dict[str, Joined]:
        """The finalists that are faster with pairs, by label; `reserve_s` seconds are kept for what comes after."""
        works = {label: pairs_of(plan, self._graph, self._nodes) for label, plan in plans.items()}
        every = list({work.key: work for some in works.values() for work in some}.values())
        if not every:
            return {}
        if self._budget.over(reserve_s + _LEAST_S):
            return self._stopped("no time was left to try pairs of kernels; a longer --time-budget has it")
        times = self._timer.measure(every, reserve_s + _MEASURE_S)
        self.is_complete = all(work.key in times for work in every)
        joined = {label: replace(plans[label], fusions=chosen(some, times)) for label, some in works.items()}
        joined = {label: plan for label, plan in joined.items() if plan.fusions}
        if not joined:
            return {}
        if self._budget.over(reserve_s + _WHOLE_S):
            return self._stopped("no time was left to time pairs of kernels within the model")
        fresh = self._whole.build({_with_pairs(label): plan for label, plan in joined.items()})
        if self._budget.interrupted:
            return self._stopped()
        joined = {label: plan for label, plan in joined.items() if _with_pairs(label) in fresh}
        if not joined:
            return {}
        samples = self._recorded(plans, joined) or self._timed(plans, joined, {**built, **fresh}, seed)
        found = {}
        for label, plan in joined.items():
            one = self._verdict(label, samples, seed)
            if one is not None:
                found[label] = Joined(plan, fresh[_with_pairs(label)], samples[_with_pairs(label)], one)
        return found

    def _stopped(self, why: str = "") -> dict[str, Joined]:
        self.is_complete = False
        if why:
            self._reporter.note(why)
        return {}

    def _verdict(self, label: str, samples: Samples, seed: int) -> float | None:
        """By how much a finalist is faster with pairs, if it is so beyond doubt."""
        other = _with_pairs(label)
        if label not in samples or other not in samples:
            return None
        found = compare(samples[label], samples[other], per_start=_ROUNDS_PER_START, seed=seed)
        self._reporter.best(f"{other}: {found.speedup:.3f}x{'' if found.accepted else ', not taken'}")
        return found.speedup if found.accepted else None

    def _recorded(self, plans: Mapping[str, LayoutPlan], joined: Mapping[str, LayoutPlan]) -> Samples | None:
        """The samples of a run that compared exactly these."""
        digests = {plan_digest(plan): label for label, plan in _compared(plans, joined).items()}
        for run in self._times.runs(STAGE):
            if run.keys() == digests.keys():
                return {digests[digest]: values for digest, values in run.items()}
        return None

    def _timed(
        self,
        plans: Mapping[str, LayoutPlan],
        joined: Mapping[str, LayoutPlan],
        built: Mapping[str, Built],
        seed: int,
    ) -> Samples:
        """Fresh interleaved rounds of each finalist without and with its pairs."""
        compared = _compared(plans, joined)
        self._reporter.stage("models with pairs of kernels", _STARTS * _ROUNDS_PER_START)
        samples = self._whole.time(
            {label: built[label] for label in compared}, _STARTS * _ROUNDS_PER_START, seed + 2, _STARTS
        )
        whole = all(len(samples.get(label, ())) == _STARTS * _ROUNDS_PER_START for label in compared)
        if whole and not self._budget.interrupted:
            self._times.add(STAGE, {plan_digest(plan): samples[label] for label, plan in compared.items()})
        self.is_complete &= whole
        return samples


def _with_pairs(label: str) -> str:
    return f"{label} with pairs"


def _compared(plans: Mapping[str, LayoutPlan], joined: Mapping[str, LayoutPlan]) -> dict[str, LayoutPlan]:
    return {**{label: plans[label] for label in joined}, **{_with_pairs(label): plan for label, plan in joined.items()}}
