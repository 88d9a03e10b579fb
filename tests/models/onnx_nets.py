"""Small ONNX models, written node by node: each spelling of a layer that exporters use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Nodes = Sequence[onnx.NodeProto]


def node(op: str, inputs: str, output: str, **attributes: object) -> onnx.NodeProto:
    """A node; inputs as one string, separated by blanks, `_` for one that is left out; likewise outputs."""
    names = ["" if name == "_" else name for name in inputs.split()]
    return helper.make_node(op, names, output.split(), **attributes)


def model(
    nodes: Nodes,
    inputs: Mapping[str, Sequence[int | str | None]],
    weights: Mapping[str, np.ndarray] | None = None,
    outputs: Sequence[str] = ("y",),
    opset: int = 13,
) -> onnx.ModelProto:
    """A model of float32 inputs."""
    graph = helper.make_graph(
        list(nodes),
        "net",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (weights or {}).items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    proto.ir_version = 8
    return proto


def f32(*values: float) -> np.ndarray:
    """A float32 vector, or a scalar for one value."""
    return np.array(values[0] if len(values) == 1 else values, "float32")


def _rng(seed: int = 3) -> np.random.Generator:
    return np.random.default_rng(seed)


X = {"x": (1, 6, 5, 7)}


def _conv(out: int = 8, inner: int = 6, kernel: int = 3) -> np.ndarray:
    return (_rng().normal(size=(out, inner, kernel, kernel)) * 0.2).astype("float32")


def _norm(channels: int) -> dict[str, np.ndarray]:
    rng = _rng(5)
    low_high = {"gamma": (0.5, 1.5), "beta": (-1, 1), "mean": (-1, 1), "var": (0.2, 2)}
    return {name: rng.uniform(*pair, channels).astype("float32") for name, pair in low_high.items()}


def clip_by_attributes() -> onnx.ModelProto:
    return model([node("Clip", "x", "y", min=-0.5, max=0.75)], X, opset=6)


def clip_by_inputs() -> onnx.ModelProto:
    return model([node("Clip", "x low high", "y")], X, {"low": f32(-0.5), "high": f32(0.75)})


def clip_lower() -> onnx.ModelProto:
    return model([node("Clip", "x low", "y")], X, {"low": f32(-0.5)})


def clip_lower_zero() -> onnx.ModelProto:
    return model([node("Clip", "x low", "y")], X, {"low": f32(0.0)})


def clip_upper() -> onnx.ModelProto:
    return model([node("Clip", "x _ high", "y")], X, {"high": f32(0.25)})


def clip_crossed() -> onnx.ModelProto:
    """Lower bound above the upper: the upper wins."""
    return model([node("Clip", "x low high", "y")], X, {"low": f32(1.0), "high": f32(0.5)})


def clip_nan() -> onnx.ModelProto:
    """A bound that is not a number is no bound."""
    return model([node("Clip", "x low high", "y")], X, {"low": f32(np.nan), "high": f32(0.5)})


def relu_then_min() -> onnx.ModelProto:
    return model([node("Relu", "x", "r"), node("Min", "r six", "y")], X, {"six": f32(0.6)})


def hard_swish_op() -> onnx.ModelProto:
    return model([node("HardSwish", "x", "y")], X, opset=14)


def hard_swish_clip_div() -> onnx.ModelProto:
    nodes = [
        node("Add", "x three", "a"),
        node("Clip", "a zero six", "c"),
        node("Mul", "x c", "m"),
        node("Div", "m six", "y"),
    ]
    return model(nodes, X, {"three": f32(3), "zero": f32(0), "six": f32(6)})


def hard_swish_div_first() -> onnx.ModelProto:
    nodes = [
        node("Add", "three x", "a"),
        node("Clip", "a zero six", "c"),
        node("Div", "c six", "d"),
        node("Mul", "d x", "y"),
    ]
    return model(nodes, X, {"three": f32(3), "zero": f32(0), "six": f32(6)})


def hard_swish_relu6() -> onnx.ModelProto:
    nodes = [
        node("Add", "x three", "a"),
        node("Relu", "a", "r"),
        node("Min", "r six", "c"),
        node("Mul", "c sixth", "d"),
        node("Mul", "x d", "y"),
    ]
    return model(nodes, X, {"three": f32(3), "six": f32(6), "sixth": f32(1 / 6)})


def hard_swish_hard_sigmoid() -> onnx.ModelProto:
    return model([node("HardSigmoid", "x", "h", alpha=1 / 6, beta=0.5), node("Mul", "x h", "y")], X)


def hard_sigmoid() -> onnx.ModelProto:
    return model([node("HardSigmoid", "x", "y")], X)


def sum_of_three() -> onnx.ModelProto:
    nodes = [node("Relu", "x", "a"), node("Neg", "x", "b"), node("Sum", "a b x", "y")]
    return model(nodes, X)


def sum_broadcast() -> onnx.ModelProto:
    return model([node("Sum", "x p", "y")], {**X, "p": (1, 6, 1, 1)})


def mean_and_extrema() -> onnx.ModelProto:
    nodes = [node("Mean", "x z", "m"), node("Max", "x z", "a"), node("Min", "m a z", "y")]
    return model(nodes, {**X, "z": (1, 6, 5, 7)})


def conv_batch_norm_relu() -> onnx.ModelProto:
    nodes = [
        node("Conv", "x w b", "c", pads=[1, 1, 1, 1], strides=[2, 1]),
        node("BatchNormalization", "c gamma beta mean var", "n"),
        node("Relu", "n", "y"),
    ]
    return model(nodes, X, {"w": _conv(), "b": _rng().normal(size=8).astype("float32"), **_norm(8)})


def transposed_batch_norm() -> onnx.ModelProto:
    nodes = [
        node("ConvTranspose", "x w", "c", strides=[2, 2], output_padding=[1, 1], pads=[1, 1, 1, 1], group=2),
        node("BatchNormalization", "c gamma beta mean var", "y"),
    ]
    return model(nodes, X, {"w": _conv(6, 4), **_norm(8)})


def batch_norm_conv() -> onnx.ModelProto:
    """Pre-activation: nothing in front to fold into."""
    nodes = [
        node("BatchNormalization", "x gamma beta mean var", "n"),
        node("Relu", "n", "r"),
        node("Conv", "r w", "y"),
    ]
    return model(nodes, X, {"w": _conv(), **_norm(6)})


def scaled_conv() -> onnx.ModelProto:
    """A scale and an offset of one element, as re-parameterised networks have them, with odd ranks."""
    nodes = [node("Conv", "x w b", "c"), node("Mul", "s c", "m"), node("Add", "m t", "a"), node("Sub", "a u", "y")]
    weights = {"s": f32(0.7).reshape(1), "t": f32(-0.2).reshape(1, 1, 1), "u": _norm(8)["mean"].reshape(8, 1, 1)}
    return model(nodes, X, {"w": _conv(), "b": _norm(8)["beta"], **weights})


def conv_read_twice() -> onnx.ModelProto:
    """A scale behind a convolution that something else reads as well must stay outside."""
    nodes = [node("Conv", "x w", "c"), node("Mul", "c s", "m"), node("Relu", "c", "r"), node("Add", "m r", "y")]
    return model(nodes, X, {"w": _conv(), "s": _norm(8)["gamma"].reshape(1, 8, 1, 1)})


def one_channel_bias() -> onnx.ModelProto:
    return model([node("Conv", "x w b", "y")], X, {"w": _conv(1), "b": f32(0.3).reshape(1)})


def pad_conv() -> onnx.ModelProto:
    nodes = [node("Pad", "x p", "q"), node("Conv", "q w", "y", pads=[0, 1, 0, 0])]
    return model(nodes, X, {"w": _conv(), "p": np.array([0, 0, 1, 2, 0, 0, 0, 1], "int64")})


def pad_with_ones() -> onnx.ModelProto:
    nodes = [node("Pad", "x p one", "q"), node("Conv", "q w", "y")]
    return model(nodes, X, {"w": _conv(), "p": np.array([0, 0, 1, 2, 0, 0, 0, 1], "int64"), "one": f32(1.0)})


def pad_relu() -> onnx.ModelProto:
    """Padding that no convolution can take over."""
    nodes = [node("Pad", "x p", "q"), node("Relu", "q", "y")]
    return model(nodes, X, {"p": np.array([0, 0, 1, 2, 0, 0, 0, 1], "int64")})


def computed_flatten() -> onnx.ModelProto:
    """Global pooling, then a reshape whose shape is computed from the tensor's, then Gemm."""
    nodes = [
        node("GlobalAveragePool", "x", "p"),
        node("Shape", "p", "s"),
        node("Gather", "s zero", "n"),
        node("Concat", "n minus", "t", axis=0),
        node("Reshape", "p t", "f"),
        node("Dropout", "f", "d"),
        node("Identity", "d", "i"),
        node("Gemm", "i w b", "y", transB=1, alpha=0.5, beta=2.0),
    ]
    weights = {"zero": np.array([0], "int64"), "minus": np.array([-1], "int64")}
    weights |= {"w": _rng().normal(size=(4, 6)).astype("float32"), "b": f32(1, 2, 3, 4)}
    return model(nodes, {"x": ("n", 6, 5, 7)}, weights)


