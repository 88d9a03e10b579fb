"""Convolutions: constant scales and offsets behind them go into weights and bias, zero padding in front into padding.

Afterwards a convolution with a bias is `add(conv, b)` with `b` of shape (1, C, 1, 1), as its layout has the axes, even
where C is 1: a bias is a weight, not a scalar of the model.
"""

from __future__ import annotations

import numpy as np
from tvm import relax

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

TINY, TINY_SHARE = 2.0**-100, 2.0**-60
CONVOLUTIONS = ("relax.nn.conv2d", "relax.nn.conv2d_transpose")


def _channel_axis(conv: relax.Call) -> int | None:
    """Position of the channels in the output; None where the layout is blocked."""
    layout = str(conv.attrs.out_layout or conv.attrs.data_layout)
    return layout.index("C") if len(layout) == 4 and "C" in layout else None


def _per_channel(value: np.ndarray, conv: relax.Call) -> np.ndarray | None:
    """`value` as a vector over the output channels, where it is constant over every other axis."""
    axis, shape = _channel_axis(conv), static_shape(conv)
    if axis is None or shape is None or value.ndim > 4:
        return None
    padded = value.reshape((1,) * (4 - value.ndim) + value.shape)
    if value.size != padded.shape[axis] or padded.shape[axis] not in (1, shape[axis]):
        return None
    return np.broadcast_to(padded.reshape(-1), (shape[axis],))


def _as_bias(vector: np.ndarray, conv: relax.Call) -> Expr:
    shape = [1, 1, 1, 1]
    shape[_channel_axis(conv)] = vector.size  # type: ignore[index]
    return relax.const(np.ascontiguousarray(vector, dtype_of(conv)).reshape(shape))


