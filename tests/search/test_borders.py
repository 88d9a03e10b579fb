"""Inputs and outputs whose layout the solver chooses: what it finds is the best of all there is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest
import tvm
from tvm import relax

from layoutsearch.layout.border import Border
from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.candidates import enumerate_candidates
from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.layout.io_layouts import BorderRules, IoLayouts
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.rules import transforms_of
from layoutsearch.layout.space import parse_space
from layoutsearch.layout.transform import TransformKey
from layoutsearch.model import canonicalize
from layoutsearch.search.batch import BatchSolver
from layoutsearch.search.parameters import AssignmentSpace
from layoutsearch.search.skeleton import Skeleton, build_skeleton, uniform_solution
from layoutsearch.search.solve import solve
from layoutsearch.search.workloads import KernelNode, kernel_nodes
from tests.models import nets

op = relax.op
SPACE = """
[target]
match = { kind = "llvm" }
blocks = [4, 8]

[[rule]]
name = "all"
match = {}
layouts = ["NCHW", "NHWC", "NCHW8c"]
"""


def shared_image() -> tvm.IRModule:
    """Three kernels read the input, and it is returned as well."""

    def body(n: nets.Net, x: relax.Expr) -> relax.Expr:
        pooled = n.emit(op.nn.max_pool2d(x, pool_size=3, strides=1, padding=1))
        return relax.Tuple([n.conv(x, 16, 1), n.emit(op.concat([pooled, n.conv(x, 16, 3)], axis=1)), x])

    return nets.build((1, 8, 5, 7), body=body)


def two_inputs() -> tvm.IRModule:
    """Each is read once, by a kernel of its own."""
    return nets.build(
        (1, 8, 5, 7), (1, 16, 5, 7), body=lambda n, x, y: n.emit(op.add(n.conv(x, 24, 1), n.conv(y, 24, 3)))
    )


def chain() -> tvm.IRModule:
    """One input, one output, and a tensor in between that is an output too."""

    def body(n: nets.Net, x: relax.Expr) -> relax.Expr:
        middle = n.conv_relu(x, 16)
        return relax.Tuple([n.conv(middle, 24, 1), middle])

    return nets.build((1, 8, 5, 7), body=body)


def ends_in_a_view() -> tvm.IRModule:
    """The output has its channels last."""

    def body(n: nets.Net, x: relax.Expr) -> relax.Expr:
        return n.emit(op.permute_dims(n.conv(n.emit(op.permute_dims(x, [0, 3, 1, 2])), 16), [0, 2, 3, 1]))

    return nets.build((1, 5, 7, 8), body=body)


class Problem:
    """A model with random costs of kernels and of layout changes, the latter not the same both ways."""

    def __init__(self, module: tvm.IRModule, words: list[str], seed: int) -> None:
        canonical = canonicalize(module)
        self.graph: LayoutGraph = build_graph(canonical)
        names = [t.name for t in self.graph.inputs], [f"out{i}" for i in range(len(self.graph.outputs))]
        self.rules: BorderRules = IoLayouts.parse(words).rules(self.graph, *names)
        self.nodes: tuple[KernelNode, ...] = kernel_nodes(
            canonical, self.graph, enumerate_candidates(self.graph, parse_space(SPACE, "test"))
        )
        self.skeleton: Skeleton = build_skeleton(self.graph, self.nodes, self.rules)
        rng = random.Random(seed)
        self.kernel_us = {(n.workload.key, c): rng.uniform(1, 30) for n in self.nodes for c in n.choices}
        self._rng, self._moves = rng, dict[TransformKey, float]()

    def move_us(self, key: TransformKey) -> float:
        # By what it is about, not by when it was asked for.
        draw = random.Random(f"{key.workload} {key.candidate}")
        return self._moves.setdefault(key, draw.uniform(1, 20))

    def cost(self, assignment: Mapping[str, Candidate], border: Border) -> float:
        """From the model itself: kernels, and the transforms that a conversion would make."""
        kernels = sum(
            self.kernel_us[n.workload.key, assignment[n.root] if n.choices != (None,) else None] for n in self.nodes
        )
        moves = transforms_of(self.graph, assignment, border)
        return kernels + sum(self.move_us(TransformKey.of(self.graph.tensors[t], a, b)) for t, a, b in moves)

    def borders(self) -> Iterator[Border]:
        """Every border that the rules allow, in layouts that anything in the model has."""
        layouts = [Layout(name) for name in ("NCHW", "NHWC", "NCHW8c")]
        inputs = [
            layouts if t.name in self.rules.free_inputs else [self.rules.fixed.of_input(t)] for t in self.graph.inputs
        ]
        outputs = [
            layouts if i in self.rules.free_outputs else [self.rules.fixed.of_output(i, o)]
            for i, o in enumerate(self.graph.outputs)
        ]
        for chosen in itertools.product(*inputs, *outputs):
            given = dict(zip((t.name for t in self.graph.inputs), chosen, strict=False))
            yield Border(given, dict(enumerate(chosen[len(inputs) :])))  # type: ignore[arg-type]

    def best(self) -> float:
        """By trying everything."""
        borders = list(self.borders())
        found = float("inf")
        for picked in itertools.product(*(n.choices for n in self.nodes)):
            assignment: dict[str, Candidate] = {}
            for node, choice in zip(self.nodes, picked, strict=True):
                assignment.update(node.assignment(choice))
            found = min(found, min(self.cost(assignment, border) for border in borders))
        return found

    def problem(self):  # type: ignore[no-untyped-def]
        return self.skeleton.problem(lambda w, c: self.kernel_us[w.key, c], self.move_us)


CASES: list[tuple[Callable[[], tvm.IRModule], list[str]]] = [
    (shared_image, ["free"]),
    (shared_image, ["x=free", "out2=NHWC"]),
    (shared_image, ["free", "out1=NCHW8c"]),
    (two_inputs, ["free", "x1=NHWC"]),
    (chain, ["free"]),
    (chain, ["x=NHWC", "out0=free"]),
    (chain, ["x=NCHW8c", "out1=NHWC"]),
    (chain, []),
    (ends_in_a_view, ["free"]),
    (ends_in_a_view, ["out0=NCHW"]),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("number", range(len(CASES)))
def test_what_is_found_is_the_best_of_all(number: int, seed: int) -> None:
    make, words = CASES[number]
    case = Problem(make(), words, seed)
    found = solve(case.problem())
    assignment = case.skeleton.choices(found.assignment)
    border = case.rules.border(case.graph, assignment, case.skeleton.chosen_inputs(found.assignment))
    # The solver's cost, the cost of what it stands for, and the best there is are one.
    assert case.cost(assignment, border) == pytest.approx(found.cost)
    assert found.cost == pytest.approx(case.best())
    assert case.rules.admits(case.graph, border)
    paid = case.skeleton.transforms(found.assignment)
    needed = transforms_of(case.graph, assignment, border)
    assert sorted(map(str, paid)) == sorted(str(TransformKey.of(case.graph.tensors[t], a, b)) for t, a, b in needed)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_many_costs_at_once(number: int) -> None:
    make, words = CASES[number]
    case = Problem(make(), words, 0)
    batch = BatchSolver(case.skeleton)
    rng = np.random.default_rng(number)
    kernels = rng.uniform(1, 30, size=(8, len(batch.index.pairs)))
    moves = rng.uniform(1, 20, size=(8, len(batch.index.transforms)))
    solutions, costs = batch.solve(kernels, moves)
    pairs = {(w.key, c): k for k, (w, c) in enumerate(batch.index.pairs)}
    for row, (solution, cost) in enumerate(zip(solutions, costs, strict=True)):
        problem = case.skeleton.problem(
            lambda w, c, row=row: kernels[row, pairs[w.key, c]],
            lambda key, row=row: moves[row, batch.index.transform[key]],
        )
        assert problem.evaluate(solution).total == pytest.approx(cost)
        assert solve(problem).cost == pytest.approx(cost)
        assert batch.index.cost(solution, kernels[row], moves[row]) == pytest.approx(cost)


def test_an_input_that_several_kernels_read_is_a_choice_of_its_own() -> None:
    case = Problem(shared_image(), ["free"], 0)
    (given,) = case.skeleton.inputs
    assert given.name == "x"
    assert set(map(str, given.layouts)) == {"NCHW", "NHWC", "NCHW8c"}
    space = AssignmentSpace.of(case.skeleton)
    assert (space.parameters[-1].name, space.size) == ("input x", len(case.nodes) + 1)
    solution = solve(case.problem()).assignment
    assert space.solution(space.params(solution)) == solution
    assert Problem(chain(), ["free"], 0).skeleton.inputs == ()


def test_uniform_assignments_get_their_best_border() -> None:
    case = Problem(shared_image(), ["free"], 1)
    problem = case.problem()
    for name in ("NCHW", "NHWC", "NCHW8c"):
        solution = uniform_solution(case.nodes, problem, Layout(name))
        assert solution is not None
        assignment = case.skeleton.choices(solution)
        best = min(case.cost(assignment, border) for border in case.borders())
        assert problem.evaluate(solution).total == pytest.approx(best)
        border = case.rules.border(case.graph, assignment, case.skeleton.chosen_inputs(solution))
        assert case.cost(assignment, border) == pytest.approx(best)
        # All kernels in one layout: nothing has to be changed anywhere.
        assert transforms_of(case.graph, assignment, border) == []
