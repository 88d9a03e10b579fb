"""ONNX models into Relax: shapes fixed, graph simplified, operators converted."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import onnx
import tvm
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tvm.relax.frontend.onnx import from_onnx

from layoutsearch.errors import ModelError
from layoutsearch.model.onnx_fold import fold_constants
from layoutsearch.model.shapes import Dims, resolve_shapes


def read_onnx(path: Path) -> onnx.ModelProto:
    """Read an ONNX file, with the weights it keeps in other files beside it.

    Raises:
        ModelError: the file is no ONNX model, is cut off, or the files with its weights are not there.
    """
    try:
        proto = onnx.load(str(path), load_external_data=False)
    except (DecodeError, ValueError) as error:
        raise ModelError(
            f"{path}: not an ONNX model, or cut off ({_first_line(error)}); expected an .onnx file or a Relax module "
            "saved with tvm.ir.save_json"
        ) from error
    if not proto.graph.node and not proto.graph.output:
        raise ModelError(f"{path}: not an ONNX model (no graph inside); expected an .onnx file")
    try:
        onnx.load_external_data_for_model(proto, str(path.parent))
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise ModelError(
            f"{path}: the file with its weights cannot be read ({_first_line(error)}); put it beside the model"
        ) from error
    return proto


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def model_inputs(proto: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """The inputs of a graph that are not weights: old files list their initializers among the inputs."""
    weights = {tensor.name for tensor in proto.graph.initializer}
    weights |= {tensor.values.name for tensor in proto.graph.sparse_initializer}
    return [value for value in proto.graph.input if value.name not in weights]


def _declared(value: onnx.ValueInfoProto) -> Dims | None:
    if not value.type.HasField("tensor_type"):
        raise ModelError(
            f"input {value.name!r} is no tensor ({value.type.WhichOneof('value')}), which is not supported"
        )
    if not value.type.tensor_type.HasField("shape"):
        return None
    dims: list[int | str | None] = []
    for dim in value.type.tensor_type.shape.dim:
        fixed = dim.HasField("dim_value") and dim.dim_value > 0
        dims.append(dim.dim_value if fixed else (dim.dim_param or None))
    return tuple(dims)


def _fix_shapes(proto: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write the input shapes into the graph and drop every shape that was inferred from the old ones."""
    changed = False
    for value in model_inputs(proto):
        changed |= _declared(value) != shapes[value.name]
        shape = value.type.tensor_type.shape
        del shape.dim[:]
        for extent in shapes[value.name]:
            shape.dim.add().dim_value = extent
    if changed:
        del proto.graph.value_info[:]
        for value in proto.graph.output:
            value.type.tensor_type.ClearField("shape")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what onnxslim and the importer print out of the user's terminal; their exceptions pass."""
    root = logging.getLogger()
    level = root.level
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            root.setLevel(level)


def _opset(proto: onnx.ModelProto) -> int:
    return next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 1)


def _forget(error: BaseException) -> None:
    """Drop what the frames of a failed import hold: TVM prints a warning when its half-built function goes away."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with open(os.devnull, "w") as sink:
            os.dup2(sink.fileno(), 2)
        traceback.clear_frames(error.__traceback__)
        gc.collect()
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _simplify(proto: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """Fold what the shapes determine; keep inputs that nothing reads, which onnxslim drops."""
    import onnxslim

    inputs = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in model_inputs(proto)]
    try:
        with _quiet():
            fold_constants(proto)
            # Its own folding would depend on whether ONNX Runtime is installed, its shape inference refuses opset 6.
            skip = ["constant_folding"]
            slim = onnxslim.slim(proto, skip_optimizations=skip, no_shape_infer=_opset(proto) < 7)
            fold_constants(slim)
    except Exception as error:
        raise ModelError(
            f"{name}: simplifying the graph failed ({type(error).__name__}: {_first_line(error)}); "
            "check that the file runs elsewhere with these input shapes"
        ) from error
    kept = {value.name: value for value in model_inputs(slim)}
    del slim.graph.input[:]
    slim.graph.input.extend(kept.get(value.name, value) for value in inputs)
    return slim


def _unsupported(proto: onnx.ModelProto) -> list[str]:
    """Operators the importer has no converter for."""
    from tvm.relax.frontend.onnx.onnx_frontend import _get_convert_map

    known = set(_get_convert_map()) | {"Constant", "If"}
    return sorted({node.op_type for node in proto.graph.node if node.op_type not in known})


def import_onnx(
    proto: onnx.ModelProto, name: str, shapes: Mapping[str, Sequence[int]] | None
) -> tuple[tvm.IRModule, list[str], list[str]]:
    """Convert an ONNX model.

    Args:
        proto: the model; it is not changed.
        name: what to call it in errors.
        shapes: shapes of its inputs, at least of the dynamic ones.

    Returns:
        The Relax module with the weights inside, and the names of the inputs and outputs in the order of its `main`.

    Raises:
        ModelError: a shape is missing or wrong, or an operator is not supported.
    """
    source, proto = proto, onnx.ModelProto()
    proto.CopyFrom(source)
    inputs = [value.name for value in model_inputs(proto)]
    outputs = [value.name for value in proto.graph.output]
    _fix_shapes(proto, resolve_shapes({v.name: _declared(v) for v in model_inputs(proto)}, shapes))
    proto = _simplify(proto, name)
    unsupported = _unsupported(proto)
    if unsupported:
        raise ModelError(
            f"{name}: TVM's ONNX importer has no operator {', '.join(unsupported)}; export the model without it"
        )
    try:
        with _quiet():
            module = from_onnx(proto, keep_params_in_input=False)
    except Exception as error:
        reason = f"{type(error).__name__}: {_first_line(error)}"
        _forget(error)
        raise ModelError(
            f"{name}: TVM cannot import the model ({reason}); check the input shapes, or export it with another opset"
        ) from error
    return module, inputs, outputs
