"""The context manager: what it makes safe, and that TVM's own inference is back afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

from layoutsearch.materialize.inference import layout_inference
from layoutsearch.materialize.objects import inference_of
from layoutsearch.model import canonicalize
from tests.materialize.cases import assert_outputs
from tests.models import nets, odd_nets, odd_ops
from tests.models.inputs import tensor
from tests.models.interpreter import interpret
from tests.models.nets import Net, build

NHWC = {"relax.nn.conv2d": ["NHWC", "OHWI"]}
DEFAULT = ["NCHW", "OIHW", "NCHW"]


def registered() -> dict[str, object]:
    ops = (tvm.ir.Op.get(name) for name in tvm.ir.Op.list_op_names() if name.startswith("relax."))
    return {op.name: inference_of(op) for op in ops}


def assert_same_functions(before: dict[str, object], after: dict[str, object]) -> None:
    assert before.keys() == after.keys()
    for name, function in before.items():
        same = after[name] is None if function is None else function.same_as(after[name])  # type: ignore[attr-defined]
        assert same, name


def two_blocks() -> tvm.IRModule:
    """Two convolutions with different blocks meet in an addition: stock TVM raises."""
    return canonicalize(nets.concat_branches())


def mixed_callback() -> Callable[[relax.Call], dict[str, list[str]]]:
    """8 lanes for one convolution, 4 for the next, and so on."""
    count = iter(range(1000))

    def choose(call: relax.Call) -> dict[str, list[str]]:
        if call.op.name != "relax.nn.conv2d":
            return {}
        b = (8, 4)[next(count) % 2]
        return {call.op.name: [f"NCHW{b}c", f"OIHW{b}i{b}o", f"NCHW{b}c"]}

    return choose


def convert_mixed(module: tvm.IRModule) -> tvm.IRModule:
    return relax.transform.ConvertLayout({}, mixed_callback())(module)


def assert_stock_behaviour() -> None:
    with pytest.raises((RuntimeError, ValueError)):
        convert_mixed(two_blocks())


def test_what_stock_inference_refuses_is_converted_inside_only() -> None:
    module = two_blocks()
    x = tensor((1, 8, 9, 12))
    assert_stock_behaviour()
    with layout_inference():
        converted = convert_mixed(module)
    assert_stock_behaviour()
    assert_outputs(interpret(converted, [x]), interpret(module, [x]))


def test_functions_are_put_back() -> None:
    before = registered()
    with layout_inference():
        inside = registered()
        assert not before["relax.nn.conv2d"].same_as(inside["relax.nn.conv2d"])  # type: ignore[attr-defined]
    assert_same_functions(before, registered())
    with layout_inference({}):
        assert registered()["relax.nn.pad"] is not None
    assert_same_functions(before, registered())
    assert registered()["relax.nn.pad"] is None


def test_functions_are_put_back_after_an_error() -> None:
    before = registered()
    with pytest.raises(ZeroDivisionError), layout_inference({}):
        _ = 1 / 0
    assert_same_functions(before, registered())
    assert_stock_behaviour()


def test_contexts_nest() -> None:
    before = registered()
    with layout_inference():
        outer = registered()
        with layout_inference({}):
            pass
        assert_same_functions(outer, registered())
    assert_same_functions(before, registered())


def test_the_same_module_before_inside_and_after() -> None:
    """Where TVM's own inference works, it is what runs."""
    module = canonicalize(nets.residual())
    before = relax.transform.ConvertLayout(NHWC)(module)
    with layout_inference():
        inside = relax.transform.ConvertLayout(NHWC)(module)
    after = relax.transform.ConvertLayout(NHWC)(module)
    assert not tvm_ffi.structural_equal(before, module)
    assert tvm_ffi.structural_equal(inside, before)
    assert tvm_ffi.structural_equal(after, before)


def test_without_answers_nothing_is_moved() -> None:
    """With answers given, what is not among them keeps its layout, whatever the pass is asked for."""
    module = canonicalize(nets.residual())
    with layout_inference({}):
        converted = relax.transform.ConvertLayout(NHWC)(module)
    assert tvm_ffi.structural_equal(converted, relax.transform.Normalize()(module), map_free_vars=True)


def layer_norm() -> tvm.IRModule:
    def body(n: Net, x: relax.Expr) -> relax.Expr:
        y = n.conv(x, 16)
        return n.emit(relax.op.nn.layer_norm(y, n.const((16, 9, 12)), n.const((16, 9, 12)), axes=[1, 2, 3]))

    return build((2, 8, 9, 12), body=body)


def test_layer_norm_keeps_its_values() -> None:
    """Stock inference permutes the data and not gamma and beta, silently."""
    module = canonicalize(layer_norm())
    x = tensor((2, 8, 9, 12))
    with layout_inference():
        converted = relax.transform.ConvertLayout(NHWC)(module)
    assert "NHWC" in converted.script()
    assert_outputs(interpret(converted, [x]), interpret(module, [x]))


def models() -> Iterator[tuple[str, Callable[[], tvm.IRModule]]]:
    yield from nets.ALL.items()
    for name in ("mean_planes", "outer_product", "twice_joined", "split_uneven", "pad_channels", "stacked", "compared"):
        yield name, {**odd_nets.ALL, **odd_ops.ALL}[name]


@pytest.mark.parametrize(("name", "model"), list(models()))
def test_random_requests_never_end_the_process_or_change_values(name: str, model: Callable[[], tvm.IRModule]) -> None:
    """A layout drawn for each convolution: TVM's greedy pass, made safe."""
    module = canonicalize(model())
    inputs = [tensor([int(s) for s in p.ty.shape.values], str(p.ty.dtype)) for p in module["main"].params]
    wanted = interpret(module, inputs)
    generator = random.Random(name)
    for _ in range(4):

        def choose(call: relax.Call) -> dict[str, list[str]]:
            i, o = generator.choice([4, 8, 16]), generator.choice([4, 8, 16])
            packed = [f"NCHW{i}c", f"OIHW{i}i{o}o", f"NCHW{o}c"]
            layouts = generator.choice([["NHWC", "HWIO", "NHWC"], packed, DEFAULT])
            return {"relax.nn.conv2d": layouts} if call.op.name == "relax.nn.conv2d" else {}

        with layout_inference():
            converted = relax.transform.ConvertLayout({}, choose)(module)
        got = interpret(converted, inputs)
        assert all(np.isfinite(g).all() for g in got if g.dtype != bool)
        assert_outputs(got, wanted)
