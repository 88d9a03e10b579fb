"""conv2d by Winograd's F(m x m, 3 x 3) over any data, kernel and output layout, weights transformed beforehand."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tvm import te, tirx

from layoutsearch.layout.layout import Layout
from layoutsearch.schedule.compute.conv import ANCHOR, pad_spatial
from layoutsearch.schedule.indexing import Expr, logical_coordinates, physical_indices, static_shape
from layoutsearch.schedule.winograd import KERNEL, minimal, transform_weights

__all__ = ["conv2d_winograd", "transform_weights", "winograd_weights"]


def _element(matrix: Sequence[Sequence[float]], row: Expr, column: Expr, dtype: str) -> tirx.Expr:
    """`matrix[row][column]` as an expression."""
    out = tirx.const(0.0, dtype)
    for i, values in enumerate(matrix):
        for j, value in enumerate(values):
            if value:
                out = tirx.Select(tirx.all(row == i, column == j), tirx.const(value, dtype), out)
    return out


def winograd_weights(weight: te.Tensor, kernel_layout: str, outputs: int) -> te.Tensor:
    """(O, I, 3, 3) in `kernel_layout` to (O, I, m + 2, m + 2) in the same; see `transform_weights`."""
    layout, form = Layout(kernel_layout), minimal(outputs)
    o, i, _, _ = layout.logical_shape(static_shape(weight.shape), "OIHW")
    ry, rx = te.reduce_axis((0, KERNEL), "ry"), te.reduce_axis((0, KERNEL), "rx")

    def compute(*indices: tirx.Expr) -> tirx.Expr:
        at = logical_coordinates(layout, indices)
        g = weight(*physical_indices(layout, {**at, "H": ry, "W": rx}))
        left = _element(form.weights, at["H"], ry, weight.dtype)
        return te.sum(g * left * _element(form.weights, at["W"], rx, weight.dtype), axis=[ry, rx])

    shape = layout.physical_shape((o, i, form.points, form.points), "OIHW")
    return te.compute(shape, compute, name="winograd_weights")


def conv2d_winograd(
    data: te.Tensor,
    weight: te.Tensor,
    padding: Sequence[int],
    data_layout: str,
    kernel_layout: str,
    out_layout: str,
    out_dtype: str = "",
) -> te.Tensor:
    """Convolution by 3 x 3 kernels at stride 1 of (N, C, H, W) by transformed weights (O, I, m + 2, m + 2).

    One block says what is computed, as a sum over channels, products and inputs of a tile; the template computes it in
    steps. `padding` is (top, left, bottom, right). Blocks `pad` (only where padded) and `conv2d_winograd`.
    """
    pads = [int(p) for p in padding]
    data_l, kernel_l, out_l = Layout(data_layout), Layout(kernel_layout), Layout(out_layout)
    n, _, h, w = data_l.logical_shape(static_shape(data.shape), "NCHW")
    o, i, points, _ = kernel_l.logical_shape(static_shape(weight.shape), "OIHW")
    m = points - KERNEL + 1
    form = minimal(m)
    oh, ow = h + pads[0] + pads[2] - KERNEL + 1, w + pads[1] + pads[3] - KERNEL + 1
    dtype = out_dtype or str(data.dtype)
    # Rows and columns that fill up the last tiles are zero.
    fill = [pads[0], pads[1], pads[2] + -oh % m, pads[3] + -ow % m]
    source = pad_spatial(data, data_l, fill, 0.0) if any(fill) else data
    rc = te.reduce_axis((0, i), "rc")
    ey, ex = te.reduce_axis((0, points), "ey"), te.reduce_axis((0, points), "ex")
    ty, tx = te.reduce_axis((0, points), "ty"), te.reduce_axis((0, points), "tx")

    def compute(*indices: tirx.Expr) -> tirx.Expr:
        at = logical_coordinates(out_l, indices)
        y, x = at["H"], at["W"]
        element = source(*physical_indices(data_l, {"N": at["N"], "C": rc, "H": y // m * m + ty, "W": x // m * m + tx}))
        u = weight(*physical_indices(kernel_l, {"O": at["C"], "I": rc, "H": ey, "W": ex}))
        value = element.astype(dtype) * u.astype(dtype)
        for matrix, row, column in (
            (form.gather, y % m, ey),
            (form.gather, x % m, ex),
            (form.data, ey, ty),
            (form.data, ex, tx),
        ):
            value = value * _element(matrix, row, column, dtype)
        return te.sum(value, axis=[rc, ey, ex, ty, tx])

    anchor = {
        "op": "conv2d_winograd",
        "strides": [1, 1],
        "padding": pads,
        "dilation": [1, 1],
        "groups": 1,
        "layouts": [data_layout, kernel_layout, out_layout],
    }
    shape = out_l.physical_shape((n, o, oh, ow), "NCHW")
    return te.compute(shape, compute, name="conv2d_winograd", attrs={ANCHOR: json.dumps(anchor)})
