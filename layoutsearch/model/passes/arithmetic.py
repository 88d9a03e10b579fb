"""Elementwise arithmetic with constants: one spelling, operands that broadcast without surprises, few of them.

The constant stands on the right; subtraction and division by a constant become addition and multiplication; chains of
constants are merged; a constant of one element is a 0-dimensional tensor (legalisation puts it into the kernel), any
other has the rank of the tensor it meets, e.g. (1, C, 1, 1).
"""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.ir import GenericConst

from layoutsearch.model.passes.conv import is_bias
from layoutsearch.model.passes.rewriter import (
    Expr,
    Scope,
    array_of,
    dtype_of,
    is_float,
    op_name,
    static_shape,
    with_operands,
)


def constant_to_the_right(call: relax.Call, scope: Scope) -> Expr | None:
    """`c + x` becomes `x + c`."""
    left, right = call.args
    if isinstance(left, GenericConst) and not isinstance(right, GenericConst):
        return with_operands(call, [right, left])
    return None


def subtract_constant(call: relax.Call, scope: Scope) -> Expr | None:
    """`x - c` becomes `x + (-c)`."""
    value = array_of(call.args[1])
    return relax.op.add(call.args[0], relax.const(-value)) if value is not None and is_float(call) else None


def divide_by_constant(call: relax.Call, scope: Scope) -> Expr | None:
    """`x / c` becomes `x * (1 / c)` where every reciprocal is a finite normal number."""
    value = array_of(call.args[1])
    if value is None or not is_float(call):
        return None
    with np.errstate(all="ignore"):
        inverse = (1 / value.astype("float64")).astype(value.dtype)
    tiny = np.finfo(value.dtype).tiny
    if not np.all(np.isfinite(inverse) & (np.abs(inverse) >= tiny)):
        return None
    return relax.op.multiply(call.args[0], relax.const(inverse))


def reshape_constant(call: relax.Call, scope: Scope) -> Expr | None:
    """Give a constant operand the rank of its partner, or no dimension at all where it has one element."""
    for i, arg in enumerate(call.args):
        value, partner = array_of(arg), call.args[1 - i]
        shape = static_shape(partner)
        if value is None or shape is None or isinstance(partner, GenericConst):
            continue
        target = (1,) * (len(shape) - value.ndim) + value.shape
        if value.size == 1 and value.ndim <= len(shape) and not is_bias(call, scope):
            target = ()
        if target != value.shape:
            args = list(call.args)
            args[i] = relax.const(value.reshape(target))
            return with_operands(call, args)
    return None


def merge_constants(call: relax.Call, scope: Scope) -> Expr | None:
    """`(x + a) + b` becomes `x + (a + b)`, and likewise for products, where nothing else reads the inner result."""
    outer = array_of(call.args[1])
    inner_call = scope.definition(call.args[0])
    if outer is None or op_name(inner_call) != op_name(call) or not is_float(call) or not scope.used_once(call.args[0]):
        return None
    inner = array_of(inner_call.args[1])
    if inner is None:
        return None
    with np.errstate(all="ignore"):
        merged = inner + outer if op_name(call) == "relax.add" else inner * outer
    if merged.size > max(inner.size, outer.size) or not np.all(np.isfinite(merged)):
        return None
    return with_operands(call, [inner_call.args[0], relax.const(np.asarray(merged, inner.dtype))])


def compose_affine(call: relax.Call, scope: Scope) -> Expr | None:
    """`(x * a + b) * c` becomes `x * (a * c) + b * c`: a normalisation followed by a learned scale."""
    factor, add = array_of(call.args[1]), scope.definition(call.args[0])
    if factor is None or op_name(add) != "relax.add" or not is_float(call) or not scope.used_once(call.args[0]):
        return None
    offset, scaled = array_of(add.args[1]), scope.definition(add.args[0])
    if offset is None or op_name(scaled) != "relax.multiply" or not scope.used_once(add.args[0]):
        return None
    scale = array_of(scaled.args[1])
    if scale is None:
        return None
    largest = max(scale.size, offset.size, factor.size)
    with np.errstate(all="ignore"):
        scale, offset = (np.asarray(value * factor, factor.dtype) for value in (scale, offset))
    if max(scale.size, offset.size) > largest or not np.all(np.isfinite(scale)) or not np.all(np.isfinite(offset)):
        return None
    product = scope.emit(relax.op.multiply(scaled.args[0], relax.const(scale)))
    return relax.op.add(product, relax.const(offset))


