"""Winograd's algorithms: the matrices, and the template in every layout and schedule, against NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tvm import relax

from layoutsearch.materialize.winograd import winograd_call
from layoutsearch.schedule import candidates
from layoutsearch.schedule.value import Schedule, ScheduleError
from layoutsearch.schedule.winograd import OUTPUTS, minimal, transform_weights
from tests.schedule import kernels as k

PACKED16 = ("NCHW16c", "HWOI16i16o", "NCHW16c")
TOLERANCE = {2: 4e-6, 4: 4e-5}
"""Of the largest output: F(4x4,3x3) loses about one digit more than F(2x2,3x3)."""


@pytest.mark.parametrize("m", OUTPUTS)
def test_matrices_are_the_correlation(m: int) -> None:
    rng = np.random.default_rng(m)
    form = minimal(m)
    d, g = rng.standard_normal((form.points, form.points)), rng.standard_normal((3, 3))
    a, b = np.array(form.gather), np.array(form.data)
    u = transform_weights(g[None, None], m)[0, 0]
    want = [[(d[y : y + 3, x : x + 3] * g).sum() for x in range(m)] for y in range(m)]
    np.testing.assert_allclose(a @ (u * (b @ d @ b.T)) @ a.T, want, atol=1e-12)


@pytest.mark.parametrize("m", OUTPUTS)
def test_shared_additions_are_the_matrices(m: int) -> None:
    form = minimal(m)
    values = np.random.default_rng(m).standard_normal(form.points)
    np.testing.assert_allclose(form.data_parts(list(values)), np.array(form.data) @ values, atol=1e-12)
    np.testing.assert_allclose(form.outputs_of(list(values)), np.array(form.gather) @ values, atol=1e-12)


@dataclass(frozen=True)
class Conv:
    """A 3x3 convolution of (n, c, h, w) to `out` channels by F(m x m, 3 x 3)."""

    data: tuple[int, int, int, int]
    out: int
    padding: tuple[int, int, int, int] = (1, 1, 1, 1)
    layouts: tuple[str, str, str] = PACKED16


def kernel(conv: Conv, m: int, shapes: list[tuple[int, ...]]):  # type: ignore[no-untyped-def]
    """The fused kernel of a convolution, a residual and relu."""
    data, weights, out = conv.layouts

    def build(x: relax.Var, u: relax.Var, r: relax.Var) -> relax.Expr:
        direct = relax.op.nn.conv2d(x, u, padding=conv.padding, data_layout=data, kernel_layout=weights, out_layout=out)
        return relax.op.nn.relu(relax.op.add(winograd_call(direct, x, u), r))

    return k.fused(build, *shapes)


def operands(conv: Conv, m: int, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """What the kernel takes, and what it should give, in NCHW."""
    rng = np.random.default_rng(seed)
    data, weights, out = conv.layouts
    x = rng.standard_normal(conv.data).astype("float32")
    w = (rng.standard_normal((conv.out, conv.data[1], 3, 3)) / np.sqrt(9 * conv.data[1])).astype("float32")
    want = k.conv2d(x, w, (1, 1), conv.padding, (1, 1), 1)
    residual = rng.standard_normal(want.shape).astype("float32")
    arrays = [
        k.to_layout(x, data, "NCHW"),
        k.to_layout(transform_weights(w, m), weights, "OIHW"),
        k.to_layout(residual, out, "NCHW"),
    ]
    return arrays, np.maximum(want + residual, 0)


def check(conv: Conv, m: int, seed: int, schedules: list[Schedule] | None = None) -> None:
    arrays, want = operands(conv, m, seed)
    func = kernel(conv, m, [a.shape for a in arrays])
    for schedule in schedules or k.sample(func, seed, 2):
        (out,) = k.run(k.scheduled(func, schedule), arrays)
        k.close(k.from_layout(out, conv.layouts[2], "NCHW"), want, TOLERANCE[m])


CASES = {
    "whole tiles": Conv((1, 32, 8, 12), 48),
    "tiles over the edge": Conv((1, 16, 7, 9), 32),
    "one tile": Conv((1, 16, 2, 3), 16),
    "batch": Conv((2, 16, 5, 6), 32),
    "no padding": Conv((1, 16, 10, 9), 32, (0, 0, 0, 0)),
    "padding on one side, wider than the kernel": Conv((1, 16, 6, 5), 32, (0, 3, 1, 2)),
    "packed 8 to 16": Conv((1, 24, 9, 11), 48, layouts=("NCHW8c", "HWOI8i16o", "NCHW16c")),
    "packed 32 to 8": Conv((1, 64, 6, 7), 24, layouts=("NCHW32c", "HWOI32i8o", "NCHW8c")),
    "channels last": Conv((1, 24, 9, 11), 48, layouts=("NHWC", "HWOI16o", "NHWC")),
    "weights with blocks of their own": Conv((1, 24, 9, 11), 48, layouts=("NCHW8c", "HWOI16o", "NCHW8c")),
    "packed 8, a tail of channels": Conv((1, 16, 9, 11), 24, layouts=("NCHW16c", "HWIO", "NCHW8c")),
    "packed 4, several tails": Conv((1, 16, 9, 11), 44, layouts=("NCHW16c", "HWIO", "NCHW4c")),
    "channels last, a tail of channels": Conv((1, 24, 9, 11), 40, layouts=("NHWC", "HWIO", "NHWC")),
    "channels last to packed": Conv((1, 32, 9, 11), 48, layouts=("NHWC", "HWOI16o", "NCHW16c")),
}


@pytest.mark.parametrize("m", OUTPUTS)
@pytest.mark.parametrize("name", CASES)
def test_numerics(name: str, m: int) -> None:
    check(CASES[name], m, seed=len(name))


@pytest.mark.parametrize("outer", ["channels", "tiles"])
@pytest.mark.parametrize(("tile", "strips"), [(1, 1), (3, 2), (4, 3), (64, 1)])
def test_blocks_overlap_at_their_ends(outer: str, tile: int, strips: int) -> None:
    """Fourteen tiles in blocks that do not divide them."""
    schedule = Schedule.make("winograd", tile=tile, vectors=2, strips=strips, outer=outer)
    check(Conv((1, 32, 8, 27), 48), 4, 3, [schedule])


@given(
    data=st.tuples(st.integers(1, 2), st.integers(1, 3).map(lambda c: c * 16), st.integers(1, 9), st.integers(1, 9)),
    out=st.integers(1, 3).map(lambda c: c * 16),
    padding=st.tuples(*[st.integers(0, 2)] * 4),
    m=st.sampled_from(OUTPUTS),
    seed=st.integers(0, 99),
)
@settings(max_examples=12, deadline=None)
def test_any_size(data: tuple[int, ...], out: int, padding: tuple[int, ...], m: int, seed: int) -> None:
    top, left, bottom, right = padding
    assume(data[2] + top + bottom >= 3 and data[3] + left + right >= 3)
    check(Conv(data, out, padding), m, seed)  # type: ignore[arg-type]


def test_first_guesses_differ() -> None:
    arrays, _ = operands(Conv((1, 64, 28, 28), 96), 4, 0)
    every = candidates(kernel(Conv((1, 64, 28, 28), 96), 4, [a.shape for a in arrays]), k.INFO)
    assert {s["outer"] for s in every} == {"channels", "tiles"}
    assert len({(s["tile"], s["vectors"]) for s in every[:6]}) > 1


def test_a_schedule_of_another_algorithm_is_refused() -> None:
    conv = Conv((1, 16, 8, 8), 16)
    arrays, _ = operands(conv, 2, 0)
    func = kernel(conv, 2, [a.shape for a in arrays])
    direct = Schedule.make("channels", tile=1, vectors=1, reduce="taps_outer", outer="rows")
    with pytest.raises(ScheduleError, match="another algorithm"):
        k.scheduled(func, direct)
