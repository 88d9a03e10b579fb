"""The `light` models of the onnx package (known networks whose weights are all of one value) with random weights.

The onnx wheel holds the files for its own backend tests; architecture and names are those of the model zoo.
"""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from layoutsearch.errors import ModelError

LIGHT = ("resnet50", "shufflenet", "squeezenet")
"""Those that are offered by name; `light` makes any other one too."""


def light(name: str, seed: int = 0) -> onnx.ModelProto:
    """A light model (`resnet50`, `squeezenet`, `shufflenet`, `densenet121`, ...) with seeded weights.

    Raises:
        ModelError: the installed onnx package does not hold it.
    """
    path = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / f"light_{name}.onnx"
    if not path.is_file():
        raise ModelError(f"the onnx package {onnx.__version__} has no {path.name}; install another version of onnx")
    return randomize(onnx.load(str(path)), seed)


def _weight(role: tuple[str, int], shape: tuple[int, ...], rng: np.random.Generator, residual: bool) -> np.ndarray:
    """Random values for what an operator reads at one position, such that activations keep their scale."""
    op, position = role
    if op in ("Conv", "ConvTranspose") and position == 1:
        fan_in = np.prod(shape[1:]) if op == "Conv" else np.prod([shape[0], *shape[2:]])
        return rng.normal(0, np.sqrt(2 / fan_in), shape)
    if op in ("Gemm", "MatMul") and position == 1:
        # Scores of moderate size, so that a softmax behind them says something of all classes.
        return rng.normal(0, np.sqrt(0.1 / max(shape)), shape)
    if op == "BatchNormalization" and position == 1:
        # A branch that ends in a residual sum is scaled down, or the sum doubles its variance with every block.
        return rng.uniform(0.8, 1.2, shape) * (0.3 if residual else 1.0)
    if op == "BatchNormalization" and position == 4:
        return rng.uniform(0.6, 1.4, shape)
    if op == "Mul":
        return rng.uniform(0.8, 1.2, shape)
    return rng.normal(0, 0.05, shape)


def randomize(proto: onnx.ModelProto, seed: int = 0) -> onnx.ModelProto:
    """A copy of a model whose float weights (initializers and ConstantOfShape) are seeded random numbers."""
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    graph = proto.graph
    roles: dict[str, tuple[str, int]] = {}
    summed = {name for node in graph.node if node.op_type in ("Sum", "Add") for name in node.input}
    branch_ends = {name for node in graph.node if summed & set(node.output) for name in node.input}
    for node in graph.node:
        for position, name in enumerate(node.input):
            roles.setdefault(name, (node.op_type, position))

    shapes = {init.name: numpy_helper.to_array(init) for init in graph.initializer}
    weights = {name: value.shape for name, value in shapes.items() if value.dtype == np.float32 and value.size > 1}
    for node in [node for node in graph.node if node.op_type == "ConstantOfShape"]:
        weights[node.output[0]] = tuple(int(extent) for extent in shapes[node.input[0]])
        graph.node.remove(node)
    read = {name for node in graph.node for name in node.input}
    kept = [init for init in graph.initializer if init.name not in weights and init.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    for name, shape in weights.items():
        if name not in read:
            continue
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        value = _weight(roles[name], shape, rng, residual=name in branch_ends).astype("float32")
        graph.initializer.append(numpy_helper.from_array(value, name))
    # Weights need not be among the inputs from version 4 on, and a runtime folds only those that are not.
    proto.ir_version = max(proto.ir_version, 4)
    named = {init.name for init in graph.initializer}
    inputs = [value for value in graph.input if value.name in read and value.name not in named]
    del graph.input[:]
    graph.input.extend(inputs)
    return proto


BUILDERS = {name: partial(light, name) for name in LIGHT}
"""Name -> builder, which takes a seed."""
