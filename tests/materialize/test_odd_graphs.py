"""Odd ranks, tuples, shared tensors, slices, reductions, types: converted and right, or left in their layouts."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax

from layoutsearch.errors import ModelError
from layoutsearch.layout.build import build_graph
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.rules import transforms_of
from layoutsearch.materialize.convert import materialize
from tests.materialize.cases import Case, assert_moves, assert_outputs, check, check_built, run_built
from tests.models import odd_nets, odd_ops
from tests.models.inputs import tensor
from tests.models.interpreter import interpret
from tests.models.nets import Net, build
from tests.models.odd_helpers import SHAPE

ODD = {**odd_nets.ALL, **odd_ops.ALL}


@pytest.mark.parametrize("name", sorted(ODD))
def test_odd_graph(name: str) -> None:
    case = Case.of(ODD[name]())
    for assignment in itertools.islice(case.covering(), 10):
        result = check(case, assignment)
    check_built(case, result)


def test_nested_tuple_as_input() -> None:
    case = Case.of(odd_nets.tuple_input())
    assert [t.name for t in case.graph.inputs] == ["x.0", "x.1.0", "x.1.1"]
    inputs = [(tensor(SHAPE, seed=1), (np.float32(2), tensor(SHAPE, seed=2)))]
    wanted = interpret(case.module, inputs)
    for assignment in itertools.islice(case.covering(), 10):
        result = materialize(case.module, case.graph, assignment)
        assert_moves(result.module, case.graph, len(transforms_of(case.graph, assignment)))
        assert_outputs(interpret(result.module, inputs), wanted)


def test_half_precision() -> None:
    case = Case.of(odd_ops.half_precision())
    for assignment in itertools.islice(case.covering(), 10):
        result = materialize(case.module, case.graph, assignment)
    (got,) = run_built(result.module, case.inputs)
    assert got.dtype == np.float16
    assert np.max(np.abs(got.astype("float32") - case.wanted[0])) < 2e-2


def test_symbolic_batch_is_frozen_and_runs() -> None:
    """Extents that are known only at run time: nothing to choose, the model goes through unchanged."""
    case = Case.of(odd_nets.symbolic_batch())
    assert {op.role for op in case.graph.ops} == {Role.FROZEN}
    assert {op.why_frozen for op in case.graph.ops} == {"a shape is not static"}
    result = materialize(case.module, case.graph, {})
    x = tensor((3, *SHAPE[1:]))
    assert_outputs(run_built(result.module, [x]), run_built(case.module, [x]))


@tvm.register_global_func("layoutsearch.tests.halve", override=True)
def halve(x: tvm.runtime.Tensor, out: tvm.runtime.Tensor) -> None:
    out.copyfrom(x.numpy() / 2)


def external() -> tvm.IRModule:
    def body(n: Net, x: relax.Expr) -> relax.Expr:
        ty = relax.TensorType((2, 16, 9, 12), "float32")
        return n.conv(n.emit(relax.op.call_dps_packed("layoutsearch.tests.halve", [n.conv_relu(x, 16)], out_ty=ty)), 8)

    return build(SHAPE, body=body)


def cast() -> tvm.IRModule:
    def body(n: Net, x: relax.Expr) -> relax.Expr:
        y = n.conv_relu(x, 16)
        z = n.builder.match_cast(n.emit(relax.op.take(y, relax.const(np.arange(16)), axis=1)), y.ty)
        return n.emit(relax.op.add(n.conv(z, 16, 1), y))

    return build(SHAPE, body=body)


def impure() -> tvm.IRModule:
    """A side effect in the middle cuts the model into two dataflow blocks."""
    net = Net()
    x = relax.Var("x", relax.TensorType(SHAPE, "float32"))
    with net.builder.function("main", [x], pure=False):
        y = net.conv_relu(x, 16)
        net.emit(relax.op.assert_op(relax.const(True), [], format="never"))
        z = net.emit(relax.op.add(net.conv_relu(y, 16, 1), y))
        net.builder.emit_func_output(net.conv(z, 8, 1))
    return net.builder.get()


@pytest.mark.parametrize("model", [external, cast, impure])
def test_what_the_pass_cannot_see_through(model: Callable[[], tvm.IRModule]) -> None:
    """External calls, casts and side effects get their tensors in the original layout, and everything is counted."""
    case = Case.of(model())
    wanted = run_built(case.module, case.inputs)
    for assignment in itertools.islice(case.covering(), 8):
        result = materialize(case.module, case.graph, assignment)
        counted = transforms_of(case.graph, assignment)
        assert {(t.tensor, t.source, t.target) for t in result.transforms} == set(counted)
        assert_moves(result.module, case.graph, len(counted))
    assert result.transforms
    assert_outputs(run_built(result.module, case.inputs), wanted)


def test_only_the_larger_of_two_dataflow_blocks_takes_part() -> None:
    graph = Case.of(impure()).graph
    frozen = [op.why_frozen for op in graph.ops if op.op == "relax.nn.conv2d"]
    assert frozen == ["it is bound outside the main dataflow block", "", ""]


def test_a_branch_is_refused() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(SHAPE, "float32"))
    flag = relax.Var("flag", relax.TensorType((), "bool"))
    with builder.function("main", [x, flag]):
        y = builder.emit(relax.If(flag, relax.op.nn.relu(x), relax.op.negative(x)))
        builder.emit_func_output(y)
    with pytest.raises(ModelError, match="branches at run time"):
        build_graph(builder.get())


def test_a_module_without_main_is_refused() -> None:
    with pytest.raises(ModelError, match="no Relax function 'main'"):
        build_graph(tvm.IRModule({}))
