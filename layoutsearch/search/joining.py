"""After the finalists are known: pairs of their kernels as one kernel each, where the whole model says so too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.search.budget import Budget
from layoutsearch.search.finals import WholeTimes
from layoutsearch.search.pairs import PairTimer, chosen, join_candidates, pairs_of
from layoutsearch.search.reporter import Reporter
from layoutsearch.search.variants import Variant, Variants
from layoutsearch.search.whole import Built, Whole
from layoutsearch.search.workloads import KernelNode

STAGE = "pairs"
# Without so much beyond what the final comparison takes nothing is begun, and nothing is measured.
_LEAST_S, _MEASURE_S = 25.0, 20.0
# Of the measurements, in all and for a pair.
_BASE_S, _EACH_S, _MOST_S = 30.0, 3.0, 75.0


class Joining:
    """Finds the pairs of finalists.

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
        self._timer, self._graph, self._nodes, self._budget = timer, graph, nodes, budget
        self._variants = Variants(STAGE, "with pairs", whole, times, budget, reporter)
        self._knows_all = True

    @property
    def is_complete(self) -> bool:
        """Whether there was time for all of it, in what was improved so far."""
        return self._knows_all and self._variants.is_complete

    @property
    def about(self) -> str:
        """Equal for runs that try the same; empty where the model has no pair in any layout."""
        count = len(join_candidates(self._graph, self._nodes))
        return f"{count} pairs" if count else ""

    @property
    def wanted_s(self) -> float:
        """Seconds to keep for it; none where the model has no pair in any layout."""
        count = len(join_candidates(self._graph, self._nodes))
        return min(_MOST_S, _BASE_S + _EACH_S * count) if count else 0.0

    def improve(
        self, plans: Mapping[str, LayoutPlan], built: Mapping[str, Built], seed: int, reserve_s: float
    ) -> dict[str, Variant]:
        """The finalists that are faster with pairs, by label; `reserve_s` seconds are kept for what comes after."""
        works = {label: pairs_of(plan, self._graph, self._nodes) for label, plan in plans.items()}
        every = list({work.key: work for some in works.values() for work in some}.values())
        if not every:
            return {}
        if self._budget.over(reserve_s + _LEAST_S):
            return self._variants.stopped("no time was left to try pairs of kernels; a longer --time-budget has it")
        times = self._timer.measure(every, reserve_s + _MEASURE_S)
        self._knows_all = all(work.key in times for work in every)
        joined = {label: replace(plans[label], fusions=chosen(some, times)) for label, some in works.items()}
        joined = {label: plan for label, plan in joined.items() if plan.fusions}
        return self._variants.faster(plans, joined, built, seed, reserve_s)
