"""How far the best assignment that is known can be from the best there is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from layoutsearch.search.batch import BatchSolver
from layoutsearch.search.beliefs import Beliefs, Costs
from layoutsearch.search.cost_index import FloatArray, IntArray

# The optimum is above `lower_bound_us` with this probability.
CONFIDENCE = 0.95


@dataclass(frozen=True)
class SearchState:
    """Where a search stands.

    Attributes:
        solution: the assignment of least expected cost.
        cost_us: that cost: measured where it is measured, with what a schedule search that is not over still gains.
        lower_bound_us: the optimum is above it at `CONFIDENCE`, as the posterior sees it.
        strict_bound_us: no assignment costs less, whatever the model thinks.
        regret_us: what the solution is expected to lose against the optimum.
        measured: candidates of kernels with a choice that were tried.
        candidates: how many there are.
        settled: whether the solution uses measured costs only.
        refuted: kernels and transforms that ran faster than the device's limits allow, so that these bound nothing.
    """

    solution: tuple[int, ...]
    cost_us: float
    lower_bound_us: float
    strict_bound_us: float
    regret_us: float
    measured: int
    candidates: int
    settled: bool
    refuted: int = 0

    @property
    def gap(self) -> float:
        """The part of `cost_us` by which the optimum may be below it, at `CONFIDENCE`."""
        return _part(self.cost_us, self.lower_bound_us)

    @property
    def strict_gap(self) -> float:
        """The part of `cost_us` by which the optimum may be below it, whatever the model thinks."""
        return _part(self.cost_us, self.strict_bound_us)


@dataclass(frozen=True)
class Draws:
    """Costs drawn from the posterior, solved.

    Attributes:
        costs: of kernels (draws, pairs) and of transforms (draws, transforms).
        solutions: optimal assignments, shape (draws, nodes).
        optima: their costs, shape (draws,).
        uses: how often each pair is used, shape (draws, pairs).
        pays: how often each transform is paid for, shape (draws, transforms).
    """

    costs: Costs
    solutions: IntArray
    optima: FloatArray
    uses: IntArray
    pays: IntArray


def solved_draws(solver: BatchSolver, beliefs: Beliefs, rng: np.random.Generator, size: int) -> Draws:
    """Draw costs `size` times and solve each."""
    index = solver.index
    costs = beliefs.draw(rng, size)
    solutions, optima = solver.solve(*costs)
    return Draws(costs, solutions, optima, index.uses(solutions), index.pays(solutions))


def judge(solver: BatchSolver, beliefs: Beliefs, draws: Draws) -> SearchState:
    """The state of a search, given what is believed and draws of it."""
    index = solver.index
    solution, cost = solver.solve_one(*beliefs.mean())
    strict = solver.solve_one(*beliefs.strict())[1]
    # The draw below which at most the allowed share lies: never interpolated upwards.
    rank = max(0, math.floor((1 - CONFIDENCE) * len(draws.optima)) - 1)
    low = float(np.sort(draws.optima)[rank])
    lost = index.cost(solution, *draws.costs) - draws.optima
    paid = index.pays(np.array([solution], dtype=np.intp))[0] > 0
    settled = bool(beliefs.measured[index.used(solution)].all() and beliefs.moved[paid].all())
    return SearchState(
        solution,
        cost,
        min(max(low, strict), cost),
        min(strict, cost),
        float(np.maximum(lost, 0.0).mean()),
        int((beliefs.measured & index.free).sum()),
        int(index.free.sum()),
        settled,
        beliefs.refuted,
    )


def _part(cost: float, bound: float) -> float:
    return max(0.0, (cost - bound) / cost) if cost > 0 else 0.0
