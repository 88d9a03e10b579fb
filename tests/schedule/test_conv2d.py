"""Convolutions in every layout, under several schedules each, against NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from layoutsearch.schedule import Schedule, ScheduleError, candidates
from layoutsearch.schedule.templates import panels
from tests.schedule import kernels as k

PACKED16 = ("NCHW16c", "OIHW16i16o", "NCHW16c")
NHWC = ("NHWC", "HWIO", "NHWC")
NCHW = ("NCHW", "OIHW", "NCHW")


@dataclass(frozen=True)
class Conv:
    """One convolution of (n, c, h, w) to `out` channels."""

    data: tuple[int, int, int, int]
    out: int
    kernel: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    layouts: tuple[str, str, str] = NCHW


def check(conv: Conv, seed: int, count: int = 3, outer: str = "") -> None:
    """The sampled schedules, all with `outer` where that is given, against NumPy."""
    rng = np.random.default_rng(seed)
    channels = conv.data[1] // conv.groups
    scale = np.sqrt(channels * conv.kernel[0] * conv.kernel[1])
    x = rng.standard_normal(conv.data).astype("float32")
    w = (rng.standard_normal((conv.out, channels, *conv.kernel)) / scale).astype("float32")
    want = k.conv2d(x, w, conv.strides, conv.padding, conv.dilation, conv.groups)
    residual = rng.standard_normal(want.shape).astype("float32")
    want = np.maximum(want + residual, 0)
    data_layout, kernel_layout, out_layout = conv.layouts
    arrays = [
        k.to_layout(x, data_layout, "NCHW"),
        k.to_layout(w, kernel_layout, "OIHW"),
        k.to_layout(residual, out_layout, "NCHW"),
    ]

    def build(x: relax.Var, w: relax.Var, r: relax.Var) -> relax.Expr:
        y = relax.op.nn.conv2d(
            x,
            w,
            strides=conv.strides,
            padding=conv.padding,
            dilation=conv.dilation,
            groups=conv.groups,
            data_layout=data_layout,
            kernel_layout=kernel_layout,
            out_layout=out_layout,
        )
        return relax.op.nn.relu(relax.op.add(y, r))

    func = k.fused(build, *(a.shape for a in arrays))
    for schedule in k.sample(func, seed, count):
        if outer:
            schedule = Schedule.make(schedule.template, **{**dict(schedule.params), "outer": outer})
        (out,) = k.run(k.scheduled(func, schedule), arrays)
        k.close(k.from_layout(out, out_layout, "NCHW"), want)


SAME = (1, 1, 1, 1)
CASES = {
    "packed": Conv((1, 32, 14, 14), 32, (3, 3), padding=SAME, layouts=PACKED16),
    "packed 8 to 16, all odd": Conv(
        (2, 24, 9, 11), 48, (3, 5), (2, 1), (1, 2, 0, 1), (1, 2), layouts=("NCHW8c", "OIHW8i16o", "NCHW16c")
    ),
    "packed 32": Conv((2, 64, 7, 7), 64, (1, 1), (2, 2), layouts=("NCHW32c", "OIHW32i32o", "NCHW32c")),
    "packed 4, padding wider than the image": Conv(
        (1, 8, 3, 3), 8, (3, 3), padding=(3, 3, 3, 3), dilation=(2, 2), layouts=("NCHW4c", "OIHW4i8o", "NCHW8c")
    ),
    "stem packed": Conv((1, 3, 33, 31), 16, (7, 7), (2, 2), (3, 3, 3, 3), layouts=("NCHW3c", "OIHW3i16o", "NCHW16c")),
    "stem from NCHW to packed": Conv(
        (1, 3, 33, 31), 16, (7, 7), (2, 2), (3, 3, 3, 3), layouts=("NCHW", "OIHW16o", "NCHW16c")
    ),
    "stem NCHW": Conv((1, 3, 40, 40), 16, (7, 7), (2, 2), (3, 3, 3, 3)),
    "pointwise packed 7x7": Conv((1, 64, 7, 7), 64, (1, 1), layouts=PACKED16),
    "pointwise NHWC, channels with a tail": Conv((1, 20, 9, 13), 37, (1, 1), layouts=NHWC),
    "pointwise NCHW": Conv((1, 12, 7, 7), 24, (1, 1)),
    "pointwise NCHW strided": Conv((1, 12, 17, 17), 24, (1, 1), (2, 2)),
    "NHWC, channels with a tail": Conv((1, 20, 9, 13), 37, (3, 3), padding=SAME, layouts=NHWC),
    "NHWC, packs of two vectors and a half": Conv(
        (1, 20, 9, 13), 80, (3, 3), padding=SAME, layouts=("NHWC", "OHWI40o", "NHWC")
    ),
    "NHWC, one pack, pointwise": Conv((1, 20, 9, 13), 24, (1, 1), layouts=("NHWC", "OHWI24o", "NHWC")),
    "NHWC, a tile of sixteen and eight": Conv((1, 20, 9, 13), 24, (3, 3), padding=SAME, layouts=NHWC),
    "NHWC, packed weights": Conv((1, 16, 10, 10), 24, (3, 3), padding=SAME, layouts=("NHWC", "OIHW8i8o", "NHWC")),
    "NHWC, one output channel": Conv((1, 5, 10, 10), 1, (3, 3), padding=SAME, layouts=NHWC),
    "NCHW strides 2 and 3, batch 2": Conv((2, 12, 19, 13), 24, (5, 3), (2, 3), (2, 1, 0, 1)),
    "NCHW dilated": Conv((1, 12, 19, 13), 24, (3, 3), padding=(2, 2, 2, 2), dilation=(2, 2)),
    "depthwise packed": Conv(
        (1, 48, 9, 13), 48, (3, 3), padding=SAME, groups=48, layouts=("NCHW16c", "OIHW16o", "NCHW16c")
    ),
    "depthwise NHWC": Conv((2, 20, 9, 13), 20, (5, 5), (2, 2), (2, 2, 2, 2), groups=20, layouts=NHWC),
    "depthwise NCHW": Conv((1, 12, 17, 20), 12, (5, 5), (2, 2), (2, 2, 2, 2), groups=12),
    "depthwise NCHW, tall": Conv((1, 6, 33, 20), 6, (3, 3), padding=SAME, groups=6),
    "two outputs a group NHWC": Conv((1, 12, 9, 13), 24, (3, 3), padding=SAME, groups=12, layouts=NHWC),
    "two outputs a group NCHW": Conv((1, 12, 9, 13), 24, (3, 3), padding=SAME, groups=12),
    "groups packed": Conv((1, 32, 9, 13), 64, (3, 3), padding=SAME, groups=2, layouts=PACKED16),
    "groups narrower than a vector": Conv(
        (1, 32, 9, 13), 64, (3, 3), padding=SAME, groups=8, layouts=("NCHW16c", "OIHW4i16o", "NCHW16c")
    ),
    "groups NHWC": Conv((1, 20, 9, 13), 48, (1, 1), groups=2, layouts=NHWC),
    "groups NCHW": Conv((1, 12, 9, 13), 24, (3, 3), padding=SAME, groups=2),
}


@pytest.mark.parametrize("name", CASES)
def test_numerics(name: str) -> None:
    check(CASES[name], seed=len(name))


@st.composite
def convolutions(draw: st.DrawFn) -> Conv:
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    reach = [d * (n - 1) + 1 for d, n in zip(dilation, kernel, strict=True)]
    size = [draw(st.integers(r, r + 12)) for r in reach]
    layouts, channels, out, groups = draw(
        st.sampled_from(
            [
                (PACKED16, 16, 32, 1),
                (("NCHW4c", "OIHW4i8o", "NCHW8c"), 8, 24, 1),
                (("NCHW8c", "OIHW8o", "NCHW8c"), 16, 16, 16),
                (NHWC, 5, 19, 1),
                (NHWC, 6, 6, 6),
                (NHWC, 6, 8, 2),
                (NCHW, 5, 7, 1),
                (NCHW, 6, 6, 6),
                (NCHW, 6, 8, 2),
            ]
        )
    )
    strides = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    padding = draw(st.tuples(*[st.integers(0, 2)] * 4))
    return Conv((draw(st.integers(1, 2)), channels, *size), out, kernel, strides, padding, dilation, groups, layouts)


@settings(max_examples=25, deadline=None)
@given(convolutions(), st.integers(0, 1000))
def test_random(conv: Conv, seed: int) -> None:
    check(conv, seed, count=2)


PANELS = {
    "pointwise packed": Conv((2, 264, 9, 7), 80, (1, 1), layouts=("NCHW8c", "OIHW8i16o", "NCHW16c")),
    "pointwise, odd channels": Conv((1, 259, 9, 7), 83, (1, 1), layouts=NHWC),
    "3x3": Conv((2, 70, 9, 11), 50, (3, 3), padding=SAME, layouts=NHWC),
    "strided packed": Conv((1, 72, 9, 11), 96, (3, 3), (2, 2), SAME, layouts=("NCHW8c", "OIHW8i16o", "NCHW16c")),
    "two groups": Conv((1, 96, 9, 11), 130, (3, 3), padding=SAME, groups=2, layouts=NHWC),
    "dilated, uneven": Conv((1, 64, 13, 11), 80, (5, 3), (2, 1), (3, 1, 4, 2), (2, 1), layouts=NHWC),
}


@pytest.mark.parametrize("share", [0.75, 0.02], ids=["few parts", "many parts"])
@pytest.mark.parametrize("name", PANELS)
def test_panels_of_weights(name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reductions in parts, whose sums wait in between."""
    monkeypatch.setattr(panels, "_L1_SHARE", share)
    check(PANELS[name], seed=sorted(PANELS).index(name), count=5, outer="panels")


def test_panels_are_for_convolutions_that_share_inputs() -> None:
    depthwise = Conv((1, 32, 9, 7), 32, (3, 3), padding=SAME, groups=32, layouts=("NCHW16c", "OIHW1i16o", "NCHW16c"))
    with pytest.raises(ScheduleError, match="panels"):
        check(depthwise, seed=0, outer="panels")


def test_large_weights_are_tried_in_panels() -> None:
    """Those that the first cache keeps anyway are not."""

    def orders(channels: int) -> set[str]:
        shapes = ((1, 16, 14, channels), (1, 1, channels, 2 * channels), (1, 1, 1, 2 * channels))

        def build(x: relax.Var, w: relax.Var, r: relax.Var) -> relax.Expr:
            return relax.op.add(relax.op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="HWIO"), r)

        return {str(s["outer"]) for s in candidates(k.fused(build, *shapes), k.INFO)}

    assert orders(256) == {"panels", "rows"}
    assert orders(24) == {"channels", "rows"}