def reduce_mean_flat() -> onnx.ModelProto:
    return model([node("ReduceMean", "x", "y", axes=[2, 3], keepdims=0)], X)


def reduce_mean_kept() -> onnx.ModelProto:
    return model([node("ReduceMean", "x", "y", axes=[-1, -2], keepdims=1)], X)


def whole_average_pool() -> onnx.ModelProto:
    return model([node("AveragePool", "x", "y", kernel_shape=[5, 7])], X)


def split_and_concat() -> onnx.ModelProto:
    nodes = [node("Split", "x", "a b", axis=1), node("Neg", "b", "c"), node("Concat", "c a", "y", axis=1)]
    return model(nodes, X)


def resize_without_roi() -> onnx.ModelProto:
    attributes = {"mode": "linear", "coordinate_transformation_mode": "half_pixel"}
    return model([node("Resize", "x _ s", "y", **attributes)], X, {"s": f32(1, 1, 2, 2)})


def transposes_there_and_back() -> onnx.ModelProto:
    nodes = [
        node("Transpose", "x", "t", perm=[0, 2, 3, 1]),
        node("Relu", "t", "r"),
        node("Transpose", "t", "u", perm=[0, 3, 1, 2]),
        node("Transpose", "r", "v", perm=[0, 3, 1, 2]),
        node("Add", "u v", "y"),
    ]
    return model(nodes, X)


def two_outputs() -> onnx.ModelProto:
    return model([node("Relu", "x", "y"), node("Neg", "y", "z")], X, outputs=("z", "y"))


ALL = {
    build.__name__: build
    for build in (
        clip_by_attributes,
        clip_by_inputs,
        clip_lower,
        clip_lower_zero,
        clip_upper,
        clip_crossed,
        clip_nan,
        relu_then_min,
        hard_swish_op,
        hard_swish_clip_div,
        hard_swish_div_first,
        hard_swish_relu6,
        hard_swish_hard_sigmoid,
        hard_sigmoid,
        sum_of_three,
        sum_broadcast,
        mean_and_extrema,
        conv_batch_norm_relu,
        transposed_batch_norm,
        batch_norm_conv,
        scaled_conv,
        conv_read_twice,
        one_channel_bias,
        pad_conv,
        pad_with_ones,
        pad_relu,
        computed_flatten,
        reduce_mean_flat,
        reduce_mean_kept,
        whole_average_pool,
        split_and_concat,
        resize_without_roi,
        transposes_there_and_back,
        two_outputs,
    )
}
