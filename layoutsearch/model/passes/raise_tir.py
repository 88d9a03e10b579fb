"""Calls of kernels that the ONNX importer has written out become the Relax ops they stand for.

The importer emits Clip as two elementwise PrimFuncs and Pad as one, which no layout can pass through.
"""

from __future__ import annotations

import numpy as np
import tvm_ffi
from tvm import relax, tirx, topi
from tvm.ir import TensorLoad
from tvm.ir.prim import FloatImm, IntImm, Max, Min, Sub

from layoutsearch.model.passes.rewriter import Expr, Scope, dtype_of, static_shape


def _statement(func: tirx.PrimFunc) -> tirx.BufferStore | None:
    """The only store of an elementwise PrimFunc, else None."""
    node = func.body
    while not isinstance(node, tirx.BufferStore):
        if hasattr(node, "block"):
            node = node.block.body
        elif hasattr(node, "body"):
            node = node.body
        else:
            return None
    return node


def _operand(node: object, func: tirx.PrimFunc, store: tirx.BufferStore) -> int | float | None:
    """Position of the parameter an elementwise operand reads, or the immediate it is (as float)."""
    if isinstance(node, FloatImm):
        return float(node.value)
    if not isinstance(node, TensorLoad):
        return None
    # A zero stands for an axis of extent one, which Relax broadcasts in the same way.
    aligned = all(
        index.same_as(target) or (isinstance(index, IntImm) and index.value == 0)
        for index, target in zip(node.indices, store.indices, strict=False)
    )
    if len(node.indices) not in (0, len(store.indices)) or not aligned:
        return None
    positions = [i for i, param in enumerate(func.params) if param.same_as(node.source)]
    return positions[0] if positions else None


def raise_extremum(call: relax.Call, scope: Scope) -> Expr | None:
    """`call_tir` of an elementwise maximum or minimum becomes the Relax op."""
    func = scope.function(call.args[0])
    operands = list(call.args[1].fields)
    store = _statement(func) if isinstance(func, tirx.PrimFunc) else None
    if store is None or not isinstance(store.value, Max | Min):
        return None
    exprs: list[Expr] = []
    for node in (store.value.a, store.value.b):
        operand = _operand(node, func, store)
        if isinstance(operand, float):
            exprs.append(relax.const(np.asarray(operand, dtype_of(call))))
        elif operand is not None and operand < len(operands):
            exprs.append(operands[operand])
        else:
            return None
    build = relax.op.maximum if isinstance(store.value, Max) else relax.op.minimum
    return build(*exprs)


def _shift(index: object, target: object) -> int | None:
    """How far before `target` an index reads: `i` reads 0 before `i`, `i - 2` reads 2 before."""
    if isinstance(index, IntImm):
        return 0
    if isinstance(index, Sub) and index.a.same_as(target) and isinstance(index.b, IntImm):
        return int(index.b.value)
    return 0 if index.same_as(target) else None  # type: ignore[attr-defined]


def raise_pad(call: relax.Call, scope: Scope) -> Expr | None:
    """`call_tir` of a padding with a constant becomes `nn.pad`.

    The widths are read off the kernel; it counts as a padding only if TVM's own padding by these widths is the same.
    """
    func, operands = scope.function(call.args[0]), list(call.args[1].fields)
    store = _statement(func) if isinstance(func, tirx.PrimFunc) and len(operands) == 1 else None
    args = list(getattr(store.value, "args", [])) if store is not None else []
    if store is None or len(args) != 3 or not isinstance(args[1], TensorLoad) or not isinstance(args[2], FloatImm):
        return None
    inner, outer = static_shape(operands[0]), static_shape(call)
    if inner is None or outer is None or len(inner) != len(outer) or len(args[1].indices) != len(outer):
        return None
    before = [_shift(index, target) for index, target in zip(args[1].indices, store.indices, strict=True)]
    if None in before:
        return None
    after = [out - size - int(lead or 0) for out, size, lead in zip(outer, inner, before, strict=True)]
    value = float(args[2].value)
    builder = relax.BlockBuilder()
    data = relax.Var("data", operands[0].ty)
    with builder.function("main", [data]):
        builder.emit_func_output(builder.emit_te(topi.nn.pad, data, before, after, value))
    reference = next(f for f in builder.get().functions.values() if isinstance(f, tirx.PrimFunc))
    if not tvm_ffi.structural_equal(reference, func):
        return None
    widths = [int(width or 0) for pair in zip(before, after, strict=True) for width in pair]
    return relax.op.nn.pad(operands[0], widths, pad_mode="constant", pad_value=value)


RULES = {"relax.call_tir": [raise_extremum, raise_pad]}
