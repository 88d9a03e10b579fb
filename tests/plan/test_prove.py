"""The final module is proven against its plan, and the proof fails where a pass on the way does something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax, te, tirx, topi

import layoutsearch
from layoutsearch.errors import MaterializeError
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.candidates import nearest
from layoutsearch.layout.layout import Layout
from layoutsearch.materialize import legalize as rules
from layoutsearch.materialize.copies import only_copies
from layoutsearch.materialize.lower import Lowered, lower
from layoutsearch.materialize.writer import FunctionWriter, substitute, with_main
from layoutsearch.plan import apply as applying
from layoutsearch.plan import sequence
from layoutsearch.plan.apply import Applied, apply_plan, vm_pipeline
from layoutsearch.plan.calls import trace_calls
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.plan.prove import prove_final, prove_scheduled
from layoutsearch.search.workloads import KernelNode
from tests.models import nets
from tests.models.plans import make_plan
from tests.models.random_nets import nets as random_nets
from tests.models.running import native_target

op = relax.op
Emit = Callable[[FunctionWriter, relax.Binding, relax.Expr], relax.Expr]


def in_layout(name: str) -> Callable[[KernelNode], Candidate | None]:
    """Every kernel in the candidate nearest to a layout."""

    def choose(node: KernelNode) -> Candidate | None:
        free = [c for c in node.choices if c is not None]
        return nearest(free, Layout(name)) if free else None

    return choose


def cube() -> tvm.IRModule:
    """Two convolutions and a pool of tensors that are as high as wide as deep: no shape tells two layouts apart."""

    def body(n: nets.Net, x: relax.Expr) -> relax.Expr:
        pooled = n.emit(op.nn.max_pool2d(n.conv_relu(x, 8), pool_size=3, strides=1, padding=1))
        return n.conv_relu(pooled, 8)

    return nets.build((1, 8, 8, 8), body=body)


@pytest.fixture(scope="module")
def module() -> tvm.IRModule:
    return nets.conv_pool_conv()


@pytest.fixture(scope="module")
def plan(module: tvm.IRModule) -> LayoutPlan:
    return make_plan(module, native_target(), choose=in_layout("NHWC"))


@pytest.fixture(scope="module")
def applied(module: tvm.IRModule, plan: LayoutPlan) -> Applied:
    return apply_plan(module, plan)


def finish(applied: Applied) -> tvm.IRModule:
    with native_target():
        return vm_pipeline(proven=applied.proven)(applied.module)


@given(random_nets(), st.integers(0, 3))
def test_whatever_a_plan_says_is_proven_to_the_end(module: tvm.IRModule, seed: int) -> None:
    plan = make_plan(module, native_target(), seed=seed)
    applied = apply_plan(module, plan)
    assert sum(call.is_transform for call in applied.proven.calls) == len(plan.transforms)
    in_kernels = [name for call in applied.proven.calls for name in call.ops]
    assert sorted(in_kernels) == sorted(op.name for op in applied.graph.ops)
    finish(applied)


def test_the_transforms_of_the_final_module_are_those_of_the_plan(applied: Applied, plan: LayoutPlan) -> None:
    assert [(t.source, t.target) for t in plan.transforms] == [("NCHW", "NHWC"), ("NHWC", "NCHW")]
    functions = {g.name_hint: f for g, f in applied.module.functions_items()}
    final = trace_calls(finish(applied))
    moves = [c.function for c in final.kernels if only_copies(functions[c.function])]
    assert moves == [c.function for c in applied.proven.calls if c.is_transform]


# What passes on the way may do.


def rewritten(module: tvm.IRModule, at: Callable[[relax.Binding], bool], emit: Emit) -> tvm.IRModule:
    """`main` with what `emit` makes in the place of the bindings `at` which it is put."""
    main, writer = module["main"], FunctionWriter()
    env: dict[relax.Var, relax.Expr] = {}
    for block in main.body.blocks:
        for binding in block.bindings:
            value = substitute(binding.value, env)
            if at(binding):
                value = emit(writer, binding, value)
            output = not isinstance(binding.var, relax.DataflowVar)
            env[binding.var] = writer.bind(binding.var.name, value, output=output)
        writer.end_block(isinstance(block, relax.DataflowBlock))
    return with_main(module, writer.function(main.params, substitute(main.body.body, env), main.attrs))


def is_conv(binding: relax.Binding) -> bool:
    return isinstance(binding.value, relax.Call) and getattr(binding.value.op, "name", "") == "relax.nn.conv2d"


def back_to_nchw(writer: FunctionWriter, binding: relax.Binding, call: relax.Expr) -> relax.Expr:
    """The NHWC convolution as TVM's own pass might leave it: in NCHW, with transposes around."""
    a, name = call.attrs, binding.var.name
    data = writer.bind(f"{name}_in", op.permute_dims(call.args[0], [0, 3, 1, 2]))
    kernel = relax.const(call.args[1].value.numpy().transpose(3, 2, 0, 1))
    conv = op.nn.conv2d(data, kernel, strides=a.strides, padding=a.padding, groups=a.groups)
    return op.permute_dims(writer.bind(f"{name}_nchw", conv), [0, 2, 3, 1])


