"""Constant folding of ONNX graphs with nothing but the `onnx` package.

Exporters compute shapes in the graph (Shape, Gather, Concat, Reshape). Once the input shapes are fixed all of that is
constant, and TVM's importer needs it to be. onnxslim folds it only where ONNX Runtime is installed; a model must not
import differently for that, so it is done here and switched off there.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

_SMALL = 1024
"""Constants of at most this many elements take part in shape inference; results of that size are always folded."""
_MAX_GROWTH = 4
_GROWING = ("Expand", "Tile")
_NEVER = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli")


def _inferred_shapes(proto: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors that shape inference determines in full."""
    skeleton = onnx.ModelProto()
    skeleton.ir_version = max(proto.ir_version, 4)
    skeleton.opset_import.extend(proto.opset_import)
    skeleton.functions.extend(proto.functions)
    graph = skeleton.graph
    graph.name = "shapes"
    graph.node.extend(proto.graph.node)
    graph.input.extend(proto.graph.input)
    graph.output.extend(proto.graph.output)
    graph.value_info.extend(proto.graph.value_info)
    for tensor in proto.graph.initializer:
        # Inference copies the model: weights are stood in for by their types.
        if math.prod(tensor.dims) <= _SMALL:
            graph.initializer.append(tensor)
        else:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    inferred = onnx.shape_inference.infer_shapes(skeleton, data_prop=True).graph
    shapes: dict[str, tuple[int, ...]] = {}
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        dims = value.type.tensor_type.shape.dim
        if value.type.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims):
            shapes[value.name] = tuple(dim.dim_value for dim in dims)
    return shapes


def _from_shape(node: onnx.NodeProto, shapes: dict[str, tuple[int, ...]]) -> np.ndarray | None:
    """Value of a node that asks for the shape of a tensor, where that is known."""
    shape = shapes.get(node.input[0]) if node.input else None
    if shape is None or node.op_type not in ("Shape", "Size"):
        return None
    if node.op_type == "Size":
        return np.asarray(math.prod(shape), "int64")
    bounds = {attribute.name: attribute.i for attribute in node.attribute}
    return np.asarray(shape[bounds.get("start", 0) : bounds.get("end", len(shape))], "int64")


def _evaluate(node: onnx.NodeProto, inputs: dict[str, np.ndarray], proto: onnx.ModelProto) -> list[np.ndarray] | None:
    """Outputs of a node of constants; None where it has none that can be stored."""
    outputs = [name for name in node.output if name]
    types = {name: helper.np_dtype_to_tensor_dtype(value.dtype) for name, value in inputs.items()}
    graph = helper.make_graph(
        [node],
        "fold",
        [helper.make_tensor_value_info(name, types[name], value.shape) for name, value in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in outputs],
    )
    try:
        with np.errstate(all="ignore"):
            model = helper.make_model(graph, opset_imports=proto.opset_import)
            values = ReferenceEvaluator(model).run(outputs, inputs)
    except Exception:
        # Not an error of the model: an operator the evaluator does not know stays for the importer to judge.
        return None
    return list(values) if all(isinstance(value, np.ndarray | np.generic) for value in values) else None


def _foldable(node: onnx.NodeProto, constants: dict[str, np.ndarray]) -> bool:
    graphs = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
    return (
        node.domain in ("", "ai.onnx")
        and node.op_type not in _NEVER
        and not any(attribute.type in graphs for attribute in node.attribute)
        and all(name in constants for name in node.input if name)
    )


def _fold_once(proto: onnx.ModelProto, constants: dict[str, np.ndarray], kept: set[str]) -> bool:
    shapes = _inferred_shapes(proto)
    nodes: list[onnx.NodeProto] = []
    for node in proto.graph.node:
        values: list[np.ndarray] | None = None
        known = _from_shape(node, shapes)
        if known is not None:
            values = [known]
        elif node.output[0] not in kept and _foldable(node, constants):
            inputs = {name: constants[name] for name in node.input if name}
            values = _evaluate(node, inputs, proto)
            size = sum(value.size for value in values or [])
            limit = max(_SMALL, _MAX_GROWTH * sum(value.size for value in inputs.values()))
            if values is None or (node.op_type in _GROWING and size > limit):
                kept.add(node.output[0])
                values = None
        if values is None:
            nodes.append(node)
            continue
        for name, value in zip([name for name in node.output if name], values, strict=True):
            constants[name] = np.asarray(value)
            proto.graph.initializer.append(numpy_helper.from_array(constants[name], name))
    changed = len(nodes) < len(proto.graph.node)
    if changed:
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)
    return changed


def fold_constants(proto: onnx.ModelProto) -> None:
    """Replace every node whose value is determined by weights and shapes by an initializer, in place.

    Values that repeat a tensor many times over (Expand, Tile) are left to be computed.
    """
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    kept: set[str] = set()
    while _fold_once(proto, constants, kept):
        pass
