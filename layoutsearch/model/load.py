"""Models from files or from memory, as Relax modules with fixed shapes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import tvm
from tvm import relax

from layoutsearch.errors import ModelError
from layoutsearch.model.onnx_import import import_onnx, read_onnx
from layoutsearch.model.passes.structure import main_function
from layoutsearch.model.shapes import Dims, parse_shapes, resolve_shapes

__all__ = ["LoadedModel", "ModelInput", "ModelOutput", "load", "parse_shapes"]


@dataclass(frozen=True)
class ModelInput:
    """A tensor that `main` takes.

    Attributes:
        name: the name in the model file (an ONNX name need not be an identifier).
        shape: extents in the model's own axis order.
        dtype: element type, e.g. `float32`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ModelOutput:
    """A tensor that `main` returns; see ModelInput. A Relax module's are called `output0`, `output1`, ..."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class LoadedModel:
    """A model as it was imported.

    Attributes:
        module: the Relax module as the importer gave it, shapes fixed, nothing rewritten.
        name: file name without suffix, or `model`.
        inputs: the parameters of `main` in order. Weights that the module takes as parameters are among them.
        outputs: what `main` returns, in order.
    """

    module: tvm.IRModule
    name: str
    inputs: tuple[ModelInput, ...]
    outputs: tuple[ModelOutput, ...]


def _tensor(ty: tvm.ir.Type, what: str) -> tuple[tuple[int, ...], str]:
    shape = ty.shape if isinstance(ty, relax.TensorType) else None
    if shape is None or not isinstance(shape, relax.ShapeExpr):
        raise ModelError(f"{what} is no tensor with a known shape (it is {ty}); layoutsearch tunes fixed shapes only")
    extents = [getattr(extent, "value", None) for extent in shape.values]
    if any(extent is None for extent in extents) or ty.dtype is None:
        raise ModelError(f"{what} has shape {list(shape.values)}, which is not fixed; give --shape")
    return tuple(int(extent.value) for extent in shape.values), str(ty.dtype)


def _describe(
    module: tvm.IRModule, name: str, inputs: Sequence[str], outputs: Sequence[str] | None = None
) -> LoadedModel:
    main = main_function(module)
    ret = main.ret_ty
    fields = list(ret.fields) if isinstance(ret, relax.TupleType) else [ret]
    names = outputs if outputs is not None else [f"output{i}" for i in range(len(fields))]
    if len(inputs) != len(main.params) or len(names) != len(fields):
        raise ModelError(
            f"{name}: the importer gave {len(main.params)} inputs and {len(fields)} outputs, the model declares "
            f"{len(inputs)} and {len(names)}"
        )
    return LoadedModel(
        module,
        name,
        tuple(ModelInput(n, *_tensor(p.ty, f"input {n!r}")) for n, p in zip(inputs, main.params, strict=True)),
        tuple(ModelOutput(n, *_tensor(t, f"output {n!r}")) for n, t in zip(names, fields, strict=True)),
    )


def _declared(param: relax.Var) -> Dims | None:
    shape = param.ty.shape if isinstance(param.ty, relax.TensorType) else None
    if not isinstance(shape, relax.ShapeExpr):
        return None
    return tuple(int(e.value) if hasattr(e, "value") else str(e) for e in shape.values)


def _fix_symbols(module: tvm.IRModule, shapes: Mapping[str, Sequence[int]] | None) -> tvm.IRModule:
    """Replace the symbolic extents of a Relax module's parameters by numbers."""
    main = main_function(module)
    declared = {param.name: _declared(param) for param in main.params}
    fixed = resolve_shapes(declared, shapes)
    values: dict[object, int] = {}
    for param in main.params:
        for extent, number in zip(param.ty.shape.values, fixed[param.name], strict=True):
            known = getattr(extent, "value", None)
            if known is None and isinstance(extent, tvm.ir.Var):
                known = values.setdefault(extent, number)
            if known != number:
                raise ModelError(
                    f"--shape gives input {param.name!r} the extent {number} where the module has {extent}"
                    f"{'' if known is None else f' = {known}'}; give matching shapes"
                )
    return relax.transform.BindSymbolicVars(values, "main")(module) if values else module


def _load_relax(module: tvm.IRModule, name: str, shapes: Mapping[str, Sequence[int]] | None) -> LoadedModel:
    params = main_function(module).params
    for param in params:
        if not isinstance(param.ty, relax.TensorType):
            raise ModelError(f"{name}: input {param.name!r} is {param.ty}; only tensors can be inputs")
    return _describe(_fix_symbols(module, shapes), name, [param.name for param in params])


def _read_relax(path: Path) -> tvm.IRModule:
    try:
        module = tvm.ir.load_json(path.read_text(encoding="utf-8"))
    except Exception as error:
        # Whatever is wrong with a foreign file, and TVM's reader has many ways to say so.
        raise ModelError(f"{path}: not a Relax module saved with tvm.ir.save_json by TVM {tvm.__version__}") from error
    if not isinstance(module, tvm.IRModule):
        raise ModelError(f"{path}: holds a {type(module).__name__}, expected an IRModule saved with tvm.ir.save_json")
    return module


def load(
    source: str | os.PathLike[str] | tvm.IRModule | onnx.ModelProto,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> LoadedModel:
    """Load a model.

    Args:
        source: an ONNX file, a Relax module saved with `tvm.ir.save_json`, or either as an object.
        shapes: shapes by input name; needed for inputs with dynamic extents, and they win over fixed ones in ONNX.

    Returns:
        The imported module and what it takes and returns.

    Raises:
        ModelError: the file is not there or not a model, an operator is not supported, or the shapes do not fit.
    """
    if isinstance(source, tvm.IRModule):
        return _load_relax(source, "model", shapes)
    if isinstance(source, onnx.ModelProto):
        name = source.graph.name or "model"
        module, inputs, outputs = import_onnx(source, name, shapes)
        return _describe(module, name, inputs, outputs)
    path = Path(source)
    if not path.is_file():
        raise ModelError(f"{path}: no such file; expected an ONNX file or a Relax module saved with tvm.ir.save_json")
    with path.open("rb") as file:
        start = file.read(64).lstrip()
    if start.startswith(b"{"):
        return _load_relax(_read_relax(path), path.stem, shapes)
    if path.suffix == ".py":
        raise ModelError(f"{path}: Python files are not run; save the module with tvm.ir.save_json, or pass the object")
    module, inputs, outputs = import_onnx(read_onnx(path), str(path), shapes)
    return _describe(module, path.stem, inputs, outputs)
