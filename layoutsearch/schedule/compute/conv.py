"""conv2d and conv2d_transpose over any data, kernel and output layout.

The reduction block carries one annotation, `layoutsearch.anchor`, a JSON object with the operator's attributes, from
which the templates know what they look at.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tvm import te, tirx

from layoutsearch.layout.layout import Layout
from layoutsearch.schedule.indexing import logical_coordinates, physical_indices, static_shape

ANCHOR = "layoutsearch.anchor"


def _ints(values: Sequence[Any]) -> list[int]:
    return [int(v) for v in values]


def conv2d_out_extent(extent: int, kernel: int, stride: int, pads: int, dilation: int) -> int:
    """Output extent of a convolution or pooling window along one axis (floor mode)."""
    return (extent + pads - dilation * (kernel - 1) - 1) // stride + 1


def pad_spatial(data: te.Tensor, layout: Layout, padding: Sequence[int], value: float) -> te.Tensor:
    """Block `pad`: `data` with (top, left, bottom, right) rows and columns of `value` around H and W.

    Before: (N, C, H, W) in `layout`. After: (N, C, top + H + bottom, left + W + right) in `layout`.
    """
    top, left, bottom, right = padding
    n, c, height, width = layout.logical_shape(static_shape(data.shape), "NCHW")
    shape = layout.physical_shape((n, c, top + height + bottom, left + width + right), "NCHW")

    def compute(*indices: tirx.Expr) -> tirx.Expr:
        at = logical_coordinates(layout, indices)
        y, x = at["H"] - top, at["W"] - left
        tests = []
        if top or bottom:
            tests += [y >= 0, y < height]
        if left or right:
            tests += [x >= 0, x < width]
        element = data(*physical_indices(layout, {**at, "H": y, "W": x}))
        return tirx.if_then_else(tirx.all(*tests), element, tirx.const(value, data.dtype))

    return te.compute(shape, compute, name="pad")


def conv2d(
    data: te.Tensor,
    weight: te.Tensor,
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    data_layout: str,
    kernel_layout: str,
    out_layout: str,
    out_dtype: str = "",
) -> te.Tensor:
    """Convolution of (N, C, H, W) in `data_layout` by (O, I, KH, KW) in `kernel_layout` into `out_layout`.

    `padding` is (top, left, bottom, right); I is C / `groups`. Blocks `pad` (only where padded) and `conv2d`.
    """
    (sh, sw), (dh, dw), pads, groups = _ints(strides), _ints(dilation), _ints(padding), int(groups)
    data_l, kernel_l, out_l = Layout(data_layout), Layout(kernel_layout), Layout(out_layout)
    n, _, h, w = data_l.logical_shape(static_shape(data.shape), "NCHW")
    o, i, kh, kw = kernel_l.logical_shape(static_shape(weight.shape), "OIHW")
    oh = conv2d_out_extent(h, kh, sh, pads[0] + pads[2], dh)
    ow = conv2d_out_extent(w, kw, sw, pads[1] + pads[3], dw)
    dtype = out_dtype or str(data.dtype)
    source = pad_spatial(data, data_l, pads, 0.0) if any(pads) else data
    rc, ry, rx = te.reduce_axis((0, i), "rc"), te.reduce_axis((0, kh), "ry"), te.reduce_axis((0, kw), "rx")

    def compute(*indices: tirx.Expr) -> tirx.Expr:
        at = logical_coordinates(out_l, indices)
        channel = rc if groups == 1 else at["C"] // (o // groups) * i + rc
        x = source(
            *physical_indices(
                data_l, {"N": at["N"], "C": channel, "H": at["H"] * sh + ry * dh, "W": at["W"] * sw + rx * dw}
            )
        )
        k = weight(*physical_indices(kernel_l, {"O": at["C"], "I": rc, "H": ry, "W": rx}))
        return te.sum(x.astype(dtype) * k.astype(dtype), axis=[rc, ry, rx])

    anchor = {
        "op": "conv2d",
        "strides": [sh, sw],
        "padding": pads,
        "dilation": [dh, dw],
        "groups": groups,
        "layouts": [data_layout, kernel_layout, out_layout],
    }
    shape = out_l.physical_shape((n, o, oh, ow), "NCHW")
    return te.compute(shape, compute, name="conv2d", attrs={ANCHOR: json.dumps(anchor)})


def conv2d_transpose(
    data: te.Tensor,
    weight: te.Tensor,
    strides: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    data_layout: str,
    kernel_layout: str,
    out_layout: str,
    out_dtype: str = "",
) -> te.Tensor:
    """Transposed convolution of (N, C, H, W) by (I, O, KH, KW), I = C and O per group, in any layouts.

    Written as a gather, out[y] = sum_k data[(y + top - k * dilation) / stride] * weight[k]; the template computes it by
    sub-pixel phases. Block `conv2d_transpose`.
    """
    (sh, sw), (dh, dw), (opad_h, opad_w) = _ints(strides), _ints(dilation), _ints(output_padding)
    pads, groups = _ints(padding), int(groups)
    data_l, kernel_l, out_l = Layout(data_layout), Layout(kernel_layout), Layout(out_layout)
    n, c, h, w = data_l.logical_shape(static_shape(data.shape), "NCHW")
    _, o, kh, kw = kernel_l.logical_shape(static_shape(weight.shape), "IOHW")
    top, left, bottom, right = pads
    oh = (h - 1) * sh - top - bottom + dh * (kh - 1) + opad_h + 1
    ow = (w - 1) * sw - left - right + dw * (kw - 1) + opad_w + 1
    per_group = c // groups
    dtype = out_dtype or str(data.dtype)
    rc, ry, rx = te.reduce_axis((0, per_group), "rc"), te.reduce_axis((0, kh), "ry"), te.reduce_axis((0, kw), "rx")

    def compute(*indices: tirx.Expr) -> tirx.Expr:
        at = logical_coordinates(out_l, indices)
        y, x = at["H"] + top - ry * dh, at["W"] + left - rx * dw
        group, local = (0, at["C"]) if groups == 1 else (at["C"] // o, at["C"] % o)
        channel = rc if groups == 1 else group * per_group + rc
        inside = tirx.all(y >= 0, x >= 0, y % sh == 0, x % sw == 0, y // sh < h, x // sw < w)
        element = data(*physical_indices(data_l, {"N": at["N"], "C": channel, "H": y // sh, "W": x // sw}))
        k = weight(*physical_indices(kernel_l, {"I": channel, "O": local, "H": ry, "W": rx}))
        value = tirx.if_then_else(inside, element, tirx.const(0, data.dtype))
        return te.sum(value.astype(dtype) * k.astype(dtype), axis=[rc, ry, rx])

    anchor = {
        "op": "conv2d_transpose",
        "strides": [sh, sw],
        "padding": pads,
        "dilation": [dh, dw],
        "groups": groups,
        "layouts": [data_layout, kernel_layout, out_layout],
    }
    shape = out_l.physical_shape((n, o * groups, oh, ow), "NCHW")
    return te.compute(shape, compute, name="conv2d_transpose", attrs={ANCHOR: json.dumps(anchor)})
