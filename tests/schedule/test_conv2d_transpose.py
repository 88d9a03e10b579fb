"""Transposed convolutions by phases against a NumPy scatter."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from tests.schedule import kernels as k

NHWC = ("NHWC", "IOHW", "NHWC")
PACKED = ("NCHW16c", "IOHW16i16o", "NCHW16c")
NCHW = ("NCHW", "IOHW", "NCHW")

# data, out channels, kernel, strides, padding, output padding, dilation, groups, layouts
CASES = {
    "2x2 stride 2 NHWC": ((1, 24, 7, 9), 48, (2, 2), (2, 2), (0, 0, 0, 0), (0, 0), (1, 1), 1, NHWC),
    "3x3 stride 2 output padding NHWC": ((2, 24, 7, 9), 37, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), (1, 1), 1, NHWC),
    "4x4 stride 2 packed": ((1, 32, 7, 9), 48, (4, 4), (2, 2), (1, 1, 1, 1), (0, 0), (1, 1), 1, PACKED),
    "strides 2 and 3 packed": ((1, 32, 7, 5), 16, (3, 3), (2, 3), (1, 0, 1, 2), (1, 2), (1, 1), 1, PACKED),
    "dilated 8 to 16": (
        (1, 16, 5, 6),
        16,
        (3, 3),
        (3, 2),
        (1, 0, 1, 2),
        (1, 1),
        (2, 3),
        1,
        ("NCHW8c", "IOHW8i16o", "NCHW16c"),
    ),
    "dilated NCHW": ((1, 6, 7, 9), 8, (3, 3), (2, 2), (1, 0, 1, 2), (1, 1), (2, 3), 1, NCHW),
    "2x2 stride 2 NCHW": ((1, 6, 7, 9), 5, (2, 2), (2, 2), (0, 0, 0, 0), (0, 0), (1, 1), 1, NCHW),
    "2x2 stride 2 NCHW, wide": ((1, 5, 3, 70), 3, (2, 2), (2, 2), (0, 0, 0, 0), (0, 0), (1, 1), 1, NCHW),
    "2x2 stride 2 NCHW, odd": ((1, 5, 3, 20), 3, (2, 2), (2, 2), (0, 0, 0, 0), (1, 1), (1, 1), 1, NCHW),
    "2x2 stride 2 NCHW, cropped": ((1, 5, 6, 20), 3, (2, 2), (2, 2), (1, 1, 1, 1), (0, 0), (1, 1), 1, NCHW),
    "4x4 stride 2 NCHW": ((1, 5, 6, 20), 3, (4, 4), (2, 2), (1, 1, 1, 1), (0, 0), (1, 1), 1, NCHW),
    "groups NCHW": ((1, 6, 7, 9), 10, (3, 3), (3, 3), (0, 0, 0, 0), (0, 0), (1, 1), 2, NCHW),
    "groups packed": (
        (1, 32, 7, 9),
        48,
        (3, 3),
        (3, 3),
        (0, 0, 0, 0),
        (0, 0),
        (1, 1),
        2,
        ("NCHW16c", "IOHW16i8o", "NCHW8c"),
    ),
    "depthwise NHWC": ((1, 20, 7, 9), 20, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), (1, 1), 20, NHWC),
    "phases without a tap": ((1, 8, 4, 5), 8, (1, 1), (3, 3), (0, 0, 0, 0), (1, 1), (1, 1), 1, NHWC),
    "stride 1 NCHW": ((1, 6, 7, 9), 4, (5, 5), (1, 1), (2, 2, 2, 2), (0, 0), (1, 1), 1, NCHW),
}


@pytest.mark.parametrize("name", CASES)
def test_numerics(name: str) -> None:
    data, out, kernel, strides, padding, output_padding, dilation, groups, layouts = CASES[name]
    data_layout, kernel_layout, out_layout = layouts
    rng = np.random.default_rng(len(name))
    x = rng.standard_normal(data).astype("float32")
    scale = np.sqrt(data[1] // groups * kernel[0] * kernel[1])
    w = (rng.standard_normal((data[1], out // groups, *kernel)) / scale).astype("float32")
    want = k.conv2d_transpose(x, w, strides, padding, output_padding, dilation, groups)
    bias = rng.standard_normal((1, out, 1, 1)).astype("float32")
    want = np.maximum(want + bias, 0)
    arrays = [
        k.to_layout(x, data_layout, "NCHW"),
        k.to_layout(w, kernel_layout, "IOHW"),
        k.to_layout(bias, out_layout, "NCHW"),
    ]

    def build(x: relax.Var, w: relax.Var, b: relax.Var) -> relax.Expr:
        y = relax.op.nn.conv2d_transpose(
            x,
            w,
            strides=strides,
            padding=padding,
            output_padding=output_padding,
            dilation=dilation,
            groups=groups,
            data_layout=data_layout,
            kernel_layout=kernel_layout,
            out_layout=out_layout,
        )
        return relax.op.nn.relu(relax.op.add(y, b))

    func = k.fused(build, *(a.shape for a in arrays))
    for schedule in k.sample(func, seed=1, count=2):
        (got,) = k.run(k.scheduled(func, schedule), arrays)
        k.close(k.from_layout(got, out_layout, "NCHW"), want)
