"""The exact optimum of a layout problem, by whichever method fits its graph."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from layoutsearch.search.eliminate import MAX_CELLS, eliminate
from layoutsearch.search.problem import LayoutProblem, NoAssignmentError
from layoutsearch.search.reduce import reduce_problem
from layoutsearch.search.wide import solve_wide


@dataclass(frozen=True)
class Solution:
    """An assignment with what is known about it.

    Attributes:
        assignment: candidate index of every node.
        cost: what it costs, in the unit of the problem.
        lower_bound: no assignment (that was asked for) costs less; equal to `cost` up to rounding where proven.
        proven: whether `assignment` is optimal.
        method: `trivial`, `elimination`, `milp` (what is too wide for elimination: dual bounds, then HiGHS), or
            `elimination+milp`.
    """

    assignment: tuple[int, ...]
    cost: float
    lower_bound: float
    proven: bool
    method: str

    @property
    def gap(self) -> float:
        """How far above the optimum this may be, as a fraction of its cost; 0 where proven."""
        return 0.0 if self.proven or self.cost == 0 else (self.cost - self.lower_bound) / abs(self.cost)


def solve(problem: LayoutProblem, *, time_limit_s: float = 60.0, max_cells: int = MAX_CELLS) -> Solution:
    """Minimise. Independent parts are solved apart, by elimination where tables fit, else by dual bounds and HiGHS.

    The result is the same every time unless the time limit is reached; of equal candidates the lowest index is taken.

    Args:
        problem: what to solve.
        time_limit_s: seconds for what is too wide for elimination, which takes what it takes (at most seconds).
        max_cells: largest table elimination may build.

    Raises:
        NoAssignmentError: no assignment has a finite cost, or none was found in time.
    """
    deadline = time.monotonic() + time_limit_s
    reduced = reduce_problem(problem)
    assignment = list(reduced.assignment)
    methods: set[str] = set()
    hard = []
    for part in reduced.parts:
        found = eliminate(part.problem, max_cells=max_cells)
        if found is None:
            hard.append(part)
            continue
        methods.add("elimination")
        for i, kept, a in zip(part.nodes, part.candidates, found, strict=True):
            assignment[i] = kept[a]
    slack, proven = 0.0, True
    for k, part in enumerate(hard):
        share = max(0.0, deadline - time.monotonic()) / (len(hard) - k)
        result = solve_wide(part.problem, time_limit_s=share, max_cells=max_cells)
        methods.add("milp")
        slack += result.cost - result.lower_bound
        proven &= result.proven
        for i, kept, a in zip(part.nodes, part.candidates, result.assignment, strict=True):
            assignment[i] = kept[a]
    cost = problem.evaluate(assignment).total
    if not math.isfinite(cost):
        raise NoAssignmentError("no assignment has a finite cost: a transform between fixed layouts is infeasible")
    return Solution(tuple(assignment), cost, cost - slack, proven, "+".join(sorted(methods)) or "trivial")
