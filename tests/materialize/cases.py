"""A canonical module with its graph, candidates and wanted outputs, and the check of one assignment against them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from layoutsearch.layout import kinds
from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.candidates import OpSpace, enumerate_candidates
from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.layout.rules import transforms_of
from layoutsearch.layout.space import SearchSpace, parse_space
from layoutsearch.materialize.convert import Materialized, materialize
from layoutsearch.materialize.lower import lower
from layoutsearch.materialize.verify import find_mismatches
from layoutsearch.model import canonicalize
from tests.models.inputs import tensor
from tests.models.interpreter import interpret
from tests.models.running import range_error

EVERYTHING = """
[target]
match = { kind = "llvm" }
blocks = [4, 8, 16]

[[rule]]
name = "few_channels"
match = { op = "nn.conv2d", in_channels = { max = 4 } }
layouts = ["NCHW", "NHWC", "NCHW->NHWC", "NCHW->NCHW{o}c", "NHWC->NCHW{o}c", "NCHW{i}c->NCHW{o}c"]

[[rule]]
name = "winograd"
match = { op = "nn.conv2d", kernel = [3, 3], stride = [1, 1], dilation = [1, 1], grouped = false }
layouts = ["NCHW", "NHWC", "NCHW->NCHW{o}c", "NCHW{i}c->NHWC", "NCHW{i}c->NCHW{o}c", "NHWC@winograd2",
           "NHWC:OHWI4o@winograd4", "NCHW{i}c->NCHW{o}c:HWOI4i8o@winograd2", "NCHW{i}c->NHWC@winograd4",
           "NHWC->NCHW{o}c@winograd4"]

[[rule]]
name = "convolutions"
match = { op = "nn.conv2d" }
layouts = ["NCHW", "NHWC", "NHWC->NCHW", "NCHW->NCHW{o}c", "NCHW{i}c->NCHW", "NCHW{i}c->NHWC", "NCHW{i}c->NCHW{o}c",
           "NHWC:OHWI8o"]

[[rule]]
name = "transposed"
match = { op = "nn.conv2d_transpose" }
layouts = ["NCHW", "NHWC", "NCHW{i}c->NCHW{o}c", "NCHW{i}c->NCHW", "NCHW->NCHW{o}c"]

[[rule]]
name = "rest"
match = {}
layouts = ["NCHW", "NHWC", "NCHW{b}c"]
"""
ERROR = 5e-5
"""Of the output's range; convolutions add in another order than the reference, and Winograd's lose a digit."""


TARGET = tvm.target.Target({"kind": "llvm", "opt-level": 0})
"""Unoptimised code: small models are built far faster, and it computes the same."""


def run_built(module: tvm.IRModule, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Outputs (flattened) of `main`, lowered by us and built by plain TVM."""
    executable = tvm.compile(lower(module, TARGET).module, TARGET)
    result = relax.VirtualMachine(executable, tvm.cpu())["main"](*(tvm.runtime.tensor(x) for x in inputs))
    return [tensor.numpy() for tensor in flattened(result)]


def flattened(result: Any) -> list[Any]:
    return [result] if isinstance(result, tvm.runtime.Tensor) else [t for field in result for t in flattened(field)]


def wide_space() -> SearchSpace:
    """Blocks 4, 8 and 16 and every mixture of layouts on the two sides of a convolution."""
    return parse_space(EVERYTHING, "everything.toml")


@dataclass(frozen=True)
class Case:
    """One model, ready to be put into assignments."""

    module: tvm.IRModule
    graph: LayoutGraph
    spaces: dict[str, OpSpace]

    @classmethod
    def of(cls, module: tvm.IRModule, space: SearchSpace | None = None) -> Case:
        canonical = canonicalize(module)
        graph = build_graph(canonical)
        return cls(canonical, graph, enumerate_candidates(graph, space or wide_space()))

    @cached_property
    def inputs(self) -> list[np.ndarray]:
        return [tensor(t.shape or (), t.dtype, seed) for seed, t in enumerate(self.graph.inputs)]

    @cached_property
    def wanted(self) -> list[np.ndarray]:
        return interpret(self.module, self.inputs)

    @cached_property
    def built(self) -> list[np.ndarray]:
        """Outputs of the canonical module built by plain TVM, with our legalisation where its own refuses."""
        return run_built(self.module, self.inputs)

    def random(self, rng: random.Random) -> dict[str, Candidate]:
        return {name: rng.choice(space.candidates) for name, space in self.spaces.items()}

    def covering(self, seed: int = 0) -> Iterator[dict[str, Candidate]]:
        """Assignments in which every candidate of every operator occurs."""
        rng = random.Random(seed)
        orders = {n: rng.sample(s.candidates, len(s.candidates)) for n, s in self.spaces.items()}
        for i in range(max((len(o) for o in orders.values()), default=1)):
            yield {name: order[i % len(order)] for name, order in orders.items()}


def moves_in(module: tvm.IRModule, graph: LayoutGraph) -> list[relax.Call]:
    """Layout changes in a converted module that are no operators of the model."""
    frozen = {op.name for op in graph.ops if op.op in (kinds.PERMUTE, kinds.TRANSFORM)}
    return [
        b.value
        for block in module["main"].body.blocks
        for b in block.bindings
        if isinstance(b.value, relax.Call)
        and b.value.op.name in (kinds.PERMUTE, kinds.TRANSFORM)
        and b.var.name not in frozen
    ]


def assert_moves(module: tvm.IRModule, graph: LayoutGraph, count: int) -> None:
    """Exactly `count` transforms; none of a constant, none of another's result, no two alike."""
    moves = moves_in(module, graph)
    assert len(moves) == count
    moved = [move.args[0] for move in moves]
    assert not any(isinstance(x, tvm.ir.GenericConst) for x in moved)
    results = {
        b.var
        for block in module["main"].body.blocks
        for b in block.bindings
        if any(b.value.same_as(move) for move in moves)
    }
    assert not results.intersection(moved)
    for i, one in enumerate(moves):
        for other in moves[:i]:
            same = one.args[0].same_as(other.args[0]) and one.op.name == other.op.name
            assert not (same and tvm_ffi.structural_equal(one.attrs, other.attrs))


def check(case: Case, assignment: dict[str, Candidate]) -> Materialized:
    """Requested is achieved, the transforms are the ones the search counts, and the outputs are right."""
    result = materialize(case.module, case.graph, assignment)
    assert find_mismatches(result.module, case.graph, assignment) == []
    counted = transforms_of(case.graph, assignment)
    assert sorted((t.tensor, str(t.source), str(t.target)) for t in result.transforms) == sorted(
        (tensor, str(source), str(target)) for tensor, source, target in counted
    )
    assert_moves(result.module, case.graph, len(counted))
    assert_outputs(interpret(result.module, case.inputs), case.wanted)
    return result


def check_built(case: Case, result: Materialized) -> None:
    """The converted module, lowered and built by plain TVM, computes what the canonical one does."""
    outputs = run_built(result.module, case.inputs)
    assert_outputs(outputs, case.built)
    assert_outputs(outputs, case.wanted)


def assert_outputs(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    """Equal within rounding; of bool outputs one in a hundred may lie on the other side of a comparison."""
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if one.dtype == bool:
            assert 0 < np.mean(other) < 1
            assert np.mean(one != other) < 0.01
        else:
            # A single value has no range: relative then.
            scale = (float(np.abs(other).max()) if np.ptp(other) == 0 else 1.0) or 1.0
            assert range_error(one / scale, other / scale) < ERROR
