"""Real models: PP-OCR from the demo's wheel, and the `onnx` package's light zoo with random weights put in.

Files are kept under `models/` at the top of the repository, which git ignores.
"""

from __future__ import annotations

import os
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from layoutsearch.demo import CLASSIFIER, DETECTOR, fetch_demo_model

MODELS = Path(__file__).resolve().parents[2] / "models"
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
SATURATING = ("Softmax", "Sigmoid", "LogSoftmax")


@cache
def detector_path() -> Path:
    """PP-OCRv4 text detector; input `x` of (?, 3, ?, ?), height and width multiples of 32."""
    return fetch_demo_model(MODELS, DETECTOR)


@cache
def classifier_path() -> Path:
    """PP-OCR angle classifier; input `x` of (?, 3, 48, 192)."""
    return fetch_demo_model(MODELS, CLASSIFIER)


def _weight(role: tuple[str, int], shape: tuple[int, ...], rng: np.random.Generator, residual: bool) -> np.ndarray:
    """Random values for what an operator reads at one position, such that activations keep their scale."""
    op, position = role
    if op in ("Conv", "ConvTranspose") and position == 1:
        fan_in = np.prod(shape[1:]) if op == "Conv" else np.prod([shape[0], *shape[2:]])
        return rng.normal(0, np.sqrt(2 / fan_in), shape)
    if op in ("Gemm", "MatMul") and position == 1:
        return rng.normal(0, np.sqrt(1 / max(shape)), shape)
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
    kept = [init for init in graph.initializer if init.name not in weights]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    for name, shape in weights.items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        value = _weight(roles[name], shape, rng, residual=name in branch_ends).astype("float32")
        graph.initializer.append(numpy_helper.from_array(value, name))
    # Weights need not be among the inputs from version 4 on.
    proto.ir_version = max(proto.ir_version, 4)
    return proto


def light(name: str, seed: int = 0) -> onnx.ModelProto:
    """A model of the light zoo (`resnet50`, `squeezenet`, `shufflenet`, `densenet121`, ...) with random weights."""
    return randomize(onnx.load(str(LIGHT / f"light_{name}.onnx")), seed)


def light_path(name: str, seed: int = 0) -> Path:
    """`light` as a file."""
    path = MODELS / "light" / f"{name}-{seed}.onnx"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        onnx.save(light(name, seed), str(part))
        os.replace(part, path)
    return path


def logits(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy that ends before its last softmax or sigmoid, where differences are not squeezed to nothing."""
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    graph = proto.graph
    producers = {name: node for node in graph.node for name in node.output}
    for output in graph.output:
        node = producers[output.name]
        while node.op_type in ("Identity", "Reshape"):
            node = producers[node.input[0]]
        if node.op_type in SATURATING:
            output.name = node.input[0]
            output.type.tensor_type.ClearField("shape")
    used: set[str] = {output.name for output in graph.output}
    for node in reversed(list(graph.node)):
        if used & set(node.output):
            used |= set(node.input)
        else:
            graph.node.remove(node)
    return proto
