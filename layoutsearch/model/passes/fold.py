"""Evaluate calls whose operands are all constant.

TVM's FoldConstant compiles a kernel for each such call; an imported model has a hundred of them, nearly all reshapes
and scalar arithmetic, which numpy does at once. What numpy has no entry for still goes through FoldConstant, one call
at a time, so that a result much larger than its operands (a broadcast weight) is never stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst, Op

from layoutsearch.model.passes.rewriter import Expr, Scope, dtype_of, is_float, op_name, static_shape

MAX_GROWTH = 4
"""A folded result may have this many times the elements of its operands."""
SMALL = 1024
"""Results of at most this many elements are folded whatever their operands."""


def _axes(value: object) -> tuple[int, ...] | None:
    return None if value is None else tuple(int(getattr(a, "value", a)) for a in value)  # type: ignore[attr-defined]


_ELEMENTWISE: dict[str, Callable[..., np.ndarray]] = {
    "relax.add": np.add,
    "relax.subtract": np.subtract,
    "relax.multiply": np.multiply,
    "relax.divide": np.divide,
    "relax.power": np.power,
    "relax.maximum": np.maximum,
    "relax.minimum": np.minimum,
    "relax.negative": np.negative,
    "relax.sqrt": np.sqrt,
    "relax.rsqrt": lambda x: 1 / np.sqrt(x),
    "relax.isnan": np.isnan,
    "relax.where": np.where,
}

_SHAPE_ONLY = ("relax.reshape", "relax.broadcast_to", "relax.squeeze", "relax.expand_dims", "relax.flatten")


def _evaluate(call: relax.Call, operands: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray | None:
    name = op_name(call)
    if name in _SHAPE_ONLY:
        return operands[0].reshape(shape)
    if name == "relax.permute_dims":
        return np.transpose(operands[0], _axes(call.attrs.axes))
    if name == "relax.astype":
        return operands[0].astype(dtype_of(call))
    # Integer division and integer overflow are not numpy's in every case: leave those to TVM.
    if name in _ELEMENTWISE and (is_float(call) or name in ("relax.isnan", "relax.where")):
        with np.errstate(all="ignore"):
            return _ELEMENTWISE[name](*operands)
    return None


def _evaluate_with_tvm(call: relax.Call) -> Expr | None:
    builder = relax.BlockBuilder()
    with builder.function("main", []):
        with builder.dataflow():
            output = builder.emit_output(relax.Call(call.op, call.args, call.attrs, call.ty_args))
        builder.emit_func_output(output)
    with tvm.target.Target("llvm"):
        folded = relax.transform.FoldConstant()(builder.get())["main"]
    # A folded output is no longer bound to anything: it is the body itself.
    return folded.body.body if isinstance(folded.body.body, GenericConst) else None


def fold_constant(call: relax.Call, scope: Scope) -> Expr | None:
    """Replace a pure call of constants by its value, unless the value is much larger than the operands."""
    if not isinstance(call.op, Op) or op_name(call).startswith("relax.call_"):
        return None
    tensors = [arg for arg in call.args if isinstance(arg.ty, relax.TensorType | relax.TupleType)]
    flat = [field for arg in tensors for field in (arg.fields if isinstance(arg, relax.Tuple) else [arg])]
    shape = static_shape(call)
    if shape is None or not all(isinstance(arg, GenericConst) for arg in flat) or not call.op.get_attr("FPurity"):
        return None
    operands = [arg.value.numpy() for arg in flat]
    elements = math.prod(shape)
    if op_name(call) == "relax.broadcast_to" and elements > operands[0].size:
        # Elementwise consumers broadcast by themselves; a bound or a bias must not grow to the size of the image.
        return None
    if elements > SMALL and elements > MAX_GROWTH * sum(value.size for value in operands):
        return None
    value = _evaluate(call, operands, shape)
    if value is None:
        return _evaluate_with_tvm(call)
    if value.shape != shape:
        raise AssertionError(f"folding {op_name(call)} gave shape {value.shape}, its type says {shape}")
    return relax.const(np.ascontiguousarray(value, dtype=dtype_of(call)).reshape(shape))
