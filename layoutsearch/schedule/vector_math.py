"""exp and its relatives as polynomials that vectorise.

LLVM turns a vector of `exp` into one library call a lane. These forms stay in vector registers; their error is about
one unit in the last place of float32 for exp, and below 2e-7 for sigmoid and tanh.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import ir, tirx
from tvm_ffi import structural_map

_LOG2E = 1.44269504088896341
# ln 2 in two parts: the first has few enough bits for its product with a small integer to be exact.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# exp of this is just above the smallest normal number.
_LOWEST = -87.336
# Minimax coefficients of (exp(r) - 1 - r) / r^2 on |r| <= ln 2 / 2, highest power first.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def _f(value: float) -> tirx.Expr:
    return tirx.const(value, "float32")


def _let(name: str, value: tirx.Expr, body: Callable[[tirx.Expr], tirx.Expr]) -> tirx.Expr:
    var = tirx.Var(name, "float32")
    return tirx.Let(var, value, body(var))


def exp(x: tirx.Expr) -> tirx.Expr:
    """exp of float32: 2^n * exp(r), x = n ln 2 + r. Overflows to infinity, keeps a NaN.

    Below the smallest normal number it is zero: arithmetic on denormals takes a hundred times as long.
    """

    def scaled(n: tirx.Expr, r: tirx.Expr) -> tirx.Expr:
        poly = _f(_EXP[0])
        for coefficient in _EXP[1:]:
            poly = poly * r + _f(coefficient)
        # Two factors, since 2^128 has no representation of its own.
        exponent = n.astype("int32")
        half = exponent >> tirx.const(1, "int32")
        return (poly * r * r + r + _f(1.0)) * _power_of_two(half) * _power_of_two(exponent - half)

    def reduced(bounded: tirx.Expr) -> tirx.Expr:
        return _let(
            "n",
            tirx.floor(bounded * _f(_LOG2E) + _f(0.5)),
            lambda n: _let("r", bounded - n * _f(_LN2_HIGH) - n * _f(_LN2_LOW), lambda r: scaled(n, r)),
        )

    def guarded(given: tirx.Expr) -> tirx.Expr:
        bounded = tirx.max(tirx.min(given, _f(89.0)), _f(_LOWEST))
        value = tirx.Select(given < _f(_LOWEST), _f(0.0), _let("b", bounded, reduced))
        return tirx.Select(tirx.isnan(given), given, value)

    return _let("x", x, guarded)


def _power_of_two(n: tirx.Expr) -> tirx.Expr:
    return tirx.reinterpret("float32", (n + tirx.const(127, "int32")) << tirx.const(23, "int32"))


def sigmoid(x: tirx.Expr) -> tirx.Expr:
    """1 / (1 + exp(-x)); zero where that is below the smallest normal number."""

    def of_negative(y: tirx.Expr) -> tirx.Expr:
        # A comparison, not a minimum, so that a NaN stays one.
        too_large = y > _f(-_LOWEST)
        bounded = tirx.Select(too_large, _f(-_LOWEST), y)
        return tirx.Select(too_large, _f(0.0), _f(1.0) / (_f(1.0) + exp(bounded)))

    return _let("s", _f(0.0) - x, of_negative)


def tanh(x: tirx.Expr) -> tirx.Expr:
    """1 - 2 / (exp(2 x) + 1)."""
    return _let("y", x, lambda y: _f(1.0) - _f(2.0) / (exp(y + y) + _f(1.0)))


_FORMS: dict[str, Callable[[tirx.Expr], tirx.Expr]] = {"tirx.exp": exp, "tirx.sigmoid": sigmoid, "tirx.tanh": tanh}


def vectorizable(statement: tirx.Stmt) -> tirx.Stmt:
    """The statement with the float32 calls that LLVM cannot vectorise written out."""

    def visit(call: ir.Call) -> tirx.Expr:
        form = _FORMS.get(str(call.op.name)) if isinstance(call.op, ir.Op) else None
        return call if form is None or str(call.ty.dtype) != "float32" else form(call.args[0])

    return structural_map(statement, (ir.Call, visit))
