"""Different assignments of one model to time whole: good ones, plain ones and bad ones.

A table is to show how well the additive model predicts whole models, so its assignments have to spread: over costs, and
over the number of transforms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from layoutsearch.layout.layout import Layout
from layoutsearch.search.diverse import best_assignments
from layoutsearch.search.problem import LayoutProblem, NoAssignmentError
from layoutsearch.search.skeleton import Skeleton, uniform_solution
from layoutsearch.search.solve import solve

_MIN_CHANGES = 3
_SOLVE_S = 20.0
# Spread (in log) of the noise on costs under which "near" assignments are optimal.
_NEAR = (0.1, 0.2, 0.35)
# Candidates of a mix are within this factor of the workload's fastest.
_MIX_WITHIN = 1.5

Labeled = tuple[str, tuple[int, ...]]


def different_assignments(
    skeleton: Skeleton,
    problem: LayoutProblem,
    layouts: Sequence[Layout],
    anchors: Sequence[int],
    count: int,
    seed: int,
) -> list[Labeled]:
    """The optimum, then up to `count` - 1 others of finite cost, labeled with how they were found; all different.

    Uniform ones of every layout, the best few that differ in three anchors or more, the optima under noisy costs, and
    random choices for every kernel on its own, in equal parts where there are enough of each.

    Raises:
        NoAssignmentError: no assignment has a finite cost.
    """
    optimum = solve(problem, time_limit_s=_SOLVE_S).assignment
    rng = np.random.default_rng(seed)
    kinds: list[Iterator[Labeled]] = [
        iter(_uniform(skeleton, problem, layouts)),
        iter(_best(problem, anchors, 1 + count // 4)),
        _near(problem, rng, count),
        _mixes(problem, rng, count),
    ]
    found: dict[tuple[int, ...], str] = {optimum: "optimum"}
    while kinds and len(found) < count:
        for kind in list(kinds):
            label, solution = next(kind, ("", ()))
            if not solution:
                kinds.remove(kind)
            elif len(found) < count and math.isfinite(problem.evaluate(solution).total):
                found.setdefault(solution, label)
    return [(label, solution) for solution, label in found.items()]


def _uniform(skeleton: Skeleton, problem: LayoutProblem, layouts: Sequence[Layout]) -> list[Labeled]:
    solutions = ((layout, uniform_solution(skeleton.nodes, problem, layout)) for layout in layouts)
    return [(f"uniform {layout}", solution) for layout, solution in solutions if solution is not None]


def _best(problem: LayoutProblem, anchors: Sequence[int], count: int) -> list[Labeled]:
    changes = max(1, min(_MIN_CHANGES, len(anchors)))
    found = best_assignments(problem, count, min_changes=changes, changing=anchors, time_limit_s=_SOLVE_S)
    return [(f"best {rank + 1}", solution.assignment) for rank, solution in enumerate(found)]


def _near(problem: LayoutProblem, rng: np.random.Generator, count: int) -> Iterator[Labeled]:
    # Noise may lead to the same assignment many times; a model with few assignments has to end too.
    for attempt in range(4 * count):
        sigma = _NEAR[attempt % len(_NEAR)]
        try:
            yield f"near {sigma:g}", solve(_noisy(problem, rng, sigma), time_limit_s=_SOLVE_S).assignment
        except NoAssignmentError:
            return


def _noisy(problem: LayoutProblem, rng: np.random.Generator, sigma: float) -> LayoutProblem:
    nodes = tuple(
        replace(node, costs=tuple(np.array(node.costs) * np.exp(rng.normal(0, sigma, len(node.costs)))))
        for node in problem.nodes
    )
    tensors = []
    for tensor in problem.tensors:
        factors = np.exp(rng.normal(0, sigma, tensor.matrix.shape))
        tensors.append(replace(tensor, cost=tuple(map(tuple, tensor.matrix * factors))))
    return LayoutProblem(nodes, tuple(tensors))


def _mixes(problem: LayoutProblem, rng: np.random.Generator, count: int) -> Iterator[Labeled]:
    close = []
    for node in problem.nodes:
        fastest = min(node.costs)
        close.append([i for i, cost in enumerate(node.costs) if cost <= _MIX_WITHIN * fastest])
    for _ in range(4 * count):
        yield f"mix {_MIX_WITHIN:g}", tuple(int(rng.choice(indices)) for indices in close)
