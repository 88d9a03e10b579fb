"""The best few assignments that really differ: what is built and timed whole."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import replace

from layoutsearch.search.descent import Descent, descend
from layoutsearch.search.milp import Distance, solve_milp
from layoutsearch.search.problem import LayoutProblem, NoAssignmentError, restricted
from layoutsearch.search.solve import Solution, solve

__all__ = ["best_assignments", "restricted"]

_DOUBLINGS = 40


def _penalized(problem: LayoutProblem, distance: Distance, penalty: float) -> LayoutProblem:
    """The problem with a surcharge on every choice that one of the others made."""
    nodes = list(problem.nodes)
    for i in distance.counted:
        costs = list(nodes[i].costs)
        for other in distance.others:
            costs[other[i]] += penalty
        nodes[i] = replace(nodes[i], costs=tuple(costs))
    return replace(problem, nodes=tuple(nodes))


def _incumbent(problem: LayoutProblem, distance: Distance) -> tuple[int, ...] | None:
    """An assignment far enough from the others, by descent under growing surcharges; None if it finds none."""
    reference = problem.evaluate(distance.others[0]).total
    penalty = max(abs(reference), 1e-9) / (100 * max(1, len(problem.nodes)))
    for _ in range(_DOUBLINGS):
        found = descend(_penalized(problem, distance, penalty))
        if distance.holds(found) and math.isfinite(problem.evaluate(found).total):
            return Descent(problem).improve(found, allowed=distance.holds)
        penalty *= 2
        if penalty > 1e3 * max(abs(reference), 1.0):
            break
    return None


def best_assignments(
    problem: LayoutProblem,
    k: int,
    *,
    min_changes: int = 1,
    changing: Collection[int] | None = None,
    time_limit_s: float = 60.0,
) -> list[Solution]:
    """The best assignment, then each time the best that differs from all before at `min_changes` nodes or more.

    Exact (an integer program with one distance row per earlier solution) unless the time limit is reached, which
    `proven` says of each. Cost-ordered, without duplicates. Fewer than `k` where no more of finite cost exist, or none
    was found in time. With `min_changes=1` this is the list of the `k` best; a larger value, and `changing`, leave out
    variations that do not matter on the device.

    Args:
        problem: what to solve.
        k: how many at most.
        min_changes: pairwise distance, in nodes with different candidates.
        changing: only differences at these nodes count, e.g. the anchors; all nodes if None.
        time_limit_s: seconds for all of them together.

    Raises:
        ValueError: `k` or `min_changes` below 1, or a node in `changing` that does not exist.
        NoAssignmentError: not even one assignment of finite cost.
    """
    if k < 1 or min_changes < 1:
        raise ValueError(f"k is {k} and min_changes {min_changes}; both have to be at least 1")
    counted = tuple(range(len(problem.nodes))) if changing is None else tuple(sorted(set(changing)))
    if counted and not 0 <= counted[0] <= counted[-1] < len(problem.nodes):
        raise ValueError(f"changing names nodes {counted[0]} to {counted[-1]}; there are {len(problem.nodes)} nodes")
    deadline = time.monotonic() + time_limit_s
    found = [solve(problem, time_limit_s=time_limit_s / k)]
    while len(found) < k:
        distance = Distance(tuple(s.assignment for s in found), min_changes, counted)
        share = max(0.0, deadline - time.monotonic()) / (k - len(found))
        try:
            result = solve_milp(problem, time_limit_s=share, distance=distance, incumbent=_incumbent(problem, distance))
        except NoAssignmentError:
            break
        found.append(Solution(result.assignment, result.cost, result.lower_bound, result.proven, "milp"))
    return sorted(found, key=lambda s: s.cost)
