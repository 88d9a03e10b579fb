from __future__ import annotations

import math

import pytest
from hypothesis import given, settings

from layoutsearch.search.problem import LayoutProblem, Node, Tensor, Transform, Use, restricted
from tests.search.layout_problems import brute_force, layout_problems

T2 = ((0.0, 3.0), (5.0, 0.0))


def diamond() -> LayoutProblem:
    """n0 is read by n1, by n2 and by the output; n2 reads it twice."""
    nodes = (Node("n0", (1.0, 2.0)), Node("n1", (10.0, 20.0)), Node("n2", (100.0, 200.0)))
    uses = (Use(1, (0, 1)), Use(2, (0, 1)), Use(2, (1, 1)), Use(None, (0,)))
    return LayoutProblem(nodes, (Tensor("x", 0, (0, 1), uses, T2),))


def test_a_transform_is_paid_once_however_many_want_it() -> None:
    found = diamond().evaluate((0, 1, 1))
    assert found.kernels == (1.0, 20.0, 200.0)
    assert found.transforms == (Transform(tensor=0, source=0, wanted=1, cost=3.0),)
    assert found.total == 224.0


def test_each_wanted_layout_is_paid_from_the_made_one() -> None:
    nodes = (Node("a", (0.0,)), Node("b", (0.0,)), Node("c", (0.0,)))
    cost = ((0, 1, 2), (4, 0, 8), (16, 32, 0))
    tensor = Tensor("x", 0, (1,), (Use(1, (0,)), Use(2, (2,)), Use(None, (1,))), cost)
    found = LayoutProblem(nodes, (tensor,)).evaluate((0, 0, 0))
    assert [(x.source, x.wanted, x.cost) for x in found.transforms] == [(1, 0, 4.0), (1, 2, 8.0)]


def test_fixed_producer_and_consumer() -> None:
    tensor = Tensor("input", None, (1,), (Use(None, (0,)),), T2)
    assert LayoutProblem((), (tensor,)).evaluate(()).total == 5.0


def test_infeasible_choices_cost_inf() -> None:
    problem = LayoutProblem((Node("a", (math.inf, 1.0)),), ())
    assert problem.evaluate((0,)).total == math.inf
    assert problem.evaluate((1,)).total == 1.0


@settings(deadline=None, max_examples=100)
@given(layout_problems())
def test_evaluate_agrees_with_the_definition(problem: LayoutProblem) -> None:
    for cost, assignment in brute_force(problem)[:50]:
        assert problem.evaluate(assignment).total == pytest.approx(cost, rel=1e-12, abs=1e-12)


def test_problems_are_values() -> None:
    assert diamond() == diamond()
    assert hash(diamond()) == hash(diamond())


@pytest.mark.parametrize(
    ("node", "tensor", "message"),
    [
        (Node("a", ()), None, "node 0 .a. has no candidate"),
        (Node("a", (math.nan,)), None, "NaN"),
        (Node("a", (-math.inf,)), None, "-inf"),
        (Node("a", (1.0,)), Tensor("x", 0, (0,), (), ((0, 1),)), "not square"),
        (Node("a", (1.0,)), Tensor("x", 0, (0,), (), ((1,),)), r"cost\[0\]\[0\] is 1.0"),
        (Node("a", (1.0,)), Tensor("x", 0, (0,), (), ((0, -1), (1, 0))), "row 0 .* negative"),
        (Node("a", (1.0,)), Tensor("x", 0, (0,), (), ((0, math.nan), (1, 0))), "row 0 .* NaN"),
        (Node("a", (1.0,)), Tensor("x", 1, (0,), (), T2), "there is no node 1"),
        (Node("a", (1.0,)), Tensor("x", 0, (0, 1), (), T2), "made has 2 entries, expected 1"),
        (Node("a", (1.0,)), Tensor("x", None, (0,), (Use(0, (0, 1)),), T2), "use 0 has 2 entries, expected 1"),
        (Node("a", (1.0,)), Tensor("x", None, (0,), (Use(0, (2,)),), T2), "names layout 2, the tensor has 2"),
        (Node("a", (1.0,)), Tensor("x", 0, (0,), (Use(0, (0,)),), T2), "reads the tensor it makes"),
    ],
)
def test_wrong_problems_are_refused(node: Node, tensor: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayoutProblem((node,), () if tensor is None else (tensor,))


def test_wrong_assignments_are_refused() -> None:
    with pytest.raises(ValueError, match="2 entries"):
        diamond().evaluate((0, 0))
    with pytest.raises(ValueError, match="no candidate 2"):
        diamond().evaluate((0, 0, 2))


def test_restricted_keeps_indices() -> None:
    pinned = restricted(diamond(), {1: [1], 2: {0, 1}})
    assert pinned.evaluate((0, 1, 0)) == diamond().evaluate((0, 1, 0))
    assert pinned.evaluate((0, 0, 0)).total == math.inf
    with pytest.raises(ValueError, match="no node 9"):
        restricted(diamond(), {9: [0]})
    with pytest.raises(ValueError, match="no candidate 7"):
        restricted(diamond(), {1: [0, 7]})
