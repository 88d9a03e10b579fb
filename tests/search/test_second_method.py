"""The package's solvers against a program written apart from them, where brute force cannot go."""

from __future__ import annotations

import math

import pytest

from layoutsearch.bench.families import FAMILIES
from layoutsearch.bench.graphs import COSTS, Net
from layoutsearch.search.problem import LayoutProblem, NoAssignmentError
from layoutsearch.search.solve import solve
from tests.search.layout_problems import brute_force, random_problem
from tests.search.second_method import textbook_optimum


def optimum(problem: LayoutProblem, max_cells: int) -> float:
    try:
        solution = solve(problem, max_cells=max_cells)
    except NoAssignmentError:
        return math.inf
    assert solution.proven
    return solution.cost


def agree(problem: LayoutProblem) -> float:
    expected = textbook_optimum(problem)
    for max_cells in (10**7, 0):
        assert optimum(problem, max_cells) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    return expected


def test_the_second_method_is_right_where_brute_force_can_tell() -> None:
    for seed in range(150):
        problem = random_problem(1000 + seed, max_nodes=6)
        everything = brute_force(problem)
        expected = everything[0][0] if everything else math.inf
        assert textbook_optimum(problem) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("block", range(4))
def test_random_graphs_beyond_brute_force(block: int) -> None:
    """Shared transforms, repeated operands, fixed layouts, and infeasible entries in two of three."""
    found = [
        agree(random_problem(seed, max_nodes=14, p_inf=(0.0, 0.03, 0.1)[seed % 3]))
        for seed in range(2000 + 75 * block, 2075 + 75 * block)
    ]
    assert 0 < sum(cost == math.inf for cost in found) < 40


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("family", ["chain", "resnet", "unet", "inception"])
def test_small_nets(family: str, costs: str) -> None:
    net = Net(3, costs, mixed=family == "resnet")
    FAMILIES[family](net, 12, 3)
    problem = net.problem()
    assert optimum(problem, 10**7) == pytest.approx(optimum(problem, 0), rel=1e-6)
