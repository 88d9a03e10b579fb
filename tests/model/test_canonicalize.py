"""The canonical form: what it is made of, that it computes the same, that it settles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import tvm
import tvm_ffi
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm.ir import GenericConst
from tvm.script import ir as I
from tvm.script import relax as R

from layoutsearch.errors import ModelError
from layoutsearch.model import canonicalize, kind_of, load, op_ids
from tests.models import inputs, nets, onnx_nets
from tests.models.running import range_error, run_onnx, run_tvm


def histogram(module: tvm.IRModule) -> Counter[str]:
    return Counter(name.split(":")[0] for name in op_ids(module).values())


def calls(module: tvm.IRModule) -> list[relax.Call]:
    return [b.value for block in module["main"].body.blocks for b in block.bindings if isinstance(b.value, relax.Call)]


def assert_well_formed(canonical: tvm.IRModule) -> None:
    """One `main` in one dataflow block, unique names, operands that are atoms, and nothing left to rewrite."""
    assert [var.name_hint for var, f in canonical.functions.items() if isinstance(f, relax.Function)] == ["main"]
    main = canonical["main"]
    assert all(isinstance(block, relax.DataflowBlock) for block in main.body.blocks)
    assert len(main.body.blocks) <= 1
    names = [binding.var.name for block in main.body.blocks for binding in block.bindings]
    names += [param.name for param in main.params]
    assert len(set(names)) == len(names)
    for call in calls(canonical):
        assert not any(isinstance(arg, relax.Call | relax.TupleGetItem) for arg in call.args)
    relax.analysis.well_formed(canonical)
    again = canonicalize(canonical)
    assert tvm_ffi.structural_equal(again, canonical)
    assert again.script() == canonical.script()


def assert_same_values(module: tvm.IRModule, canonical: tvm.IRModule, tolerance: float = 1e-5) -> None:
    arrays = inputs.for_model(load(module))
    for got, want in zip(run_tvm(canonical, arrays), run_tvm(module, arrays), strict=True):
        assert range_error(got, want) < tolerance


EXPECTED = {
    "clip_by_attributes": {"clip": 1},
    "clip_by_inputs": {"clip": 1},
    "clip_lower": {"maximum": 1},
    "clip_lower_zero": {"relu": 1},
    "clip_upper": {"minimum": 1},
    "clip_crossed": {"clip": 1},
    "clip_nan": {"minimum": 1},
    "relu_then_min": {"clip": 1},
    "hard_swish_op": {"add": 1, "clip": 1, "multiply": 2},
    "hard_swish_clip_div": {"add": 1, "clip": 1, "multiply": 2},
    "hard_swish_div_first": {"add": 1, "clip": 1, "multiply": 2},
    "hard_swish_relu6": {"add": 1, "clip": 1, "multiply": 2},
    "hard_swish_hard_sigmoid": {"add": 1, "clip": 1, "multiply": 2},
    "hard_sigmoid": {"add": 1, "clip": 1, "multiply": 1},
    "sum_of_three": {"add": 2, "relu": 1, "negative": 1},
    "sum_broadcast": {"add": 1},
    "mean_and_extrema": {"add": 1, "multiply": 1, "maximum": 1, "minimum": 2},
    "conv_batch_norm_relu": {"conv2d": 1, "add": 1, "relu": 1},
    "transposed_batch_norm": {"conv2d_transpose": 1, "add": 1},
    "batch_norm_conv": {"multiply": 1, "add": 1, "relu": 1, "conv2d": 1},
    "scaled_conv": {"conv2d": 1, "add": 1},
    "conv_read_twice": {"conv2d": 1, "multiply": 1, "relu": 1, "add": 1},
    "one_channel_bias": {"conv2d": 1, "add": 1},
    "pad_conv": {"conv2d": 1},
    "pad_with_ones": {"pad": 1, "conv2d": 1},
    "pad_relu": {"pad": 1, "relu": 1},
    "computed_flatten": {"adaptive_avg_pool2d": 1, "reshape": 1, "multiply": 1, "matmul": 1, "add": 1},
    "reduce_mean_flat": {"adaptive_avg_pool2d": 1, "squeeze": 1},
    "reduce_mean_kept": {"adaptive_avg_pool2d": 1},
    "whole_average_pool": {"adaptive_avg_pool2d": 1},
    "split_and_concat": {"split": 1, "negative": 1, "concat": 1},
    "resize_without_roi": {"resize2d": 1},
    "transposes_there_and_back": {"permute_dims": 2, "relu": 1, "add": 1},
    "two_outputs": {"relu": 1, "negative": 1},
}


def test_every_onnx_net_has_an_expectation() -> None:
    assert set(EXPECTED) == set(onnx_nets.ALL)


@pytest.mark.parametrize("name", EXPECTED)
def test_onnx_layer(name: str) -> None:
    proto = onnx_nets.ALL[name]()
    model = load(proto, {"x": (2, 6, 5, 7)} if name == "computed_flatten" else None)
    canonical = canonicalize(model.module)
    assert histogram(canonical) == EXPECTED[name]
    assert_well_formed(canonical)
    arrays = inputs.for_model(model)
    want = run_onnx(proto, {spec.name: array for spec, array in zip(model.inputs, arrays, strict=True)})
    for got, expected in zip(run_tvm(canonical, arrays), want, strict=True):
        assert range_error(got, expected) < 1e-5


@pytest.mark.parametrize("name", nets.ALL)
def test_relax_net(name: str) -> None:
    module = nets.ALL[name]()
    before = module.script()
    canonical = canonicalize(module)
    assert module.script() == before
    assert_well_formed(canonical)
    if name == "transposed_oihw":
        # TVM cannot build the original; a kernel of one input channel is the same in IOHW after swapping two axes.
        (call,) = calls(canonical)
        assert str(call.attrs.kernel_layout) == "IOHW"
        assert [int(extent) for extent in call.args[1].ty.shape] == [3, 1, 1, 1]
        return
    assert_same_values(module, canonical)


def test_scalars_are_zero_dimensional_and_other_constants_have_full_rank() -> None:
    module = canonicalize(load(onnx_nets.hard_swish_clip_div()).module)
    constants = [arg for call in calls(module) for arg in call.args if isinstance(arg, GenericConst)]
    assert constants
    assert all(len(constant.ty.shape) == 0 for constant in constants)
    module = canonicalize(load(onnx_nets.batch_norm_conv()).module)
    for call in calls(module)[:2]:
        assert [int(extent) for extent in call.args[1].ty.shape] == [1, 6, 1, 1]


def test_bias_of_one_channel_is_not_a_scalar() -> None:
    module = canonicalize(load(onnx_nets.one_channel_bias()).module)
    conv, add = calls(module)
    assert kind_of(conv) == "conv2d"
    assert [int(extent) for extent in add.args[1].ty.shape] == [1, 1, 1, 1]


def test_padding_moves_into_the_convolution() -> None:
    (conv,) = calls(canonicalize(load(onnx_nets.pad_conv()).module))
    assert [int(p) for p in conv.attrs.padding] == [1, 3, 0, 1]


def batch_norm(build_conv: Callable[[nets.Net, relax.Expr], relax.Expr], shape: tuple[int, ...]) -> tvm.IRModule:
    def body(n: nets.Net, x: relax.Expr) -> relax.Expr:
        y = build_conv(n, x)
        c = n.channels(y)
        positive = relax.const(n.rng.uniform(0.3, 2, c).astype("float32"))
        norm = relax.op.nn.batch_norm(y, positive, n.const((c,)), n.const((c,)), positive, axis=1, training=False)
        return n.relu(n.emit(relax.TupleGetItem(n.emit(norm), 0)))

    return nets.build(shape, body=body)


def transpose_of(groups: int) -> Callable[[nets.Net, relax.Expr], relax.Expr]:
    def build(n: nets.Net, x: relax.Expr) -> relax.Expr:
        weight = n.const((8, 12 // groups, 3, 2), 0.3)
        return n.emit(relax.op.nn.conv2d_transpose(x, weight, strides=(2, 1), padding=(1, 0), groups=groups))

    return build


@pytest.mark.parametrize(
    ("convolution", "kind"),
    [
        (lambda n, x: n.conv(x, 12), "conv2d"),
        (lambda n, x: n.conv(x, 12, groups=4, bias=False), "conv2d_grouped"),
        (lambda n, x: n.depthwise(x), "conv2d_depthwise"),
        (transpose_of(1), "conv2d_transpose"),
        (transpose_of(4), "conv2d_transpose"),
    ],
)
def test_batch_norm_folds_into_every_convolution(convolution: Callable, kind: str) -> None:
    module = batch_norm(convolution, (2, 8, 5, 6))
    canonical = canonicalize(module)
    assert histogram(canonical) == {kind: 1, "add": 1, "relu": 1}
    assert_same_values(module, canonical)


def test_batch_norm_in_nhwc() -> None:
    def body(n: nets.Net, x: relax.Expr) -> relax.Expr:
        conv = relax.op.nn.conv2d(x, n.const((3, 3, 4, 6), 0.2), data_layout="NHWC", kernel_layout="HWIO")
        scaled = n.emit(relax.op.multiply(n.emit(conv), n.const((6,))))
        return n.emit(relax.op.add(scaled, n.const((6,))))

    module = nets.build((1, 7, 9, 4), body=body)
    canonical = canonicalize(module)
    conv, bias = calls(canonical)
    assert (kind_of(conv), str(conv.attrs.kernel_layout)) == ("conv2d", "HWIO")
    assert [int(extent) for extent in bias.args[1].ty.shape] == [1, 1, 1, 6]
    assert_same_values(module, canonical)


def test_weights_as_parameters_stay_parameters() -> None:
    @I.ir_module
    class Unbound:
        @R.function
        def main(
            x: R.Tensor((1, 4, 6, 7), "float32"), w: R.Tensor((8, 4, 3, 3), "float32"), b: R.Tensor((8,), "float32")
        ) -> R.Tensor((1, 8, 4, 5), "float32"):
            y = R.nn.conv2d(x, w)
            z = R.add(y, R.reshape(b, (1, 8, 1, 1)))
            return R.divide(R.nn.relu(z), R.const(4.0, "float32"))

    canonical = canonicalize(Unbound)
    assert [param.name for param in canonical["main"].params] == ["x", "w", "b"]
    assert histogram(canonical) == {"conv2d": 1, "reshape": 1, "add": 1, "relu": 1, "multiply": 1}
    assert_well_formed(canonical)
    assert_same_values(Unbound, canonical)


def test_helpers_are_inlined_and_composites_kept() -> None:
    @I.ir_module
    class Helpers:
        @R.function(private=True)
        def twice(x: R.Tensor((2, 3), "float32")) -> R.Tensor((2, 3), "float32"):
            return R.add(x, x)

        @R.function(private=True)
        def kernel(x: R.Tensor((2, 3), "float32")) -> R.Tensor((2, 3), "float32"):
            R.func_attr({"Primitive": True})
            return R.negative(x)

        @R.function
        def main(x: R.Tensor((2, 3), "float32")) -> R.Tensor((2, 3), "float32"):
            cls = Helpers
            y = cls.twice(x)
            return cls.kernel(y)

    canonical = canonicalize(Helpers)
    assert sorted(var.name_hint for var in canonical.get_global_vars()) == ["kernel", "main"]
    assert histogram(canonical) == {"add": 1, "extern": 1}
    assert_same_values(Helpers, canonical)


def test_branches_and_casts_pass_through() -> None:
    @I.ir_module
    class Branch:
        @R.function
        def main(x: R.Tensor((2, 3), "float32"), c: R.Tensor((), "bool")) -> R.Tensor((2, 3), "float32"):
            a = R.nn.relu(x)
            if c:
                b = R.maximum(R.const(0.5, "float32"), a)
                d = R.minimum(b, R.const(2.0, "float32"))
            else:
                e = R.nn.dropout(a, rate=0.3)
                d = e[0]
            f = R.match_cast(d, R.Tensor((2, 3), "float32"))
            return R.multiply(f, R.const(1.0, "float32"))

    canonical = canonicalize(Branch)
    relax.analysis.well_formed(canonical)
    assert tvm_ffi.structural_equal(canonicalize(canonical), canonical)
    text = canonical.script()
    assert "R.clip" in text
    assert "dropout" not in text
    x = inputs.tensor((2, 3))
    # TVM's own build of the original crashes in the branch not taken first, so numpy is the reference.
    relu = np.maximum(x, 0)
    np.testing.assert_array_equal(run_tvm(canonical, [x, np.asarray(True)])[0], np.clip(relu, 0.5, 2))
    np.testing.assert_array_equal(run_tvm(canonical, [x, np.asarray(False)])[0], relu)


def test_a_function_that_returns_its_input() -> None:
    @I.ir_module
    class Nothing:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")) -> R.Tensor((2, 3), "float32"):
            return R.add(x, R.const(0.0, "float32"))

    canonical = canonicalize(Nothing)
    assert op_ids(canonical) == {}
    assert_same_values(Nothing, canonical)


def test_tuples_stay() -> None:
    canonical = canonicalize(nets.mixed())
    names = [b.var.name for block in canonical["main"].body.blocks for b in block.bindings]
    assert {"split_0", "item_0", "item_1"} <= set(names)


def test_a_broadcast_weight_is_not_stored_at_the_size_of_the_image() -> None:
    def body(n: nets.Net, x: relax.Expr) -> relax.Expr:
        wide = n.emit(relax.op.broadcast_to(n.const((1, 8, 1, 1)), (1, 8, 64, 64)))
        zeros = n.emit(relax.op.zeros((1, 8, 64, 64), "float32"))
        return n.emit(relax.op.concat([n.emit(relax.op.subtract(x, wide)), wide, zeros], axis=1))

    module = nets.build((1, 8, 64, 64), body=body)
    canonical = canonicalize(module)
    sizes = [arg.value.numpy().size for call in calls(canonical) for arg in call.args if isinstance(arg, GenericConst)]
    assert max(sizes) <= 8
    assert_same_values(module, canonical)


def test_constants_without_a_numpy_rule_are_folded_by_tvm() -> None:
    def body(n: nets.Net, x: relax.Expr) -> relax.Expr:
        table = n.emit(relax.op.sin(n.emit(relax.op.flip(n.const((3, 4)), axis=0))))
        return n.emit(relax.op.matmul(x, table))

    module = nets.build((2, 3), body=body)
    canonical = canonicalize(module)
    assert histogram(canonical) == {"matmul": 1}
    assert_same_values(module, canonical)


def test_a_module_without_main() -> None:
    @I.ir_module
    class Other:
        @R.function
        def forward(x: R.Tensor((2, 3), "float32")) -> R.Tensor((2, 3), "float32"):
            return x

    with pytest.raises(ModelError, match=r"no Relax function named main.*forward"):
        canonicalize(Other)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "multiply", "subtract", "divide", "maximum", "minimum", "clip", "relu", "swap", "tap"]),
        st.floats(-3, 3).filter(lambda v: abs(v) > 1e-2),
        st.floats(-3, 3),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=12, deadline=None)
@given(steps=STEPS, shape=st.sampled_from([(), (1,), (6, 1, 1), (1, 6, 1, 1), (1, 1, 1, 1), (1, 1, 5, 4)]))
def test_random_chains_of_arithmetic_keep_their_values(
    steps: list[tuple[str, float, float]], shape: tuple[int, ...]
) -> None:
    def body(n: nets.Net, x: relax.Expr) -> relax.Expr:
        y = taps = n.conv(x, 6, bias=False)
        for name, a, b in steps:
            const = relax.const(np.full(shape, a, "float32"))
            if name == "clip":
                y = n.emit(relax.op.clip(y, a, b))
            elif name == "relu":
                y = n.relu(y)
            elif name == "swap":
                y = n.emit(relax.op.multiply(const, y))
            elif name == "tap":
                y = taps = n.emit(relax.op.add(y, taps))
            else:
                y = n.emit(getattr(relax.op, name)(y, const))
        return y

    module = nets.build((1, 3, 5, 4), body=body)
    canonical = canonicalize(module)
    assert tvm_ffi.structural_equal(canonicalize(canonical), canonical)
    x = inputs.tensor((1, 3, 5, 4))
    got, want = run_tvm(canonical, [x])[0], run_tvm(module, [x])[0]
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * max(1.0, float(np.abs(want).max())))


@pytest.mark.parametrize("kind", ["conv2d", "conv2d_transpose", "matmul"])
def test_weights_next_to_nothing_are_zero(kind: str) -> None:
    """Denormal numbers are slow."""
    rng = np.random.default_rng(0)
    shape = {"conv2d": (5, 3, 3, 2), "conv2d_transpose": (3, 5, 3, 2), "matmul": (7, 4)}[kind]
    weight = rng.standard_normal(shape).astype("float32")
    tiny = [1e-40, -1e-38, 1e-31, -1.4e-45]
    weight.reshape(-1)[: len(tiny)] = tiny
    weight.reshape(-1)[len(tiny)] = 1e-20
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 3, 6, 7), "float32"))
    build = {"conv2d": relax.op.nn.conv2d, "conv2d_transpose": relax.op.nn.conv2d_transpose, "matmul": relax.op.matmul}
    with builder.function("main", [x]):
        with builder.dataflow():
            made = builder.emit(build[kind](x, relax.const(weight)))
            out = builder.emit_output(relax.op.nn.relu(made))
        builder.emit_func_output(out)
    canonical = canonicalize(builder.get())
    kept = next(c.args[1].value.numpy() for c in calls(canonical) if c.op.name.endswith(kind))
    assert np.array_equal(kept, np.where(np.abs(weight) < 1e-30, 0, weight))
    assert_well_formed(canonical)
    assert_same_values(builder.get(), canonical)


def test_weights_that_are_all_tiny_stay() -> None:
    """What is behind them may make them large."""
    weight = np.random.default_rng(0).standard_normal((5, 3, 3, 2)).astype("float32") * np.float32(1e-33)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 3, 6, 7), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            made = builder.emit(relax.op.nn.conv2d(x, relax.const(weight)))
            out = builder.emit_output(relax.op.multiply(made, relax.const(np.float32(1e33))))
        builder.emit_func_output(out)
    assert_same_values(builder.get(), canonicalize(builder.get()))