def _scaled_weight(conv: relax.Call, scale: np.ndarray) -> Expr | None:
    """The constant kernel with every output channel multiplied by its entry of `scale`."""
    weight, layout = array_of(conv.args[1]), str(conv.attrs.kernel_layout)
    if weight is None or len(layout) != 4 or weight.ndim != 4:
        return None
    out_axis, in_axis = layout.index("O"), layout.index("I")
    groups = int(conv.attrs.groups)
    factors = scale.astype("float64")
    if op_name(conv) == "relax.nn.conv2d" or groups == 1:
        shape = [1, 1, 1, 1]
        shape[out_axis] = factors.size
        factors = factors.reshape(shape)
    else:
        # A grouped transposed kernel is (I, O / groups, ...): its rows along I belong to groups in turn.
        table = np.repeat(factors.reshape(groups, -1), weight.shape[in_axis] // groups, axis=0)
        shape = [1, 1, 1, 1]
        shape[in_axis], shape[out_axis] = table.shape
        factors = (table if in_axis < out_axis else table.T).reshape(shape)
    return relax.const((weight.astype("float64") * factors).astype(weight.dtype))


def _biased(expr: Expr, scope: Scope) -> tuple[relax.Call, np.ndarray | None] | None:
    """(convolution, bias vector or None) behind an operand that nothing else reads."""
    if not scope.used_once(expr):
        return None
    inner = scope.definition(expr)
    if op_name(inner) in CONVOLUTIONS:
        return inner, None
    if op_name(inner) != "relax.add" or not scope.used_once(inner.args[0]):
        return None
    conv, value = scope.definition(inner.args[0]), array_of(inner.args[1])
    if op_name(conv) not in CONVOLUTIONS or value is None:
        return None
    bias = _per_channel(value, conv)
    return None if bias is None else (conv, bias)


def fold_scale(call: relax.Call, scope: Scope) -> Expr | None:
    """`conv(x, w) * s` becomes `conv(x, w * s)`, and `(conv(x, w) + b) * s` becomes `conv(x, w * s) + b * s`."""
    value = array_of(call.args[1])
    found = _biased(call.args[0], scope) if value is not None and is_float(call) else None
    if found is None or value is None:
        return None
    conv, bias = found
    scale = _per_channel(value, conv)
    weight = None if scale is None else _scaled_weight(conv, scale)
    if scale is None or weight is None:
        return None
    scaled = with_operands(conv, [conv.args[0], weight])
    if bias is None:
        return scaled
    return relax.op.add(scope.emit(scaled), _as_bias(bias.astype("float64") * scale, conv))


def is_bias(call: relax.Call, scope: Scope) -> bool:
    """Whether a call adds a per-channel constant to a convolution that nothing else reads."""
    if op_name(call) != "relax.add" or not scope.used_once(call.args[0]):
        return False
    conv, value = scope.definition(call.args[0]), array_of(call.args[1])
    return op_name(conv) in CONVOLUTIONS and value is not None and _per_channel(value, conv) is not None


def spell_bias(call: relax.Call, scope: Scope) -> Expr | None:
    """A bias has one element a channel and rank 4."""
    if not is_bias(call, scope):
        return None
    conv, value = scope.definition(call.args[0]), array_of(call.args[1])
    bias = _as_bias(_per_channel(value, conv), conv)  # type: ignore[arg-type]
    return None if static_shape(bias) == value.shape else relax.op.add(call.args[0], bias)  # type: ignore[union-attr]


def usual_kernel_layout(call: relax.Call, scope: Scope) -> Expr | None:
    """Beside NCHW data a constant kernel is OIHW, or IOHW for a transposed convolution: what TVM can legalise."""
    usual = "OIHW" if op_name(call) == "relax.nn.conv2d" else "IOHW"
    layout, weight = str(call.attrs.kernel_layout), array_of(call.args[1])
    if weight is None or str(call.attrs.data_layout) != "NCHW" or layout == usual or sorted(layout) != sorted(usual):
        return None
    kernel = relax.const(np.ascontiguousarray(np.transpose(weight, [layout.index(axis) for axis in usual])))
    return _rebuilt(call, call.args[0], kernel, kernel_layout=usual)


def _rebuilt(call: relax.Call, data: Expr, weight: Expr, **changes: object) -> Expr:
    """The same convolution with other operands and some attributes changed."""
    names = ["strides", "padding", "dilation", "groups", "data_layout", "kernel_layout", "out_layout", "out_dtype"]
    if op_name(call) == "relax.nn.conv2d_transpose":
        names.append("output_padding")
    attributes = {name: getattr(call.attrs, name) for name in names} | changes
    build = relax.op.nn.conv2d if op_name(call) == "relax.nn.conv2d" else relax.op.nn.conv2d_transpose
    return build(data, weight, **attributes)


def absorb_padding(call: relax.Call, scope: Scope) -> Expr | None:
    """Zero padding of height and width in front of a convolution becomes the convolution's own padding."""
    pad, layout = scope.definition(call.args[0]), str(call.attrs.data_layout)
    if op_name(pad) != "relax.nn.pad" or len(layout) != 4 or not {"H", "W"} <= set(layout):
        return None
    width = [int(w) for w in pad.attrs.pad_width]
    value = float(getattr(pad.attrs.pad_value, "value", pad.attrs.pad_value))
    sides = {axis: (width[2 * i], width[2 * i + 1]) for i, axis in enumerate(layout)}
    outside = [w for axis, pair in sides.items() if axis not in "HW" for w in pair]
    if str(pad.attrs.pad_mode) != "constant" or value != 0 or any(outside) or min(width) < 0:
        return None
    top, left, bottom, right = (int(p) for p in call.attrs.padding)
    (pad_top, pad_bottom), (pad_left, pad_right) = sides["H"], sides["W"]
    padding = [top + pad_top, left + pad_left, bottom + pad_bottom, right + pad_right]
    return _rebuilt(call, pad.args[0], call.args[1], padding=padding)


def zero_tiny_weights(call: relax.Call, scope: Scope) -> Expr | None:
    """Weights next to nothing become zero.

    Trained channels that died have weights down to the denormal numbers, and a multiply-add with one of these, or whose
    result is one, takes a CPU some hundred cycles. No output of a common size notices 1e-30 of an activation; weights
    that are all tiny stay, since something behind them may make them large.
    """
    weight = array_of(call.args[1]) if is_float(call) else None
    if weight is None or weight.dtype != np.float32:
        return None
    size = np.abs(weight)
    tiny = (size < min(TINY, TINY_SHARE * float(size.max(initial=0)))) & (weight != 0)
    if not tiny.any():
        return None
    return with_operands(call, [call.args[0], relax.const(np.where(tiny, np.float32(0), weight))])


RULES = {
    "relax.multiply": [fold_scale],
    "relax.add": [spell_bias],
    "relax.nn.conv2d": [absorb_padding, usual_kernel_layout, zero_tiny_weights],
    "relax.nn.conv2d_transpose": [usual_kernel_layout, zero_tiny_weights],
    "relax.matmul": [zero_tiny_weights],
}
