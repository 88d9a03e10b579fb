"""Every solver against brute force on small graphs, and against each other on large ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings

from layoutsearch.search.eliminate import eliminate, elimination_order, minimize
from layoutsearch.search.factors import FactorGraphBuilder
from layoutsearch.search.milp import solve_milp
from layoutsearch.search.problem import LayoutProblem, NoAssignmentError, Node, Tensor, Use, restricted
from layoutsearch.search.solve import solve
from tests.search.layout_problems import brute_force, chain, densenet, layout_problems, random_problem, resnet50


def by_elimination(problem: LayoutProblem) -> tuple[int, ...]:
    found = eliminate(problem)
    assert found is not None
    return found


def by_encoding(readers: int) -> Callable[[LayoutProblem], tuple[int, ...]]:
    """Elimination with the encoding forced: yes/no variables for tensors with more than `readers` free readers."""

    def run(problem: LayoutProblem) -> tuple[int, ...]:
        graph = FactorGraphBuilder(problem).build(readers)
        order = elimination_order(graph, 10**8)
        assert order is not None
        values, minimum = minimize(graph, order)
        if minimum == math.inf:
            raise NoAssignmentError("inf")
        found = graph.assignment(values)
        assert problem.evaluate(found).total == pytest.approx(minimum, rel=1e-9, abs=1e-9)
        return found

    return run


def by_milp(problem: LayoutProblem) -> tuple[int, ...]:
    result = solve_milp(problem)
    assert result.proven
    assert result.cost == problem.evaluate(result.assignment).total
    assert result.lower_bound <= result.cost
    return result.assignment


def by_solve(problem: LayoutProblem) -> tuple[int, ...]:
    solution = solve(problem)
    assert solution.proven
    assert solution.gap == 0
    assert solution.cost == problem.evaluate(solution.assignment).total
    assert solution.lower_bound == pytest.approx(solution.cost, rel=1e-6)
    return solution.assignment


def by_solve_with_milp(problem: LayoutProblem) -> tuple[int, ...]:
    return solve(problem, max_cells=0).assignment


SOLVERS = {
    "elimination": by_elimination,
    "elimination, tables": by_encoding(99),
    "elimination, yes/no": by_encoding(1),
    "milp": by_milp,
    "solve": by_solve,
    "solve by milp": by_solve_with_milp,
}


def check_against_brute_force(problem: LayoutProblem, solver: Callable[[LayoutProblem], tuple[int, ...]]) -> None:
    everything = brute_force(problem)
    if not everything:
        with pytest.raises(NoAssignmentError):
            solver(problem)
        return
    assert problem.evaluate(solver(problem)).total == pytest.approx(everything[0][0], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("block", range(6))
def test_optimum_of_random_graphs(name: str, block: int) -> None:
    for seed in range(50 * block, 50 * block + 50):
        check_against_brute_force(random_problem(seed, p_inf=0.1 if block % 2 else 0.02), SOLVERS[name])


def test_the_random_graphs_cover_what_they_claim() -> None:
    problems = [random_problem(seed) for seed in range(300)]
    tensors = [t for p in problems for t in p.tensors]
    readers = [[u.node for u in t.uses if u.node is not None] for t in tensors]
    assert sum(len(set(r)) >= 4 for r in readers) > 50
    assert sum(len(set(r)) < len(r) for r in readers) > 50
    assert sum(t.producer is None for t in tensors) > 50
    assert sum(not brute_force(p) for p in problems) in range(20, 150)
    assert max(len(p.nodes) for p in problems) == 7


@pytest.mark.parametrize("name", SOLVERS)
@settings(deadline=None, max_examples=100)
@given(problem=layout_problems())
def test_optimum_of_drawn_graphs(name: str, problem: LayoutProblem) -> None:
    check_against_brute_force(problem, SOLVERS[name])


def test_sharing_a_transform_decides() -> None:
    """Counted per edge, the producer had better change (3 < 2 + 2); counted once, it had better not (3 > 2)."""
    nodes = (Node("p", (0.0, 3.0)), Node("a", (0.0,)), Node("b", (0.0,)))
    tensor = Tensor("x", 0, (0, 1), (Use(1, (1,)), Use(2, (1,))), ((0, 2), (2, 0)))
    solution = solve(LayoutProblem(nodes, (tensor,)))
    assert solution.assignment == (0, 0, 0)
    assert solution.cost == 2.0


@pytest.mark.parametrize("name", SOLVERS)
def test_a_node_with_many_independent_ports(name: str) -> None:
    """The joint table over the node's ports would have 4**7 cells for 30 candidates."""
    rng = np.random.default_rng(3)
    square = 10 * rng.random((4, 4))
    np.fill_diagonal(square, 0)
    nodes = [Node("hub", tuple(rng.random(30)))]
    tensors = []
    for t in range(7):
        made = tuple(int(v) for v in rng.integers(4, size=30))
        nodes.append(Node(f"leaf{t}", tuple(3 * rng.random(2))))
        tensors.append(Tensor(f"x{t}", 0, made, (Use(t + 1, tuple(rng.permutation(4)[:2].tolist())),), square))
    check_against_brute_force(LayoutProblem(tuple(nodes), tuple(tensors)), SOLVERS[name])


