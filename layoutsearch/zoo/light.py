"""The `light` models of the ONNX package (known networks whose weights are constants of one value) with random weights.

Architecture and node names are those of the model zoo; the onnx wheel holds the files for its own backend tests.
"""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from layoutsearch.errors import ModelError

NAMES = ("resnet50", "shufflenet", "squeezenet")
_BATCH_NORM = ("x", "scale", "bias", "mean", "variance")


def light(name: str, seed: int = 0) -> onnx.ModelProto:
    """A light model with seeded weights.

    Raises:
        ModelError: the installed onnx package does not hold it.
    """
    path = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / f"light_{name}.onnx"
    if not path.is_file():
        raise ModelError(f"the onnx package {onnx.__version__} has no {path.name}; install onnx 1.16 to 1.19")
    model = onnx.load(path)
    graph = model.graph
    shapes = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
    made = {n.output[0]: n for n in graph.node if n.op_type == "ConstantOfShape"}
    uses = {value: (n, i) for n in graph.node for i, value in enumerate(n.input)}
    last = [n for n in graph.node if n.op_type in ("Gemm", "Conv")][-1]
    # What remains of constants of one value: small ones that the files hold as they are.
    plain = {i.name: shapes[i.name].shape for i in graph.initializer if i.name in uses and _is_weight(uses[i.name])}
    wanted = {**plain, **{value: tuple(shapes[n.input[0]]) for value, n in made.items()}}
    drawn = [numpy_helper.from_array(_weight(value, tuple(shape), uses[value], seed, last), value)
             for value, shape in wanted.items() if value in uses]  # fmt: skip
    taken = {n.input[0] for n in made.values()} | set(plain)
    kept = [i for i in graph.initializer if i.name in uses and i.name not in taken]
    nodes = [n for n in graph.node if n.op_type != "ConstantOfShape"]
    for field, values in (("initializer", [*kept, *drawn]), ("node", nodes)):
        graph.ClearField(field)
        getattr(graph, field).extend(values)
    named = {i.name for i in graph.initializer}
    inputs = [i for i in graph.input if i.name not in named | taken and i.name in uses]
    graph.ClearField("input")
    graph.input.extend(inputs)
    return model


def _is_weight(use: tuple[onnx.NodeProto, int]) -> bool:
    node, index = use
    return index > 0 and node.op_type in ("Conv", "BatchNormalization", "Gemm")


def _weight(
    name: str, shape: tuple[int, ...], use: tuple[onnx.NodeProto, int], seed: int, last: onnx.NodeProto
) -> np.ndarray:
    """Drawn by the seed and the name, so that activations keep their scale from layer to layer (He et al. 2015)."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    node, index = use
    if node.op_type == "BatchNormalization":
        role = _BATCH_NORM[index]
        # Half of what a branch makes, so that sixteen residual sums do not add up to 2^16.
        center = {"scale": 0.5, "variance": 1.0}.get(role, 0.0)
        return (center + rng.uniform(-0.2, 0.2, shape)).astype(np.float32)
    if len(shape) == 1:
        return rng.uniform(-0.1, 0.1, shape).astype(np.float32)
    fan_in = shape[1] * int(np.prod(shape[2:]))
    # Scores of moderate size, so that a softmax says something of all of them.
    gain = 0.5 if node.input[1] == last.input[1] else 2.0
    return (rng.standard_normal(shape) * np.sqrt(gain / fan_in)).astype(np.float32)


LIGHT = {name: partial(light, name) for name in NAMES}
"""Name -> builder, which takes a seed."""