def scalar_factor_outwards(call: relax.Call, scope: Scope) -> Expr | None:
    """`x * (y * s)` and `(x * s) * y` become `(x * y) * s` for a scalar `s`: every hard-swish ends up alike."""
    for i, arg in enumerate(call.args):
        inner, other = scope.definition(arg), call.args[1 - i]
        if op_name(inner) != "relax.multiply" or not scope.used_once(arg) or isinstance(other, GenericConst):
            continue
        scale = array_of(inner.args[1])
        # The scalar may only move to the product where that is no larger than the factor it came from.
        if scale is not None and scale.ndim == 0 and static_shape(inner) == static_shape(call):
            operands = [inner.args[0], other] if i == 0 else [other, inner.args[0]]
            return relax.op.multiply(scope.emit(relax.op.multiply(*operands)), inner.args[1])
    return None


def neutral_constant(call: relax.Call, scope: Scope) -> Expr | None:
    """`x + 0` and `x * 1` with a scalar are `x`."""
    value = array_of(call.args[1])
    neutral = 0 if op_name(call) == "relax.add" else 1
    if value is None or value.ndim or float(value) != neutral:
        return None
    same = static_shape(call.args[0]) == static_shape(call) and dtype_of(call.args[0]) == dtype_of(call)
    return call.args[0] if same else None


def drop_broadcast(call: relax.Call, scope: Scope) -> Expr | None:
    """`broadcast_to` in front of an operation that broadcasts by itself is dropped."""
    for i, arg in enumerate(call.args):
        inner = scope.definition(arg)
        if op_name(inner) != "relax.broadcast_to":
            continue
        narrow, other = static_shape(inner.args[0]), static_shape(call.args[1 - i])
        if narrow is None or other is None or np.broadcast_shapes(narrow, other) != static_shape(call):
            continue
        args = list(call.args)
        args[i] = inner.args[0]
        return with_operands(call, args)
    return None


def unstack(call: relax.Call, scope: Scope) -> Expr | None:
    """A reduction over a stack of tensors (ONNX Sum, Mean, Max and Min) becomes a chain of binary operations."""
    stack = scope.definition(call.args[0])
    axis = call.attrs.axis
    if (
        op_name(stack) != "relax.stack"
        or axis is None
        or call.attrs.keepdims
        or not isinstance(stack.args[0], relax.Tuple)
    ):
        return None
    stack_axis = int(getattr(stack.attrs.axis, "value", stack.attrs.axis) or 0)
    if [int(a) for a in axis] != [stack_axis]:
        return None
    name = op_name(call).removeprefix("relax.")
    combine = {"sum": relax.op.add, "mean": relax.op.add, "max": relax.op.maximum, "min": relax.op.minimum}[name]
    first, *rest = stack.args[0].fields
    total: Expr = first
    for field in rest:
        total = scope.emit(combine(total, field))
    if name == "mean":
        count = len(stack.args[0].fields)
        total = relax.op.multiply(total, relax.const(np.asarray(1 / count, dtype_of(call))))
    return total


_SHARED = [drop_broadcast, reshape_constant]
RULES = {
    "relax.add": [constant_to_the_right, neutral_constant, *_SHARED, merge_constants],
    "relax.multiply": [
        constant_to_the_right,
        neutral_constant,
        *_SHARED,
        merge_constants,
        compose_affine,
        scalar_factor_outwards,
    ],
    "relax.subtract": [subtract_constant, *_SHARED],
    "relax.divide": [divide_by_constant, *_SHARED],
    "relax.power": _SHARED,
    "relax.maximum": [constant_to_the_right, *_SHARED],
    "relax.minimum": [constant_to_the_right, *_SHARED],
    "relax.sum": [unstack],
    "relax.mean": [unstack],
    "relax.max": [unstack],
    "relax.min": [unstack],
}