@pytest.mark.parametrize("name", SOLVERS)
def test_negative_kernel_costs(name: str) -> None:
    """A correction may push a predicted time below 0; the optimum is still the optimum."""
    nodes = (Node("p", (-5.0, -1.0)), Node("c", (-2.0, -7.0)))
    problem = LayoutProblem(nodes, (Tensor("x", 0, (0, 1), (Use(1, (0, 1)),), ((0, 6), (6, 0))),))
    check_against_brute_force(problem, SOLVERS[name])


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_the_unit_does_not_matter(scale: float) -> None:
    problem = random_problem(7, p_inf=0.0)
    nodes = tuple(Node(n.name, tuple(c * scale for c in n.costs)) for n in problem.nodes)
    tensors = tuple(Tensor(t.name, t.producer, t.made, t.uses, t.matrix * scale) for t in problem.tensors)
    scaled = LayoutProblem(nodes, tensors)
    best = brute_force(problem)[0][0] * scale
    for solver in SOLVERS.values():
        assert scaled.evaluate(solver(scaled)).total == pytest.approx(best, rel=1e-9)


def test_one_absurd_cost_does_not_hide_the_others() -> None:
    """Integer solvers work to absolute tolerances; a candidate of 1e12 must not blur differences of 1e-3."""
    for seed in range(30):
        problem = random_problem(seed, p_inf=0.0)
        nodes = tuple(Node(n.name, (*(1e-3 * c for c in n.costs), 1e12)) for n in problem.nodes)
        tensors = tuple(
            Tensor(
                t.name,
                t.producer,
                t.made if t.producer is None else (*t.made, 0),
                tuple(u if u.node is None else Use(u.node, (*u.wanted, 0)) for u in t.uses),
                np.minimum(1e-3 * t.matrix, 1e10),
            )
            for t in problem.tensors
        )
        check_against_brute_force(LayoutProblem(nodes, tensors), by_milp)
        check_against_brute_force(LayoutProblem(nodes, tensors), by_solve_with_milp)


@pytest.mark.parametrize(
    "problem",
    [
        resnet50(0, 4),
        resnet50(1, 5, split_blocks=True),
        resnet50(2, 6, alike=False),
        densenet(0, 3, blocks=(5, 5)),
        densenet(1, 4, blocks=(4, 4), split_blocks=True),
        densenet(2, 3, blocks=(5,), alike=False),
        chain(0, 4, length=300),
        chain(1, 3, length=200, alike=False),
    ],
    ids=lambda p: f"{len(p.nodes)} nodes",
)
def test_elimination_and_milp_agree_on_large_graphs(problem: LayoutProblem) -> None:
    assert problem.evaluate(by_elimination(problem)).total == pytest.approx(
        problem.evaluate(by_milp(problem)).total, rel=1e-7
    )


