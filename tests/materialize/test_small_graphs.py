"""Graphs that layouts stumble over: every candidate of every operator achieved as requested, outputs right.

Each assignment is checked in NumPy; one of them for each graph, and the uniform ones of some, are built by TVM as well.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from tvm import relax

from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.candidates import nearest
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.rules import initial_assignment
from layoutsearch.materialize.convert import materialize
from tests.materialize.cases import Case, assert_outputs, check, check_built, moves_in
from tests.models import nets
from tests.models.interpreter import interpret


@pytest.mark.parametrize("name", sorted(nets.ALL))
def test_every_candidate(name: str) -> None:
    case = Case.of(nets.ALL[name]())
    for assignment in case.covering():
        result = check(case, assignment)
    check_built(case, result)


@pytest.mark.parametrize("name", sorted(nets.ALL))
def test_original_layouts_need_no_transform(name: str) -> None:
    """But for what the transposes of a model of transposes did."""
    case = Case.of(nets.ALL[name]())
    result = check(case, initial_assignment(case.graph))
    assert bool(result.transforms) == bool(case.graph.views)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW8c"])
@pytest.mark.parametrize("name", ["mixed", "residual", "transposed", "wrapped_in_transposes", "classifier", "grouped"])
def test_uniform_layouts_built(name: str, layout: str) -> None:
    case = Case.of(nets.ALL[name]())
    assignment = {n: nearest(s.candidates, Layout(layout)) for n, s in case.spaces.items()}
    check_built(case, check(case, assignment))


def uniform(case: Case, layout: str) -> dict[str, Candidate]:
    return {n: nearest(s.candidates, Layout(layout)) for n, s in case.spaces.items()}


def test_residual_net_in_one_blocked_layout_is_moved_at_its_ends_only() -> None:
    case = Case.of(nets.residual())
    result = check(case, uniform(case, "NCHW16c"))
    ends = [(t.tensor, str(t.source), str(t.target)) for t in result.transforms]
    last = case.graph.outputs[0].tensor
    assert ends == [("x", "NCHW", "NCHW16c"), (last, "NCHW16c", "NCHW")]
    assert result.transforms[0].bytes == 16 * 10 * 14 * 4


def test_blocks_of_two_sizes_meet_without_a_transform() -> None:
    """A producer with blocks of 8 before a consumer that reads 8 and writes 16."""
    case = Case.of(nets.stem())
    first, second = (op.name for op in case.graph.anchors)
    assignment = {n: Candidate.uniform(Layout("NCHW8c")) for n in case.spaces}
    assignment[first] = Candidate.of("NCHW3c", "OIHW3i8o", "NCHW8c")
    assignment[second] = Candidate.of("NCHW8c", "OIHW8i8o", "NCHW8c")
    assert len(check(case, assignment).transforms) == 2
    case = Case.of(nets.conv_pool_conv())
    names = [op.name for op in case.graph.anchors]
    assignment = {n: Candidate.uniform(Layout("NCHW8c")) for n in case.spaces}
    assignment[names[0]] = Candidate.of("NCHW", "OIHW8o", "NCHW8c")
    assignment[names[2]] = Candidate.of("NCHW8c", "OIHW8i8o", "NCHW8c")
    assert [str(t.target) for t in check(case, assignment).transforms] == ["NCHW"]


def test_a_transform_is_shared_by_all_that_want_it() -> None:
    """The ancestor of a diamond is read in NCHW8c by two convolutions and in NCHW4c by a third reader."""
    case = Case.of(nets.diamond())
    assignment = initial_assignment(case.graph)
    top = "relu_0"
    readers = [op for op, _ in case.graph.consumers[top]]
    assert len(readers) == 3
    for op in readers[:2]:
        assignment[op.name] = Candidate.of("NCHW8c", "OIHW8i", "NCHW")
    (joined,) = [op for op in readers if op.op == "relax.concat"]
    assignment[joined.name] = Candidate.uniform(Layout("NCHW4c"))
    result = check(case, assignment)
    assert [(str(t.source), str(t.target)) for t in result.transforms if t.tensor == top] == [
        ("NCHW", "NCHW8c"),
        ("NCHW", "NCHW4c"),
    ]


@pytest.mark.parametrize(
    "choice", ["NHWC,HWIO,NHWC", "NCHW16c,IOHW16i16o,NCHW16c", "NCHW16c,IOHW16i,NCHW", "NCHW,IOHW16o,NCHW16c"]
)
def test_transposed_convolution_with_output_padding_built(choice: str) -> None:
    """Stride 2, 16 channels to 32, 7x9 pixels."""
    case = Case.of(nets.transposed())
    (conv,) = case.graph.anchors
    candidate = Candidate.parse(choice)
    assignment = {n: Candidate.uniform(candidate.out) for n in case.spaces} | {conv.name: candidate}
    check_built(case, check(case, assignment))


def test_weights_are_transformed_at_compile_time() -> None:
    """The converted module holds the kernels as they are read, and no move of a constant."""
    case = Case.of(nets.stem())
    assignment = uniform(case, "NCHW8c")
    result = check(case, assignment)
    kernels = [
        b.value.args[1].value.numpy()
        for block in result.module["main"].body.blocks
        for b in block.bindings
        if isinstance(b.value, relax.Call) and b.value.op.name == "relax.nn.conv2d"
    ]
    assert [k.shape for k in kernels] == [(2, 1, 3, 3, 3, 8), (3, 2, 3, 3, 8, 8)]
    assert all(not isinstance(m.args[0], type(relax.const(0))) for m in moves_in(result.module, case.graph))


def test_inputs_and_outputs_keep_their_layouts() -> None:
    case = Case.of(nets.mixed())
    result = check(case, uniform(case, "NHWC"))
    before, after = case.module["main"], result.module["main"]
    assert [p.name for p in after.params] == [p.name for p in before.params]
    assert [tuple(p.ty.shape.values) for p in after.params] == [tuple(p.ty.shape.values) for p in before.params]
    assert tuple(after.ret_ty.shape.values) == tuple(before.ret_ty.shape.values)


def test_the_canonical_module_is_left_as_it_is() -> None:
    case = Case.of(nets.residual())
    before = case.module.script(show_meta=True)
    materialize(case.module, case.graph, case.random(random.Random(0)))
    assert case.module.script(show_meta=True) == before


def test_converting_twice_gives_the_same_module() -> None:
    case = Case.of(nets.mixed())
    assignment = case.random(random.Random(5))
    one, other = (materialize(case.module, case.graph, assignment) for _ in range(2))
    assert one.transforms == other.transforms
    assert one.module.script(show_meta=True) == other.module.script(show_meta=True)


def test_a_reference_that_can_fail() -> None:
    """The checks see a wrong element: a kernel transposed by hand."""
    case = Case.of(nets.stem())
    result = check(case, uniform(case, "NHWC"))
    swapped = [np.ascontiguousarray(case.inputs[0][:, ::-1])]
    with pytest.raises(AssertionError):
        assert_outputs(interpret(result.module, swapped), case.wanted)
