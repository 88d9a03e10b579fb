"""Many costs of one structure at once, against the solver that takes one problem at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.graph import TensorInfo
from layoutsearch.search import batch
from layoutsearch.search.batch import BatchSolver
from layoutsearch.search.problem import LayoutProblem, NoAssignmentError, Use
from layoutsearch.search.skeleton import Skeleton, SkeletonTensor
from layoutsearch.search.solve import solve
from tests.search.synthetic import LAYOUTS, _node, residual_skeleton

DRAWS = 5


def random_skeleton(seed: int) -> Skeleton:
    """Random wiring: fixed inputs and outputs, repeated operands, workloads that occur several times, some of them with
    fewer candidates than others."""
    rng = np.random.default_rng(seed)
    nodes = []
    for _ in range(int(rng.integers(1, 7))):
        number, size = int(rng.integers(0, 4)), 4
        choices = tuple(
            Candidate(LAYOUTS[a], None, LAYOUTS[b])
            for a, b in np.random.default_rng(number).integers(0, 4, (1 + number, 2))
        )
        kept = tuple(c for c in choices if rng.random() < 0.7) or choices[-1:]
        nodes.append(_node("conv2d", number, size, kept if number else (None,)))
    tensors = []
    for i in range(-1, len(nodes)):

        def table(node: int | None) -> tuple[int, ...]:
            return tuple(int(v) for v in rng.integers(4, size=1 if node is None else len(nodes[node].choices)))

        later = list(range(i + 1, len(nodes)))
        readers: list[int | None] = [int(r) for r in rng.choice(later, size=rng.integers(0, 5))] if later else []
        readers += [None] * int(rng.integers(0, 2))
        producer = i if i >= 0 else None
        uses = tuple(Use(reader, table(reader)) for reader in readers)
        info = TensorInfo(f"t{i}", (1, 8, 4, int(rng.integers(1, 4))), "float32", "NCHW")
        tensors.append(SkeletonTensor(info, LAYOUTS, producer, table(producer), uses))
    return Skeleton(tuple(nodes), tuple(tensors))


def costs_of(solver: BatchSolver, seed: int, p_inf: float) -> tuple[np.ndarray, np.ndarray]:
    rng, index = np.random.default_rng(seed), solver.index
    kernels = rng.uniform(0, 10, (DRAWS, len(index.pairs)))
    transforms = rng.uniform(0, 8, (DRAWS, len(index.transforms)))
    kernels[rng.random(kernels.shape) < p_inf] = math.inf
    transforms[rng.random(transforms.shape) < p_inf] = math.inf
    return kernels, transforms


def problem_of(solver: BatchSolver, skeleton: Skeleton, kernels: np.ndarray, transforms: np.ndarray) -> LayoutProblem:
    entry = {(workload.key, choice): k for k, (workload, choice) in enumerate(solver.index.pairs)}
    return skeleton.problem(
        lambda w, c: float(kernels[entry[w.key, c]]), lambda key: float(transforms[solver.index.transform[key]])
    )


def check(skeleton: Skeleton, seed: int, p_inf: float) -> None:
    solver = BatchSolver(skeleton)
    kernels, transforms = costs_of(solver, seed, p_inf)
    problems = [problem_of(solver, skeleton, *row) for row in zip(kernels, transforms, strict=True)]
    expected = []
    for problem in problems:
        try:
            expected.append(solve(problem).cost)
        except NoAssignmentError:
            expected.append(math.inf)
    if not np.isfinite(expected).all():
        with pytest.raises(NoAssignmentError):
            solver.solve(kernels, transforms)
        return
    solutions, costs = solver.solve(kernels, transforms)
    np.testing.assert_allclose(costs, expected)
    for draw, (solution, problem) in enumerate(zip(solutions, problems, strict=True)):
        true = problem.evaluate([int(a) for a in solution]).total
        assert true == pytest.approx(expected[draw])
        assert solver.index.cost(solution, kernels[draw], transforms[draw]) == pytest.approx(true)
    uses, pays = solver.index.uses(solutions), solver.index.pays(solutions)
    paid = [
        np.where(count > 0, count * np.where(count > 0, us, 0.0), 0.0).sum(axis=1)
        for count, us in ((uses, kernels), (pays, transforms))
    ]
    np.testing.assert_allclose(paid[0] + paid[1], costs)


@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.05, 0.3]))
@settings(max_examples=60, deadline=None)
def test_random_wiring(seed: int, p_inf: float) -> None:
    check(random_skeleton(seed), seed, p_inf)


@pytest.mark.parametrize("tensor_cells", [20_000, 1])
def test_residual_network(monkeypatch: pytest.MonkeyPatch, tensor_cells: int) -> None:
    monkeypatch.setattr(batch, "_TENSOR_CELLS", tensor_cells)
    check(residual_skeleton(1), 1, 0.02)


def test_one_by_one_where_it_is_too_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_MAX_CELLS", 4)
    assert BatchSolver(residual_skeleton(2)).width is None
    check(residual_skeleton(2), 2, 0.02)


def test_instances_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_TOGETHER", 1)
    check(residual_skeleton(3), 3, 0.0)


def test_nothing_to_choose() -> None:
    solutions, costs = BatchSolver(Skeleton((), ())).solve(np.zeros((3, 0)), np.zeros((3, 0)))
    assert solutions.shape == (3, 0)
    np.testing.assert_array_equal(costs, 0.0)
