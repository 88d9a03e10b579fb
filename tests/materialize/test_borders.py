"""Modules whose inputs and outputs are in other layouts: right, and with as many transforms as are counted."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax

from layoutsearch.errors import MaterializeError
from layoutsearch.layout.border import Border
from layoutsearch.layout.candidates import nearest
from layoutsearch.layout.graph import TensorInfo
from layoutsearch.layout.io_layouts import IoLayouts
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.rules import transforms_of, why_not_stored
from layoutsearch.materialize.convert import materialize
from layoutsearch.materialize.moves import move_array
from layoutsearch.materialize.verify import verify_border
from tests.materialize.cases import Case, assert_moves, assert_outputs
from tests.models import nets, odd_nets
from tests.models.interpreter import interpret
from tests.models.random_nets import nets as random_nets

op = relax.op
LAYOUTS = ("NCHW", "NHWC", "NCHW4c", "NCHW8c", "NHWC4c", "NCWH")


def check(case: Case, assignment: dict, border: Border) -> None:  # type: ignore[type-arg]
    result = materialize(case.module, case.graph, assignment, border)
    counted = transforms_of(case.graph, assignment, border)
    assert sorted((t.tensor, str(t.source), str(t.target)) for t in result.transforms) == sorted(
        (tensor, str(source), str(target)) for tensor, source, target in counted
    )
    assert_moves(result.module, case.graph, len(counted))
    inputs = [
        move_array(array, Layout(t.axes), border.of_input(t) or Layout("A")) if t.axes else array
        for array, t in zip(case.inputs, case.graph.inputs, strict=True)
    ]
    got = [
        move_array(array, border.of_output(i, o) or Layout("A"), Layout(o.info.axes)) if o.info.axes else array
        for i, (array, o) in enumerate(zip(interpret(result.module, inputs), case.graph.outputs, strict=True))
    ]
    assert_outputs(got, case.wanted)


def fitting(info: TensorInfo) -> list[Layout]:
    """Layouts that a tensor of a model can be given or returned in."""
    if len(info.axes) != 4 or info.shape is None:
        return []
    return [lay for lay in map(Layout, LAYOUTS) if why_not_stored(lay, info) is None]


def drawn(case: Case, rng: random.Random) -> Border:
    inputs = {t.name: rng.choice(fitting(t)) for t in case.graph.inputs if fitting(t) and rng.random() < 0.8}
    outputs = {
        i: rng.choice(fitting(o.info))
        for i, o in enumerate(case.graph.outputs)
        if fitting(o.info) and rng.random() < 0.8
    }
    # A plan leaves out what is as the model has it.
    return Border(
        {t.name: inputs[t.name] for t in case.graph.inputs if inputs.get(t.name, t.initial) != t.initial},
        {i: lay for i, lay in outputs.items() if lay != case.graph.outputs[i].info.initial},
    )


@given(random_nets(), st.randoms(use_true_random=False))
def test_any_border_around_any_assignment(module: tvm.IRModule, rng: random.Random) -> None:
    case = Case.of(module)
    check(case, case.random(rng), drawn(case, rng))


@given(random_nets(), st.randoms(use_true_random=False))
def test_a_free_border_needs_no_more_transforms_than_any_other(module: tvm.IRModule, rng: random.Random) -> None:
    case = Case.of(module)
    assignment = case.random(rng)
    names = [t.name for t in case.graph.inputs], [f"out{i}" for i in range(len(case.graph.outputs))]
    free = IoLayouts.parse("free").rules(case.graph, *names)
    border = free.border(case.graph, assignment)
    for _ in range(4):
        other = transforms_of(case.graph, assignment, drawn(case, rng))
        assert len(transforms_of(case.graph, assignment, border)) <= len(other)
    check(case, assignment, border)


def returns_everything(n: nets.Net, x: relax.Expr, y: relax.Expr) -> relax.Expr:
    """Inputs as outputs, a constant, one tensor twice, a view of it, and its mean."""
    made = n.conv_relu(x, 16)
    last = n.emit(op.permute_dims(made, [0, 2, 3, 1]))
    mean = n.emit(op.mean(made, axis=[2, 3]))
    return relax.Tuple([made, x, last, made, mean, n.emit(op.add(made, y)), n.const((1, 8, 3, 5)), y])


@pytest.mark.parametrize("seed", range(12))
def test_outputs_that_are_inputs_constants_and_views(seed: int) -> None:
    case = Case.of(nets.build((1, 8, 5, 7), (1, 16, 5, 7), body=returns_everything))
    rng = random.Random(seed)
    check(case, case.random(rng), drawn(case, rng))


ODD = (
    "shuffle",
    "several_outputs",
    "nested_outputs",
    "input_as_output",
    "split_output",
    "shared_weight",
    "weight_inputs",
)
ODD += ("permuted_weight", "data_as_kernel", "channels_last", "transpose_as_data", "transposed_output", "attention")
ODD += ("transposed_input_output", "transposed_split", "flattened", "conv_of_constant", "single_pixel", "squeezed")
GRAPHS = [nets.mixed, nets.transposed, nets.wrapped_in_transposes, nets.classifier, nets.without_dataflow]
GRAPHS += [getattr(odd_nets, name) for name in ODD]


@pytest.mark.parametrize("make", GRAPHS, ids=lambda make: make.__name__)
def test_small_and_odd_graphs(make: Callable[[], tvm.IRModule]) -> None:
    case = Case.of(make())
    for seed in range(4):
        rng = random.Random(seed)
        check(case, case.random(rng), drawn(case, rng))


def test_nothing_is_moved_at_a_border_that_is_as_the_kernels_are() -> None:
    case = Case.of(nets.conv_pool_conv())
    nhwc = {n: nearest(s.candidates, Layout("NHWC")) for n, s in case.spaces.items()}
    border = Border({"x": Layout("NHWC")}, {0: Layout("NHWC")})
    result = materialize(case.module, case.graph, nhwc, border)
    assert result.transforms == ()
    assert [int(s) for s in result.module["main"].params[0].ty.shape] == [1, 12, 16, 8]
    assert [int(s) for s in result.module["main"].ret_ty.shape] == [1, 6, 8, 24]


def test_a_border_that_is_not_there_is_seen() -> None:
    case = Case.of(nets.conv_pool_conv())
    nhwc = {n: nearest(s.candidates, Layout("NHWC")) for n, s in case.spaces.items()}
    module = materialize(case.module, case.graph, nhwc).module
    verify_border(module, case.graph, Border())
    with pytest.raises(MaterializeError, match=r"x: its shape in NHWC is \(1, 8, 12, 16\), requested \(1, 12, 16, 8\)"):
        verify_border(module, case.graph, Border({"x": Layout("NHWC")}))
    with pytest.raises(MaterializeError, match=r"output 0: its shape in NCHW8c"):
        verify_border(module, case.graph, Border({}, {0: Layout("NCHW8c")}))


def test_weights_that_are_inputs() -> None:
    """Their layouts are those of kernels."""

    def body(n: nets.Net, x: relax.Expr, w: relax.Expr) -> relax.Expr:
        return n.emit(op.nn.conv2d(x, w, padding=1))

    case = Case.of(nets.build((1, 8, 5, 7), (16, 8, 3, 3), body=body))
    nhwc = {n: nearest(s.candidates, Layout("NHWC")) for n, s in case.spaces.items()}
    border = Border({"x": Layout("NHWC"), "x1": Layout("HWIO")}, {0: Layout("NHWC")})
    check(case, nhwc, border)
    assert transforms_of(case.graph, nhwc, border) == []
