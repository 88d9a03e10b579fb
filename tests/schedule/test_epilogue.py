"""What is fused behind an anchor: bias, residual, activations, diamonds, several outputs, and what is not pointwise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import relax

from tests.schedule import kernels as k

op = relax.op
LAYOUTS = {
    "packed": ("NCHW16c", "OIHW16i16o", "NCHW16c"),
    "NHWC": ("NHWC", "HWIO", "NHWC"),
    "NCHW": ("NCHW", "OIHW", "NCHW"),
}


def _sigmoid(x: k.Array) -> k.Array:
    return 1 / (1 + np.exp(-x))


def _hard_swish(y: relax.Expr) -> relax.Expr:
    three, sixth = relax.const(3.0), relax.const(1 / 6)
    return op.multiply(op.multiply(y, op.clip(op.add(y, three), 0, 6)), sixth)


TAILS: dict[str, tuple[Callable[[relax.Expr, relax.Expr], relax.Expr], Callable[[k.Array, k.Array], k.Array]]] = {
    "none": (lambda y, b: y, lambda y, b: y),
    "bias": (op.add, lambda y, b: y + b),
    "hard swish": (lambda y, b: _hard_swish(op.add(y, b)), lambda y, b: (y + b) * np.clip(y + b + 3, 0, 6) / 6),
    "sigmoid": (lambda y, b: op.sigmoid(op.add(y, b)), lambda y, b: _sigmoid(y + b)),
    "silu": (lambda y, b: op.multiply(y, op.sigmoid(y)), lambda y, b: y * _sigmoid(y)),
    "tanh": (lambda y, b: op.tanh(y), lambda y, b: np.tanh(y)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tail", TAILS)
def test_pointwise_tail(layout: str, tail: str) -> None:
    data_layout, kernel_layout, out_layout = LAYOUTS[layout]
    rng = np.random.default_rng(7)
    x = rng.standard_normal((1, 32, 9, 11)).astype("float32")
    w = (rng.standard_normal((32, 32, 3, 3)) / 17).astype("float32")
    bias = rng.standard_normal((1, 32, 1, 1)).astype("float32")
    build, reference = TAILS[tail]
    arrays = [k.to_layout(x, data_layout, "NCHW"), k.to_layout(w, kernel_layout, "OIHW")]
    arrays.append(k.to_layout(bias, out_layout, "NCHW"))

    def group(x: relax.Var, w: relax.Var, b: relax.Var) -> relax.Expr:
        y = op.nn.conv2d(
            x, w, padding=(1, 1), data_layout=data_layout, kernel_layout=kernel_layout, out_layout=out_layout
        )
        return build(y, b)

    func = k.fused(group, *(a.shape for a in arrays))
    arrays = arrays[: len(func.params) - 1]  # a parameter nothing reads is dropped
    want = reference(k.conv2d(x, w, (1, 1), (1, 1, 1, 1), (1, 1), 1), bias)
    for schedule in k.sample(func, seed=3, count=2):
        (got,) = k.run(k.scheduled(func, schedule), arrays)
        k.close(k.from_layout(got, out_layout, "NCHW"), want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_outputs(layout: str) -> None:
    """The convolution itself and its activation both leave the group."""
    data_layout, kernel_layout, out_layout = LAYOUTS[layout]
    rng = np.random.default_rng(8)
    x = rng.standard_normal((1, 32, 5, 6)).astype("float32")
    w = (rng.standard_normal((32, 32, 1, 1)) / 6).astype("float32")
    arrays = [k.to_layout(x, data_layout, "NCHW"), k.to_layout(w, kernel_layout, "OIHW")]

    def group(x: relax.Var, w: relax.Var) -> relax.Expr:
        return op.nn.conv2d(x, w, data_layout=data_layout, kernel_layout=kernel_layout, out_layout=out_layout)

    def both(bb: relax.BlockBuilder, y: relax.Var) -> relax.Expr:
        return relax.Tuple([y, bb.emit(op.nn.relu(y))])

    func = k.fused(group, *(a.shape for a in arrays), outputs=both)
    want = k.conv2d(x, w, (1, 1), (0, 0, 0, 0), (1, 1), 1)
    for schedule in k.sample(func, seed=3, count=2):
        plain, active = k.run(k.scheduled(func, schedule), arrays)
        k.close(k.from_layout(plain, out_layout, "NCHW"), want)
        k.close(k.from_layout(active, out_layout, "NCHW"), np.maximum(want, 0))


def test_tail_that_is_not_pointwise() -> None:
    """A transpose behind the convolution gets loops of its own."""
    rng = np.random.default_rng(9)
    x = rng.standard_normal((1, 8, 9, 11)).astype("float32")
    w = (rng.standard_normal((16, 8, 3, 3)) / 9).astype("float32")

    def group(x: relax.Var, w: relax.Var) -> relax.Expr:
        return op.permute_dims(op.nn.relu(op.nn.conv2d(x, w)), [0, 2, 3, 1])

    func = k.fused(group, x.shape, w.shape)
    want = np.maximum(k.conv2d(x, w, (1, 1), (0, 0, 0, 0), (1, 1), 1), 0).transpose(0, 2, 3, 1)
    for schedule in k.sample(func, seed=3, count=2):
        (got,) = k.run(k.scheduled(func, schedule), [x, w])
        k.close(got, want)


def test_head_before_the_anchor() -> None:
    """An elementwise operator in front of the convolution is computed first, then padded on the fly."""
    rng = np.random.default_rng(10)
    x = rng.standard_normal((1, 8, 9, 11)).astype("float32")
    w = (rng.standard_normal((16, 8, 3, 3)) / 9).astype("float32")

    def group(x: relax.Var, w: relax.Var) -> relax.Expr:
        return op.nn.conv2d(op.nn.relu(x), w, padding=(1, 1))

    func = k.fused(group, x.shape, w.shape)
    want = k.conv2d(np.maximum(x, 0), w, (1, 1), (1, 1, 1, 1), (1, 1), 1)
    for schedule in k.sample(func, seed=3, count=2):
        (got,) = k.run(k.scheduled(func, schedule), [x, w])
        k.close(got, want)


@pytest.mark.parametrize(
    ("a", "b"), [((1, 200), (200, 37)), ((37, 65), (65, 43)), ((2, 3, 17, 9), (3, 9, 20)), ((5, 16, 8), (8, 64))]
)
def test_matmul(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    rng = np.random.default_rng(11)
    x, y = rng.standard_normal(a).astype("float32"), rng.standard_normal(b).astype("float32")
    bias = rng.standard_normal(b[-1:]).astype("float32")
    func = k.fused(lambda x, y, z: op.nn.relu(op.add(op.matmul(x, y), z)), a, b, bias.shape)
    want = np.maximum(x.astype("float64") @ y + bias, 0)
    for schedule in k.sample(func, seed=3, count=4):
        (got,) = k.run(k.scheduled(func, schedule), [x, y, bias])
        k.close(got, want)
