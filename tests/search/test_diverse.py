from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from layoutsearch.search.diverse import best_assignments
from layoutsearch.search.problem import LayoutProblem, NoAssignmentError, Node
from layoutsearch.search.solve import solve
from tests.search.layout_problems import brute_force, layout_problems, random_problem, resnet50


def differences(a: tuple[int, ...], b: tuple[int, ...], counted: list[int] | None = None) -> int:
    return sum(a[i] != b[i] for i in (range(len(a)) if counted is None else counted))


def check(problem: LayoutProblem, k: int, min_changes: int, counted: list[int] | None = None) -> None:
    """Each solution is the cheapest of those far enough from all before it, and the list ends only when none is."""
    everything = brute_force(problem)
    if not everything:
        with pytest.raises(NoAssignmentError):
            best_assignments(problem, k, min_changes=min_changes, changing=counted)
        return
    found = best_assignments(problem, k, min_changes=min_changes, changing=counted)
    chosen: list[tuple[int, ...]] = []
    for solution in found:
        left = [c for c, x in everything if all(differences(x, y, counted) >= min_changes for y in chosen)]
        assert all(differences(solution.assignment, y, counted) >= min_changes for y in chosen)
        assert solution.cost == problem.evaluate(solution.assignment).total
        assert solution.cost == pytest.approx(left[0], rel=1e-9, abs=1e-9)
        assert solution.proven
        chosen.append(solution.assignment)
    if len(found) < k:
        assert not [x for _, x in everything if all(differences(x, y, counted) >= min_changes for y in chosen)]


@pytest.mark.parametrize("min_changes", [1, 2, 3])
def test_random_graphs(min_changes: int) -> None:
    for seed in range(40):
        check(random_problem(seed, max_nodes=6), 5, min_changes)


@settings(deadline=None, max_examples=60)
@given(problem=layout_problems(max_nodes=4), k=st.integers(1, 6), min_changes=st.integers(1, 3))
@example(problem=LayoutProblem((Node("n0", (0.0, 2.2e-313)),), ()), k=2, min_changes=1)
def test_drawn_graphs(problem: LayoutProblem, k: int, min_changes: int) -> None:
    check(problem, k, min_changes)


def test_only_some_nodes_count() -> None:
    for seed in range(30):
        problem = random_problem(seed, max_nodes=6)
        check(problem, 4, 1, counted=list(range(0, len(problem.nodes), 2)))


def test_the_k_best_are_the_head_of_the_sorted_list() -> None:
    problem = random_problem(11, max_nodes=6, p_inf=0.0)
    costs = [s.cost for s in best_assignments(problem, 20)]
    assert costs == pytest.approx([c for c, _ in brute_force(problem)[:20]], rel=1e-9)


def test_a_real_structure() -> None:
    problem = resnet50(0, 4)
    found = best_assignments(problem, 4, min_changes=8)
    assert len(found) == 4
    assert found[0].cost == pytest.approx(solve(problem).cost)
    assert [s.cost for s in found] == sorted(s.cost for s in found)
    pairs = [(a, b) for i, a in enumerate(found) for b in found[:i]]
    assert all(differences(a.assignment, b.assignment) >= 8 for a, b in pairs)
    assert found[-1].cost < 1.1 * found[0].cost


def test_out_of_time_the_list_is_still_ordered_and_apart() -> None:
    found = best_assignments(resnet50(0, 6), 4, min_changes=10, time_limit_s=0.0)
    assert found[0].proven
    assert len(found) > 1
    assert [s.cost for s in found] == sorted(s.cost for s in found)
    assert all(differences(a.assignment, b.assignment) >= 10 for i, a in enumerate(found) for b in found[:i])
    assert all(s.lower_bound <= s.cost < math.inf for s in found)


def test_wrong_arguments() -> None:
    problem = LayoutProblem((Node("a", (1.0, 2.0)),), ())
    for kwargs in ({"k": 0}, {"k": 1, "min_changes": 0}, {"k": 1, "changing": [1]}, {"k": 1, "changing": [-1]}):
        with pytest.raises(ValueError, match=r"k is|changing names"):
            best_assignments(problem, **kwargs)
    assert [s.assignment for s in best_assignments(problem, 5)] == [(0,), (1,)]
