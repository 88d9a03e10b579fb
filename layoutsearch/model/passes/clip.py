"""Bounds: every spelling of a clamp with constant bounds becomes one op.

Both bounds give `clip`, a lower bound of zero alone gives `nn.relu`, any other single bound stays `maximum` or
`minimum` with a scalar.
"""

from __future__ import annotations

import math

import numpy as np
from tvm import relax

from layoutsearch.model.passes.rewriter import Expr, Scope, dtype_of, is_float, op_name, scalar_of, static_shape


def _bounds(call: Expr) -> tuple[Expr, float, float] | None:
    """(operand, lowest, highest) of any op that clamps with constants."""
    name = op_name(call)
    if name == "relax.nn.relu":
        return call.args[0], 0.0, math.inf
    if name == "relax.nn.relu6":
        return call.args[0], 0.0, 6.0
    if name == "relax.clip":
        low, high = (getattr(arg, "value", None) for arg in call.args[1:])
        # TVM applies the lower bound last, so it wins where the two are crossed.
        return None if low is None or high is None else (call.args[0], float(low), float(max(low, high)))
    if name in ("relax.maximum", "relax.minimum"):
        operand, bound = call.args
        value = scalar_of(bound)
        if value is None or math.isnan(value) or static_shape(operand) != static_shape(call):
            return None
        return (operand, value, math.inf) if name == "relax.maximum" else (operand, -math.inf, value)
    return None


def _clamp(operand: Expr, low: float, high: float) -> Expr:
    if low == -math.inf and high == math.inf:
        return operand
    if high == math.inf:
        bound = relax.const(np.asarray(low, dtype_of(operand)))
        return relax.op.nn.relu(operand) if low == 0 else relax.op.maximum(operand, bound)
    if low == -math.inf:
        return relax.op.minimum(operand, relax.const(np.asarray(high, dtype_of(operand))))
    return relax.op.clip(operand, low, high)


def simplify_clamp(call: relax.Call, scope: Scope) -> Expr | None:
    """Bring a clamp into its one form, merged with the clamp it is applied to where nothing else reads that."""
    bounds = _bounds(call)
    if bounds is None or not is_float(call):
        return None
    operand, low, high = bounds
    inner = _bounds(scope.definition(operand)) if scope.used_once(operand) else None
    if inner is not None:
        source, inner_low, inner_high = inner
        # min(max(x, a), b): an inner bound beyond the outer ones is clamped itself.
        merged_low, merged_high = (min(max(b, low), high) for b in (inner_low, inner_high))
        if merged_low <= merged_high:
            return _clamp(source, merged_low, merged_high)
    result = _clamp(operand, low, high)
    if result is operand:
        return operand
    same_bounds = op_name(call) != "relax.clip" or all(type(arg.value) is float for arg in call.args[1:])
    return None if op_name(result) == op_name(call) and same_bounds else result


RULES = {
    "relax.clip": [simplify_clamp],
    "relax.nn.relu": [simplify_clamp],
    "relax.nn.relu6": [simplify_clamp],
    "relax.maximum": [simplify_clamp],
    "relax.minimum": [simplify_clamp],
}
