"""Problems too wide for elimination: the dual rules candidates out, then HiGHS solves what is left.

On real networks the dual bound meets the optimum or nearly so, and few candidates stay; often the rest is narrow enough
for elimination after all. While the best known assignment is not the optimum, the optimum is guessed to lie close above
the bound: with the candidates that such a cost allows the program is small, and its answer either is the optimum, or
shows that the guess was too low, which raises the bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from layoutsearch.search.descent import Descent, descend
from layoutsearch.search.dual import Dual
from layoutsearch.search.eliminate import eliminate
from layoutsearch.search.milp import MilpResult, solve_milp, trivial_bound
from layoutsearch.search.problem import LayoutProblem, NoAssignmentError, restricted
from layoutsearch.search.reduce import reduce_problem

# Sweeps there and back between two looks at what can go.
_SWEEPS = 4
_MAX_LOOKS = 25
# The dual stops when a look raises the bound by less than this share of the gap, and rules out less than that of the
# candidates.
_LEAST_GAIN = 0.05
_LEAST_SHRUNK = 0.05
# Share of the time the dual may take.
_DUAL_SHARE = 0.5
# Difference between cost and bound, relative to the cost, that is rounding.
_PROVEN_GAP = 1e-9
# Where between the bound and the best known cost the optimum is looked for, in turn.
_GUESSES = (0.1, 0.35, 1.0)


@dataclass
class _State:
    cost: float
    assignment: tuple[int, ...]
    bound: float


def solve_wide(problem: LayoutProblem, *, time_limit_s: float, max_cells: int) -> MilpResult:
    """Minimise; the best assignment that was found, and a bound, if the time does not suffice.

    Args:
        problem: one part, see `reduce_problem`.
        time_limit_s: seconds in all.
        max_cells: largest table elimination may build, of what the dual leaves.

    Raises:
        NoAssignmentError: every assignment costs `inf`, or none of finite cost was found in time.
    """
    deadline = time.monotonic() + time_limit_s
    # One start is enough where it is feasible: the dual finds better ones.
    cheapest = [min(range(len(node.costs)), key=node.costs.__getitem__) for node in problem.nodes]
    start = Descent(problem).improve(cheapest)
    if not math.isfinite(problem.evaluate(start).total):
        start = descend(problem)
    cost = problem.evaluate(start).total
    floor = trivial_bound(problem)
    if not math.isfinite(cost) or cost <= floor or not Dual.fits(problem):
        return solve_milp(problem, time_limit_s=time_limit_s, incumbent=start if math.isfinite(cost) else None)
    state = _State(cost, start, floor)
    left, dual = _tightened(problem, state, time.monotonic() + _DUAL_SHARE * time_limit_s)
    gap, bound = state.cost - state.bound, state.bound
    for k, guess in enumerate(_GUESSES):
        if state.cost - state.bound <= _PROVEN_GAP * abs(state.cost) or time.monotonic() > deadline:
            break
        until = time.monotonic() + (deadline - time.monotonic()) / (len(_GUESSES) - k)
        _guessed(problem, left, dual, min(bound + guess * gap, state.cost), state, until, max_cells)
    proven = state.cost - state.bound <= _PROVEN_GAP * abs(state.cost)
    return MilpResult(state.assignment, state.cost, min(state.cost, state.bound), proven)


def _tightened(problem: LayoutProblem, state: _State, deadline: float) -> tuple[LayoutProblem, Dual]:
    """Improve `state` by the dual; the problem without the candidates that cannot be better, and its dual."""
    descent = Descent(problem)

    def offer(found: Sequence[int]) -> None:
        assignment = descent.improve(found)
        cost = problem.evaluate(assignment).total
        if cost < state.cost:
            state.cost, state.assignment = cost, assignment

    left = problem
    size = sum(len(node.costs) for node in problem.nodes)
    dual = Dual(_capped(left, state.cost))
    for _ in range(_MAX_LOOKS):
        for _ in range(_SWEEPS):
            dual.sweep(backward=False)
            dual.sweep(backward=True)
            if time.monotonic() > deadline:
                break
        offer(dual.rounded(backward=False))
        gap, before = state.cost - state.bound, state.bound
        state.bound = max(state.bound, min(state.cost, dual.bound()))
        if state.cost - state.bound <= _PROVEN_GAP * abs(state.cost):
            break
        kept = dual.kept(state.cost)
        if not all(kept):
            # Nothing is better than what is known.
            state.bound = state.cost
            break
        count = sum(map(len, kept))
        shrunk = count <= (1 - _LEAST_SHRUNK) * size
        if shrunk:
            left, size = restricted(left, dict(enumerate(kept))), count
            dual = Dual(_capped(left, state.cost), dual)
        if time.monotonic() > deadline or (not shrunk and state.bound - before < _LEAST_GAIN * gap):
            break
    return left, dual


def _guessed(
    problem: LayoutProblem,
    left: LayoutProblem,
    dual: Dual,
    upper: float,
    state: _State,
    deadline: float,
    max_cells: int,
) -> None:
    """Solve with the candidates that a cost of `upper` allows, as far as there is time, and improve `state`."""
    kept = dual.kept(upper)
    if not all(kept):
        state.bound = max(state.bound, upper)
        return
    reduced = reduce_problem(restricted(left, dict(enumerate(kept))))
    assignment = list(reduced.assignment)
    slack, proven = 0.0, True
    parts = sorted(reduced.parts, key=lambda part: len(part.nodes))
    try:
        for k, part in enumerate(parts):
            found: Sequence[int] | None = eliminate(part.problem, max_cells=max_cells)
            if found is None:
                share = max(0.0, deadline - time.monotonic()) / (len(parts) - k)
                known = _within(part.candidates, [state.assignment[i] for i in part.nodes])
                result = solve_milp(part.problem, time_limit_s=share, incumbent=known)
                slack += result.cost - result.lower_bound
                proven &= result.proven
                found = result.assignment
            for i, kept_of, a in zip(part.nodes, part.candidates, found, strict=True):
                assignment[i] = kept_of[a]
    except NoAssignmentError:
        # Nothing so cheap exists, or HiGHS had no time to find it: no news either way.
        return
    cost = problem.evaluate(assignment).total
    if cost < state.cost:
        state.cost, state.assignment = cost, tuple(assignment)
    # Whatever was left out costs more than `upper`.
    least = cost if proven else cost - slack
    state.bound = min(state.cost, max(state.bound, min(upper, least)))


def _within(kept: Sequence[Sequence[int]], chosen: Sequence[int]) -> tuple[int, ...] | None:
    """An assignment in the numbers of a part; None if the part has left out one of its candidates."""
    if any(a not in candidates for a, candidates in zip(chosen, kept, strict=True)):
        return None
    return tuple(candidates.index(a) for a, candidates in zip(chosen, kept, strict=True))


def _capped(problem: LayoutProblem, upper: float) -> LayoutProblem:
    """Transforms at most at what would make any assignment worse than `upper`: finite, and the same below it."""
    most = 1.001 * (upper - trivial_bound(problem)) + 1e-9 * max(1.0, abs(upper))
    tensors = tuple(replace(t, cost=tuple(tuple(min(c, most) for c in row) for row in t.cost)) for t in problem.tensors)
    return replace(problem, tensors=tensors)
