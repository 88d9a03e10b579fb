"""Kernels: what was measured alone is what the whole model runs, each once, transforms apart."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import relax, tirx

from layoutsearch.errors import MaterializeError
from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.candidates import nearest
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.rules import initial_assignment
from layoutsearch.materialize.convert import materialize
from layoutsearch.materialize.extract import Extractor
from layoutsearch.materialize.fuse import fuse
from layoutsearch.materialize.lower import lower
from layoutsearch.search.workloads import kernel_nodes
from tests.materialize.cases import TARGET, Case, assert_outputs, run_built
from tests.models import nets, odd_nets, odd_ops, random_nets
from tests.models.inputs import tensor
from tests.models.interpreter import interpret
from tests.models.nets import Net, build

op = relax.op


def hard_swish() -> tvm.IRModule:
    def body(n: Net, x: relax.Expr) -> relax.Expr:
        y = n.conv(x, 16)
        gate = n.emit(op.clip(n.emit(op.add(y, relax.const(3.0, "float32"))), 0.0, 6.0))
        return n.conv(n.emit(op.multiply(n.emit(op.multiply(y, gate)), relax.const(1 / 6, "float32"))), 8, 1)

    return build((1, 8, 9, 11), body=body)


def grouping(module: tvm.IRModule, known: set[str]) -> list[tuple[str, ...]]:
    """The model's own operators in each kernel of a converted module, in program order."""
    found = [group for kernel in fuse(module).kernels for group in kernel.groups]
    own = [tuple(n for n in group if n in known) for group in found]
    for group, mine in zip(found, own, strict=True):
        # A kernel is operators of the model or one transform, never both.
        assert not mine or mine == group
    return sorted(g for g in own if g)


def test_hard_swish_is_one_kernel() -> None:
    case = Case.of(hard_swish())
    groups = grouping(case.module, set(case.graph.by_name))
    assert [[n.rsplit("_", 1)[0] for n in g] for g in groups] == [
        ["conv2d", "add", "add", "clip", "multiply", "multiply"],
        ["conv2d_pointwise", "add"],
    ]


def test_a_residual_sum_joins_the_last_convolution() -> None:
    case = Case.of(nets.residual(blocks=1))
    groups = grouping(case.module, set(case.graph.by_name))
    (with_sum,) = [g for g in groups if "relu_2" in g]
    *_, last = [o for o in case.graph.ops if o.op == "relax.nn.conv2d"]
    assert with_sum[0] == last.name
    assert len(with_sum) == 4


UNIFORM = [*nets.ALL.values(), hard_swish, odd_nets.several_outputs, odd_ops.outer_product, odd_ops.compared]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NCHW8c"])
@pytest.mark.parametrize("model", UNIFORM, ids=lambda m: m.__name__)
def test_groups_of_the_canonical_module_are_those_of_the_converted_one(model: object, layout: str) -> None:
    """The cost of a kernel is measured for the canonical groups; a converted module must have the same."""
    case = Case.of(model())  # type: ignore[operator]
    nodes = kernel_nodes(case.module, case.graph, case.spaces)
    assignment = dict(initial_assignment(case.graph))
    for node in nodes:
        choices = [c for c in node.choices if c is not None]
        if choices:
            assignment.update(node.assignment(nearest(choices, Layout(layout))))
    converted = materialize(case.module, case.graph, assignment).module
    # Operators with several results are kernels of the model and calls of their own in the module.
    single = [n.members for n in nodes if len(case.graph.by_name[n.root].results) == 1]
    assert grouping(converted, set(case.graph.by_name)) == sorted(single)


