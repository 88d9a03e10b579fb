"""The dual: always below the optimum, never without a candidate of an optimum, and tight on real structures."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layoutsearch.bench.families import FAMILIES
from layoutsearch.bench.graphs import Net
from layoutsearch.search.dual import MAX_SHARED_LAYOUTS, Dual
from layoutsearch.search.eliminate import elimination_order, least_cells
from layoutsearch.search.factors import FactorGraphBuilder
from layoutsearch.search.problem import LayoutProblem, Node, Tensor, Use, restricted
from layoutsearch.search.solve import solve
from layoutsearch.search.wide import solve_wide
from tests.search.layout_problems import brute_force, chain, densenet, random_problem, resnet50


def finite(seed: int) -> LayoutProblem:
    """A random problem whose transforms are finite; every node has a candidate."""
    return random_problem(seed, p_inf=0.0)


@given(st.integers(0, 10**6), st.integers(1, 6))
def test_the_bound_holds_and_candidates_of_the_optimum_stay(seed: int, sweeps: int) -> None:
    problem = finite(seed)
    everything = brute_force(problem)
    optimum = everything[0][0]
    dual = Dual(problem)
    bounds = [dual.bound()]
    for k in range(sweeps):
        dual.sweep(backward=bool(k % 2))
        bounds.append(dual.bound())
        kept = dual.kept(optimum)
        for cost, assignment in everything:
            if cost <= optimum + 1e-12:
                assert all(a in candidates for a, candidates in zip(assignment, kept, strict=True))
        assert problem.evaluate(dual.rounded(backward=not k % 2)).total >= optimum - 1e-9
    assert max(bounds) <= optimum + 1e-9 * max(1.0, abs(optimum))
    assert all(b >= a - 1e-9 * max(1.0, abs(a)) for a, b in itertools.pairwise(bounds))


@given(st.integers(0, 10**6))
def test_what_is_ruled_out_against_a_worse_cost_is_right_too(seed: int) -> None:
    problem = finite(seed)
    everything = brute_force(problem)
    upper = everything[len(everything) // 3][0]
    dual = Dual(problem)
    dual.sweep(backward=False)
    dual.sweep(backward=True)
    kept = dual.kept(upper)
    smaller = Dual(restricted(problem, dict(enumerate(kept))), dual)
    assert smaller.bound() >= dual.bound() - 1e-9
    assert smaller.bound() <= everything[0][0] + 1e-9
    for cost, assignment in everything:
        if cost <= upper:
            assert all(a in candidates for a, candidates in zip(assignment, kept, strict=True))


@pytest.mark.parametrize("problem", [resnet50(0, 4), chain(0, 5, length=150), densenet(0, 4, blocks=(5, 6))])
def test_the_bound_is_tight_on_real_structures(problem: LayoutProblem) -> None:
    optimum = solve(problem).cost
    dual = Dual(problem)
    for _ in range(20):
        dual.sweep(backward=False)
        dual.sweep(backward=True)
    assert optimum * (1 - 1e-3) <= dual.bound() <= optimum * (1 + 1e-9)


def test_densenet_121_with_ten_candidates_is_proven() -> None:
    net = Net(0)
    FAMILIES["densenet"](net, 185, 0)
    solution = solve(net.problem(), time_limit_s=120)
    assert solution.proven
    assert solution.method == "milp"
    assert solution.lower_bound == pytest.approx(solution.cost, rel=1e-6)


def test_adversarial_problems_keep_a_useful_bound() -> None:
    net = Net(0, "shared")
    FAMILIES["densenet"](net, 120, 0)
    solution = solve(net.problem(), time_limit_s=6)
    assert solution.proven or solution.gap < 0.2


def test_too_many_layouts_for_sets_go_to_the_program() -> None:
    n = MAX_SHARED_LAYOUTS + 1
    rng = np.random.default_rng(0)
    cost = rng.uniform(1, 5, (n, n))
    np.fill_diagonal(cost, 0)
    nodes = tuple(Node(f"n{i}", tuple(rng.uniform(0, 5, n))) for i in range(3))
    tensor = Tensor("x", 0, tuple(range(n)), (Use(1, tuple(range(n))), Use(2, tuple(range(n)))), cost)
    problem = LayoutProblem(nodes, (tensor,))
    assert not Dual.fits(problem)
    assert solve_wide(problem, time_limit_s=20, max_cells=0).cost == pytest.approx(solve(problem).cost, rel=1e-9)


def test_infinite_transforms_are_never_paid() -> None:
    for seed in range(60):
        problem = random_problem(seed, p_inf=0.15)
        everything = brute_force(problem)
        if everything:
            found = solve_wide(problem, time_limit_s=20, max_cells=0)
            assert math.isfinite(found.cost)
            assert found.proven
            assert found.cost == pytest.approx(everything[0][0], rel=1e-9, abs=1e-9)


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 8]))
def test_no_order_needs_less_than_the_least_table(seed: int, readers: int) -> None:
    graph = FactorGraphBuilder(random_problem(seed, p_inf=0.0)).build(readers)
    for by_cells in (False, True):
        order = elimination_order(graph, 10**12, by_cells=by_cells)
        assert order is not None
        assert least_cells(graph) <= order.largest