def test_a_pass_that_turns_a_convolution_back(
    module: tvm.IRModule, plan: LayoutPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turning(converted: tvm.IRModule, target: tvm.target.Target) -> Lowered:
        return lower(rewritten(converted, is_conv, back_to_nchw), target)

    monkeypatch.setattr(applying, "lower", turning)
    with pytest.raises(MaterializeError, match=r"^conv2d:\w+:0: its kernel has 2 buffers, not 3"):
        apply_plan(module, plan)


def test_a_pass_that_puts_transposes_around_a_scheduled_kernel(applied: Applied) -> None:
    """There and back again: the kernel itself is as it was."""
    first = next(c for c in applied.proven.calls if c.ops and c.ops[0] == "conv2d_0")
    shape = next(v.shape for v in first.reads if v.tensor)
    assert shape is not None
    turned = (shape[0], shape[3], shape[1], shape[2])
    builder = relax.BlockBuilder(applied.module)
    there = builder.add_func(transpose(shape, (0, 3, 1, 2)), "there")
    back = builder.add_func(transpose(turned, (0, 2, 3, 1)), "back")

    def call_tir(gv: tvm.ir.GlobalVar, operand: relax.Expr, made: tuple[int, ...]) -> relax.Expr:
        return relax.call_tir(gv, relax.Tuple([operand]), relax.TensorType(made, "float32"))

    def around(writer: FunctionWriter, binding: relax.Binding, call: relax.Expr) -> relax.Expr:
        operands = list(call.args[1].fields)
        made = writer.bind("there", call_tir(there, operands[0], turned))
        operands[0] = writer.bind("back", call_tir(back, made, shape))
        return relax.Call(call.op, [call.args[0], relax.Tuple(operands)], call.attrs, call.ty_args)

    def is_first(binding: relax.Binding) -> bool:
        return isinstance(binding.value, relax.Call) and binding.value.args[0].name_hint == first.function

    module = rewritten(builder.get(), is_first, around)
    for prove in (prove_scheduled, prove_final):
        with pytest.raises(MaterializeError, match=r"there moves x in NHWC \(an input, read by conv2d:\w+:0\) in the"):
            prove(module, applied.proven)


def transpose(shape: tuple[int, ...], axes: tuple[int, ...]) -> tirx.PrimFunc:
    """A kernel that transposes a tensor."""
    data = te.placeholder(shape, "float32", "data")
    return te.create_prim_func([data, topi.transpose(data, axes)])


def test_a_rule_that_turns_a_convolution_back_inside_its_kernel(
    module: tvm.IRModule, plan: LayoutPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Legalisation as TVM's own rules do it for layouts that TOPI lacks: nothing shows in `main`."""

    def conv(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        a = call.attrs

        def compute(data: Any, kernel: Any) -> Any:
            nchw, oihw = topi.transpose(data, (0, 3, 1, 2)), topi.transpose(kernel, (3, 2, 0, 1))
            made = topi.nn.conv2d_nchw(nchw, oihw, list(a.strides), list(a.padding), list(a.dilation))
            return topi.transpose(made, (0, 2, 3, 1))

        return bb.call_te(compute, *call.args, primfunc_name_hint="conv2d")

    monkeypatch.setitem(rules.LEGALIZE_MAP, "relax.nn.conv2d", conv)
    with pytest.raises(MaterializeError, match=r"conv2d:\w+:0: its kernel \w+ moves a tensor inside, in T_transpose"):
        apply_plan(module, plan)


def test_a_kernel_in_another_layout_of_the_same_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is 8 x 8 x 8: the kernel's loops tell."""
    plan = make_plan(cube(), native_target(), choose=in_layout("NHWC"))

    def conv(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        attrs = {f.name: getattr(call.attrs, f.name) for f in type(call.attrs).__tvm_ffi_type_info__.fields}
        other = tvm.ir.make_node("relax.attrs.Conv2DAttrs", **{**attrs, **layouts})
        return stock(bb, relax.BlockBuilder().normalize(relax.Call(call.op, call.args, other)))

    stock, layouts = rules.LEGALIZE_MAP["relax.nn.conv2d"], {}
    monkeypatch.setitem(rules.LEGALIZE_MAP, "relax.nn.conv2d", conv)
    kept = {"data_layout": "NHWC", "kernel_layout": "HWIO", "out_layout": "NHWC"}
    for changed in (
        {"data_layout": "NWHC"},
        {"data_layout": "NCHW"},
        {"kernel_layout": "WHIO"},
        {"out_layout": "NCHW"},
    ):
        layouts = {**kept, **changed}
        with pytest.raises(
            MaterializeError, match=r"conv2d:\w+:0: in its kernel \w+, (one of its loops|its result is)"
        ):
            apply_plan(cube(), plan)
    layouts = kept
    apply_plan(cube(), plan)


def test_a_transform_that_is_left_out_of_tensors_that_are_alike_in_every_layout() -> None:
    """No shape tells, but the convolution would read NCHW for NHWC."""
    applied = apply_plan(cube(), make_plan(cube(), native_target(), choose=in_layout("NHWC")))
    first = applied.proven.calls[0]
    assert first.is_transform

    def left_out(writer: FunctionWriter, binding: relax.Binding, call: relax.Expr) -> relax.Expr:
        return call.args[1].fields[0]

    def is_transform(binding: relax.Binding) -> bool:
        return isinstance(binding.value, relax.Call) and binding.value.args[0].name_hint == first.function

    without = rewritten(applied.module, is_transform, left_out)
    with pytest.raises(MaterializeError, match=r"conv2d:\w+:0: operand 0 is x in NCHW, the plan has x in NHWC"):
        prove_scheduled(without, applied.proven)


def test_a_transform_that_runs_twice(applied: Applied) -> None:
    move = next(c for c in applied.proven.calls if c.is_transform)
    found = []

    def twice(writer: FunctionWriter, binding: relax.Binding, call: relax.Expr) -> relax.Expr:
        if not found:
            writer.bind("again", call)
        found.append(call)
        return call

    def is_transform(binding: relax.Binding) -> bool:
        return isinstance(binding.value, relax.Call) and binding.value.args[0].name_hint == move.function

    module = rewritten(applied.module, is_transform, twice)
    with pytest.raises(MaterializeError, match=f"{move.function} moves x in NCHW .*, and the plan does not list it"):
        prove_scheduled(module, applied.proven)
    with pytest.raises(MaterializeError, match=f"{move.function} moves x in NCHW .*, and the plan does not list it"):
        prove_final(module, applied.proven)


def test_a_pass_at_the_very_end(applied: Applied) -> None:
    """After the sequence is made a kernel is dropped from it, or runs out of turn."""
    final = finish(applied)
    gv = next(g for g in final.get_global_vars() if g.name_hint == "run_kernels")
    steps = list(final[gv].body.seq)
    for changed, message in (
        ([*steps[:1], *steps[2:]], r"conv2d:\w+:0 is not in the final module"),
        ([steps[0], *steps], "fused_permute_dims_0 moves x in NCHW"),
        ([steps[0], steps[2], steps[1], *steps[3:]], r"conv2d:\w+:0 is not in the final module"),
    ):
        function = final[gv]
        body = tirx.SeqStmt(changed)
        module = tvm.IRModule({**dict(final.functions_items()), gv: tirx.PrimFunc(function.params, body)})
        with pytest.raises(MaterializeError, match=message):
            prove_final(module, applied.proven)


def test_memory_that_is_shared_too_early(applied: Applied, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor at the start of the workspace: what a kernel reads is not there any more."""

    def everything_at_zero(regions: Any) -> int:
        return max(r.bytes for r in regions)

    # The pool reads and writes there, which no check of layouts sees; what the last convolution reads does not differ.
    two = nets.residual()
    applied = apply_plan(two, make_plan(two, native_target(), choose=in_layout("NHWC")))
    finish(applied)
    monkeypatch.setattr(sequence, "place", everything_at_zero)
    with pytest.raises(MaterializeError, match=r"operand \d is .*, the plan has "):
        finish(applied)


def test_a_plan_that_lists_one_too_many(module: tvm.IRModule, plan: LayoutPlan) -> None:
    twice = replace(plan, transforms=(*plan.transforms, plan.transforms[0]))
    with pytest.raises(
        MaterializeError, match="the plan lists a transform of x from NCHW to NHWC, which nothing needs"
    ):
        apply_plan(module, twice)


def test_in_a_script_of_ones_own(module: tvm.IRModule, plan: LayoutPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """`relax_pipeline=layoutsearch.pipeline(plan)` proves what is there after its last pass."""
    emit = sequence._emit
    monkeypatch.setattr(sequence, "_emit", lambda given, steps, *rest: emit(given, steps[:-1], *rest))
    with pytest.raises(MaterializeError, match="is not in the final module"):
        tvm.compile(module, native_target(), relax_pipeline=layoutsearch.pipeline(plan))