@pytest.mark.parametrize(
    ("problem", "method"),
    [
        (resnet50(0, 10), "elimination"),
        (resnet50(0, 5, split_blocks=True), "elimination"),
        (densenet(0, 5), "milp"),
        (chain(0, 8), "elimination"),
        (chain(0, 4, split_blocks=True), "elimination"),
    ],
    ids=["resnet50", "resnet50 split blocks", "densenet121", "chain", "chain split blocks"],
)
def test_real_structures_are_proven(problem: LayoutProblem, method: str) -> None:
    solution = solve(problem, time_limit_s=120)
    assert solution.proven
    assert solution.method == method
    assert solve(problem, time_limit_s=120) == solution


def test_independent_parts_are_solved_apart() -> None:
    """Two nets side by side: only the wide one goes to HiGHS."""
    small, wide = resnet50(0, 3), densenet(0, 3, blocks=(14,))
    offset = len(small.nodes)
    moved = tuple(
        Tensor(
            t.name,
            None if t.producer is None else t.producer + offset,
            t.made,
            tuple(Use(None if u.node is None else u.node + offset, u.wanted) for u in t.uses),
            t.cost,
        )
        for t in wide.tensors
    )
    both = solve(LayoutProblem(small.nodes + wide.nodes, small.tensors + moved), max_cells=3000)
    assert both.method == "elimination+milp"
    assert both.proven
    assert both.cost == pytest.approx(solve(small).cost + solve(wide).cost, rel=1e-7)


def test_out_of_time_there_is_an_answer_with_a_bound() -> None:
    problem = densenet(0, 4)
    rushed, exact = solve(problem, time_limit_s=0.0), solve(problem)
    assert not rushed.proven
    assert rushed.lower_bound <= exact.cost * (1 + 1e-6)
    assert exact.cost <= rushed.cost * (1 + 1e-9)
    assert 0 < rushed.gap < 1


def test_equal_choices_take_the_lowest_index() -> None:
    nodes = tuple(Node(f"n{i}", (1.0, 1.0, 1.0)) for i in range(3))
    tensors = tuple(Tensor(f"t{i}", i, (0, 1, 2), (Use(i + 1, (0, 1, 2)),), 1.0 - np.eye(3)) for i in range(2))
    assert solve(LayoutProblem(nodes, tensors)).assignment == (0, 0, 0)


def test_pins_and_uniform_baselines() -> None:
    problem = resnet50(0, 4)
    best = solve(problem)
    uniform = [solve(restricted(problem, {i: [k] for i in range(len(problem.nodes))})).cost for k in range(4)]
    assert best.cost <= min(uniform)
    pinned = solve(restricted(problem, {3: [2], 5: [0]}))
    assert (pinned.assignment[3], pinned.assignment[5]) == (2, 0)
    assert pinned.cost >= best.cost


def test_nothing_to_choose() -> None:
    empty = solve(LayoutProblem((), ()))
    assert (empty.assignment, empty.cost, empty.proven, empty.method) == ((), 0.0, True, "trivial")
    single = solve(LayoutProblem((Node("a", (3.0,)),), (Tensor("x", 0, (0,), (Use(None, (1,)),), ((0, 2), (2, 0))),)))
    assert (single.assignment, single.cost, single.method) == ((0,), 5.0, "trivial")


def test_infeasible_problems_say_why() -> None:
    with pytest.raises(NoAssignmentError, match=r"node 1 \(conv\)"):
        solve(LayoutProblem((Node("a", (1.0,)), Node("conv", (math.inf, math.inf))), ()))
    never = ((0, math.inf), (math.inf, 0))
    with pytest.raises(NoAssignmentError, match="fixed layouts"):
        solve(LayoutProblem((), (Tensor("x", None, (0,), (Use(None, (1,)),), never),)))
    two = LayoutProblem(
        (Node("a", (1.0, 1.0)), Node("b", (1.0, 1.0))),
        (Tensor("x", 0, (0, 0), (Use(1, (1, 1)),), never), Tensor("y", 0, (0, 1), (Use(1, (0, 1)),), never)),
    )
    with pytest.raises(NoAssignmentError, match="no assignment has a finite cost"):
        solve(two)
