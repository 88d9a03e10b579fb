"""After the finalists are known: their kernels shared out between threads as is best within the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.search.budget import Budget
from layoutsearch.search.finals import WholeTimes
from layoutsearch.search.known import Knows
from layoutsearch.search.reporter import Reporter
from layoutsearch.search.sharing import Parts, SharedKernel, best_ways, designs, shared_kernels, with_ways
from layoutsearch.search.variants import Variant, Variants
from layoutsearch.search.whole import Built, Whole
from layoutsearch.search.workloads import KernelNode

STAGE = "sharing"
# Without so much beyond what comes after nothing is begun, and nothing is measured.
_LEAST_S, _MEASURE_S = 30.0, 15.0
_WANTED_S = 60.0


class PartsTimer(Protocol):
    """Times the kernels of plans within the model."""

    def parts(self, plans: Mapping[str, LayoutPlan], reserve_s: float) -> dict[str, Parts]:
        """By label; what failed, and what there was no time for while `reserve_s` seconds are kept, is left out.

        Empty where the kernels of the model do not run in one sequence, or the device cannot tell their times.
        """


class SharingOut:
    """Finds how the kernels of finalists share their work out.

    Args:
        timer: of kernels within the model.
        graph: of the model.
        nodes: its kernels.
        lab: knows kernels.
        cached_bytes: a kernel that moves more finds nothing in a cache.
        whole: builds and times whole models.
        times: keeps whole timings.
        budget: when to stop.
        reporter: told of progress.
    """

    def __init__(
        self,
        timer: PartsTimer,
        graph: LayoutGraph,
        nodes: Sequence[KernelNode],
        lab: Knows,
        cached_bytes: float,
        whole: Whole,
        times: WholeTimes,
        budget: Budget,
        reporter: Reporter,
    ) -> None:
        self._timer, self._graph, self._nodes, self._lab = timer, graph, nodes, lab
        self._cached_bytes, self._budget, self._reporter = cached_bytes, budget, reporter
        self._variants = Variants(STAGE, "with work shared out anew", whole, times, budget, reporter)

    @property
    def is_complete(self) -> bool:
        """Whether there was time for all of it, in what was improved so far."""
        return self._variants.is_complete

    @property
    def about(self) -> str:
        """Equal for runs that try the same; empty where there is nothing to share out."""
        return STAGE if len(self._graph.anchors) > 1 else ""

    @property
    def wanted_s(self) -> float:
        """Seconds to keep for it."""
        return _WANTED_S if self.about else 0.0

    def improve(
        self, plans: Mapping[str, LayoutPlan], built: Mapping[str, Built], seed: int, reserve_s: float
    ) -> dict[str, Variant]:
        """The finalists that are faster so, by label; `reserve_s` seconds are kept for what comes after."""
        kernels = {
            label: shared_kernels(plan, self._graph, self._nodes, self._lab, self._cached_bytes)
            for label, plan in plans.items()
        }
        kernels = {label: some for label, some in kernels.items() if len(some) > 1}
        if not kernels:
            return {}
        if self._budget.over(reserve_s + _LEAST_S):
            return self._variants.stopped(
                "no time was left to share kernels out between threads anew; a longer --time-budget has it"
            )
        changed = {}
        for label, some in kernels.items():
            if self._budget.over(reserve_s + _MEASURE_S):
                return self._variants.stopped("no time was left to time kernels within the model")
            plan = self._best(plans[label], some, reserve_s + _MEASURE_S)
            if plan is not None:
                changed[label] = plan
        return self._variants.faster(plans, changed, built, seed, reserve_s)

    def _best(self, plan: LayoutPlan, kernels: Sequence[SharedKernel], reserve_s: float) -> LayoutPlan | None:
        """The plan with what seems best; None where that is as it is, or not known."""
        of = {op_id: number for number, kernel in enumerate(kernels) for op_id in kernel.ops}
        roots = (self._graph.by_name[node.root].id for node in self._nodes)
        ways = designs([of[root] for root in roots if root in of], len(kernels))
        self._reporter.stage("kernels within the model", len(ways))
        parts = self._timer.parts({str(i): with_ways(plan, kernels, way) for i, way in enumerate(ways)}, reserve_s)
        if len(parts) < len(ways):
            if self._budget.over(reserve_s):
                self._variants.stopped("no time was left to time kernels within the model")
            return None
        timed = [(way, *parts[str(i)].by_kernel(of)) for i, way in enumerate(ways)]
        order = timed[0][1]
        found = best_ways(order, len(kernels), [(way, us) for way, _, us in timed])
        return with_ways(plan, kernels, found) if found != tuple(kernel.now for kernel in kernels) else None
