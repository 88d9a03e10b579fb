"""Writes ONNX graphs of convolutional networks with seeded weights.

Weights are drawn so that activations keep their scale from layer to layer (He et al. 2015): a model whose activations
vanish or explode would run on denormals or NaN, and be compared on outputs that say nothing.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
IR_VERSION = 8
_EPSILON = 1e-5


class Network:
    """A graph under construction. Methods add an operator and return the name of its result.

    Shapes are NCHW; channel counts are kept by name, spatial extents are left to shape inference.

    Args:
        name: of the graph.
        shape: of the only input, `input`.
        seed: of the weights; a weight depends on the seed and its own name only.
    """

    def __init__(self, name: str, shape: Sequence[int], seed: int) -> None:
        self._name, self._shape, self._seed = name, tuple(shape), seed
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._channels = {"input": int(shape[1])}
        self.input = "input"

    def channels(self, value: str) -> int:
        """Channels of a result."""
        return self._channels[value]

    def conv(
        self,
        value: str,
        channels: int,
        kernel: int,
        stride: int = 1,
        *,
        groups: int = 1,
        bias: bool = False,
        gain: float = 2.0,
    ) -> str:
        """A convolution with padding that keeps the size at stride 1 (`kernel` odd).

        `gain` is the factor by which what follows divides the mean square: 2 for ReLU, 1 for none.
        """
        fan_in = self._channels[value] // groups * kernel * kernel
        name = self._fresh("conv")
        shape = (channels, self._channels[value] // groups, kernel, kernel)
        inputs = [value, self._normal(f"{name}.weight", shape, math.sqrt(gain / fan_in))]
        if bias:
            inputs.append(self._normal(f"{name}.bias", (channels,), 0.05))
        window = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [kernel // 2] * 4}
        return self._add("Conv", name, inputs, channels, group=groups, **window)

    def conv_transpose(self, value: str, channels: int, kernel: int = 2, stride: int = 2, *, bias: bool = True) -> str:
        """A transposed convolution without padding: with `kernel` equal to `stride` it multiplies the size by it."""
        # Each result reads every input channel through (kernel / stride)^2 taps.
        fan_in = self._channels[value] * (kernel / stride) ** 2
        name = self._fresh("up")
        inputs = [
            value,
            self._normal(f"{name}.weight", (self._channels[value], channels, kernel, kernel), math.sqrt(1 / fan_in)),
        ]
        if bias:
            inputs.append(self._normal(f"{name}.bias", (channels,), 0.05))
        return self._add("ConvTranspose", name, inputs, channels, kernel_shape=[kernel] * 2, strides=[stride] * 2)

    def batch_norm(self, value: str) -> str:
        """Batch normalization with statistics near those of its input, so that it neither shrinks nor blows it up."""
        channels, name = self._channels[value], self._fresh("bn")
        generator = self._generator(name)
        parts = {
            "scale": generator.uniform(0.8, 1.2, channels),
            "bias": generator.normal(0, 0.05, channels),
            "mean": generator.normal(0, 0.05, channels),
            "var": generator.uniform(0.8, 1.2, channels),
        }
        inputs = [value, *(self._weight(f"{name}.{part}", values) for part, values in parts.items())]
        return self._add("BatchNormalization", name, inputs, channels, epsilon=_EPSILON)

    def relu(self, value: str) -> str:
        """max(x, 0)."""
        return self._add("Relu", self._fresh("relu"), [value], self._channels[value])

    def relu6(self, value: str) -> str:
        """min(max(x, 0), 6)."""
        low, high = self._scalar("zero", 0.0), self._scalar("six", 6.0)
        return self._add("Clip", self._fresh("relu6"), [value, low, high], self._channels[value])

    def sigmoid(self, value: str) -> str:
        """1 / (1 + exp(-x))."""
        return self._add("Sigmoid", self._fresh("sigmoid"), [value], self._channels[value])

    def add(self, a: str, b: str) -> str:
        """Sum of two results of one shape."""
        return self._add("Add", self._fresh("add"), [a, b], self._channels[a])

    def concat(self, *values: str) -> str:
        """Concatenation along channels."""
        return self._add("Concat", self._fresh("concat"), list(values), sum(map(self.channels, values)), axis=1)

    def max_pool(self, value: str, size: int = 2, stride: int = 2) -> str:
        """Maximum over windows, without padding."""
        window = {"kernel_shape": [size] * 2, "strides": [stride] * 2}
        return self._add("MaxPool", self._fresh("pool"), [value], self._channels[value], **window)

    def global_average(self, value: str) -> str:
        """Average over all positions, flattened to (N, C)."""
        pooled = self._add("GlobalAveragePool", self._fresh("gap"), [value], self._channels[value])
        return self.flatten(pooled, self._channels[value])

    def flatten(self, value: str, features: int) -> str:
        """To (N, features)."""
        return self._add("Flatten", self._fresh("flatten"), [value], features, axis=1)

    def dense(self, value: str, features: int, gain: float = 1.0) -> str:
        """A fully connected layer with bias."""
        fan_in, name = self._channels[value], self._fresh("fc")
        weight = self._normal(f"{name}.weight", (features, fan_in), math.sqrt(gain / fan_in))
        bias = self._normal(f"{name}.bias", (features,), 0.05)
        return self._add("Gemm", name, [value, weight, bias], features, transB=1)

    def model(self, output: str) -> onnx.ModelProto:
        """The finished model; its output is called `output`.

        Raises:
            onnx.checker.ValidationError: the graph is not valid ONNX.
        """
        self._nodes.append(helper.make_node("Identity", [output], ["output"], name="output"))
        image = helper.make_tensor_value_info("input", TensorProto.FLOAT, self._shape)
        weights = [helper.make_tensor_value_info(w.name, w.data_type, w.dims) for w in self._weights]
        # Checked with the weights as inputs: the checker copies hundreds of megabytes of them several times.
        light = self._proto([image, *weights], helper.make_tensor_value_info("output", TensorProto.FLOAT, None), ())
        light = onnx.shape_inference.infer_shapes(light, strict_mode=True)
        onnx.checker.check_model(light, full_check=True)
        return self._proto([image], light.graph.output[0], self._weights)

    def _proto(
        self,
        inputs: Sequence[onnx.ValueInfoProto],
        output: onnx.ValueInfoProto,
        weights: Sequence[onnx.TensorProto],
    ) -> onnx.ModelProto:
        graph = helper.make_graph(self._nodes, self._name, list(inputs), [output], initializer=list(weights))
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="layoutsearch")
        proto.ir_version = IR_VERSION
        return proto

    def _add(self, op: str, name: str, inputs: Sequence[str], channels: int, **attributes: object) -> str:
        self._nodes.append(helper.make_node(op, list(inputs), [name], name=name, **attributes))
        self._channels[name] = channels
        return name

    def _fresh(self, kind: str) -> str:
        return f"{kind}_{sum(node.name.startswith(f'{kind}_') for node in self._nodes)}"

    def _generator(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self._seed, zlib.crc32(name.encode())])

    def _normal(self, name: str, shape: Sequence[int], scale: float) -> str:
        values = self._generator(name).standard_normal(tuple(shape), dtype=np.float32)
        return self._weight(name, values * np.float32(scale))

    def _weight(self, name: str, values: npt.NDArray[np.floating]) -> str:
        self._weights.append(numpy_helper.from_array(values.astype(np.float32, copy=False), name))
        return name

    def _scalar(self, name: str, value: float) -> str:
        if all(weight.name != name for weight in self._weights):
            self._weights.append(numpy_helper.from_array(np.array(value, dtype=np.float32), name))
        return name