@given(random_nets.nets(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
def test_groups_stay_whatever_is_chosen_for_each(module: tvm.IRModule, rng: random.Random) -> None:
    """Every kernel in a layout of its own: the transforms between them change no group."""
    case = Case.of(module)
    nodes = kernel_nodes(case.module, case.graph, case.spaces)
    assignment: dict[str, Candidate] = {}
    for node in nodes:
        assignment.update(node.assignment(rng.choice(node.choices)))
    converted = materialize(case.module, case.graph, assignment).module
    single = [n.members for n in nodes if len(case.graph.by_name[n.root].results) == 1]
    assert grouping(converted, set(case.graph.by_name)) == sorted(single)


def test_equal_kernels_are_one_function() -> None:
    case = Case.of(nets.residual(blocks=3))
    fused = fuse(case.module)
    calls = [
        b.value
        for block in fused.module["main"].body.blocks
        for b in block.bindings
        if isinstance(b.value, relax.Call) and isinstance(b.value.op, tvm.ir.GlobalVar)
    ]
    assert len(calls) == sum(len(k.groups) for k in fused.kernels)
    assert len(fused.kernels) < len(calls)
    # The 3x3 convolutions of all three blocks are alike, of the others those of the last two.
    assert max(len(k.groups) for k in fused.kernels) == 3
    names = {g.name_hint for g, _ in fused.module.functions_items()}
    assert names == {"main", *(k.function for k in fused.kernels)}


def test_kernels_are_marked_and_private() -> None:
    case = Case.of(nets.mixed())
    converted = materialize(case.module, case.graph, case.random(random.Random(2))).module
    functions = {g.name_hint: f for g, f in fuse(converted).module.functions_items()}
    assert functions.pop("main").attrs["global_symbol"] == "main"
    assert all(f.attrs["Primitive"] == 1 and "global_symbol" not in f.attrs for f in functions.values())
    assert_outputs(run_built(converted, case.inputs), case.wanted)


def test_lowered_modules_call_kernels_only_and_list_their_transforms() -> None:
    case = Case.of(nets.residual())
    assignment = {n: nearest(s.candidates, Layout("NCHW16c")) for n, s in case.spaces.items()}
    result = materialize(case.module, case.graph, assignment)
    lowered = lower(result.module, TARGET)
    functions = {g.name_hint: f for g, f in lowered.module.functions_items()}
    assert all(isinstance(f, tirx.PrimFunc) for name, f in functions.items() if name != "main")
    for block in functions["main"].body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, relax.Call):
                assert binding.value.op.name == "relax.call_tir"
    assert sum(lowered.transforms.values()) == len(result.transforms) == 2
    assert set(lowered.transforms) <= {k.function for k in lowered.kernels}


def test_lowering_twice_is_the_same() -> None:
    case = Case.of(nets.mixed())
    converted = materialize(case.module, case.graph, case.random(random.Random(4))).module
    one, other = lower(converted, TARGET), lower(converted, TARGET)
    assert one.kernels == other.kernels
    assert one.module.script(show_meta=True) == other.module.script(show_meta=True)


def test_an_extracted_kernel_computes_its_part() -> None:
    case = Case.of(hard_swish())
    group = grouping(case.module, set(case.graph.by_name))[0]
    module, read = Extractor(case.module).extract(group)
    assert read == {"p0": "x"}
    main = module["main"]
    constants = [
        a.value.numpy()
        for b in case.module["main"].body.blocks[0].bindings
        if b.var.name in group
        for a in b.value.args
        if isinstance(a, tvm.ir.GenericConst) and a.ty.ndim > 0
    ]
    assert [tuple(int(s) for s in p.ty.shape.values) for p in main.params[1:]] == [c.shape for c in constants]
    x = tensor((1, 8, 9, 11))
    (got,) = interpret(module, [x, *constants])
    conv, bias = interpret_until(case, group, x)
    np_gate = (bias + 3).clip(0, 6)
    assert_outputs([got], [bias * np_gate / 6])
    assert conv.shape == got.shape


def interpret_until(case: Case, group: tuple[str, ...], x: object) -> list[object]:
    """Results of the convolution and of the bias of a group, by two smaller extractions."""
    found = []
    for count in (1, 2):
        module, _ = Extractor(case.module).extract(group[:count])
        bindings = {b.var.name: b.value for b in case.module["main"].body.blocks[0].bindings}
        constants = [
            a.value.numpy()
            for name in group[:count]
            for a in bindings[name].args
            if isinstance(a, tvm.ir.GenericConst) and a.ty.ndim > 0
        ]
        found += interpret(module, [x, *constants])  # type: ignore[list-item]
    return found


def test_an_operator_that_is_not_there_cannot_be_extracted() -> None:
    case = Case.of(nets.stem())
    with pytest.raises(MaterializeError, match="there is no operator relu_9"):
        Extractor(case.module).extract(("conv2d_0", "relu_9"))


def seen_through_transposes() -> tvm.IRModule:
    """A convolution whose sum and activation are computed in NHWC, with a transpose between all of them."""

    def body(n: Net, x: relax.Expr, other: relax.Expr) -> relax.Expr:
        y = n.emit(op.permute_dims(n.conv(x, 16, bias=False), [0, 2, 3, 1]))
        z = n.emit(op.permute_dims(n.emit(op.add(y, other)), [0, 3, 1, 2]))
        return n.conv(n.relu(z), 8, 1, bias=False)

    return build((1, 8, 9, 11), (1, 9, 11, 16), body=body)


@pytest.mark.parametrize("model", [nets.residual, nets.wrapped_in_transposes, seen_through_transposes])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW8c"])
def test_a_workload_alone_is_the_kernel_of_the_model(model: Callable[[], tvm.IRModule], layout: str) -> None:
    """The path of a measurement: a kernel taken out, its operands named as in the model, in a layout of its own."""
    case = Case.of(model())
    for node in kernel_nodes(case.module, case.graph, case.spaces):
        module = tvm.ir.load_json(node.workload.module_json)
        graph = build_graph(module, dict(node.workload.axes))
        names = [o.name for o in graph.ops]
        assert names == [f"t{i}" for i in range(len(node.members))]
        assert [o.op for o in graph.ops] == [case.graph.by_name[n].op for n in node.members]
        choice = nearest([c for c in node.choices if c is not None], Layout(layout))
        assignment = {f"t{i}": c for i, c in enumerate(node.assignment(choice).values())}
        converted = materialize(module, graph, assignment).module
        # As in the model: one kernel for all of them, transforms apart.
        assert grouping(converted, set(names)) == [tuple(names)]
        inputs = [tensor(t.shape or (), t.dtype, seed) for seed, t in enumerate(graph.inputs)]
        assert_outputs(interpret(converted, inputs), interpret(module, inputs))
