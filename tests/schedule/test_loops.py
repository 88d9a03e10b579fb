"""Operators without a template of their own, against NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from tvm import relax

from tests.schedule import kernels as k

op = relax.op
Build = Callable[..., relax.Expr]
Reference = Callable[..., k.Array]


def check(build: Build, reference: Reference, *shapes: Sequence[int], tolerance: float = 2e-6) -> None:
    rng = np.random.default_rng(5)
    arrays = [rng.standard_normal(s).astype("float32") for s in shapes]
    func = k.fused(build, *shapes)
    want = reference(*(a.astype("float64") for a in arrays))
    for schedule in k.sample(func, seed=1):
        (got,) = k.run(k.scheduled(func, schedule), arrays)
        if got.dtype.kind == "f":
            k.close(got, want, tolerance)
        else:
            assert np.array_equal(got, want)


def pool(x: k.Array, size: int, stride: int, pad: int, how: str, include_pad: bool, ceil: bool) -> k.Array:
    """Reference pooling of (N, C, H, W)."""
    fill = -np.inf if how == "max" else 0.0
    extra = stride - 1 if ceil else 0
    widths = ((0, 0), (0, 0), (pad, pad + extra), (pad, pad + extra))
    padded = np.pad(x, widths, constant_values=fill)
    inside = np.pad(np.ones_like(x), widths)
    # Padding counts, the rows that only ceil mode reaches do not.
    counted = np.pad(
        np.ones((*x.shape[:2], *(s + 2 * pad for s in x.shape[2:]))), ((0, 0), (0, 0), *([(0, extra)] * 2))
    )
    out_h, out_w = (((s + 2 * pad - size + extra) // stride) + 1 for s in x.shape[2:])
    out = np.empty((*x.shape[:2], out_h, out_w))
    for i in range(out_h):
        for j in range(out_w):
            at = (slice(None), slice(None), slice(i * stride, i * stride + size), slice(j * stride, j * stride + size))
            if how == "max":
                out[:, :, i, j] = padded[at].max((2, 3))
            else:
                weight = (counted if include_pad else inside)[at].sum((2, 3))
                out[:, :, i, j] = padded[at].sum((2, 3)) / weight
    return out


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NCHW16c", "NCHW4c"])
@pytest.mark.parametrize(
    ("how", "size", "stride", "pad", "include_pad", "ceil"),
    [
        ("max", 3, 2, 1, False, False),
        ("max", 2, 2, 0, False, True),
        ("avg", 3, 2, 1, False, False),
        ("avg", 3, 1, 1, True, False),
    ],
)
def test_pool(layout: str, how: str, size: int, stride: int, pad: int, include_pad: bool, ceil: bool) -> None:
    logical = (1, 16, 23, 26)
    x = np.random.default_rng(0).standard_normal(logical).astype("float32")
    stored = k.to_layout(x, layout, "NCHW")
    extra = {"count_include_pad": include_pad} if how == "avg" else {}
    operator = op.nn.max_pool2d if how == "max" else op.nn.avg_pool2d

    def build(x: relax.Var) -> relax.Expr:
        return operator(
            x, (size, size), (stride, stride), (pad, pad), ceil_mode=ceil, layout=layout, out_layout=layout, **extra
        )

    func = k.fused(build, stored.shape)
    for schedule in k.sample(func, seed=1):
        (got,) = k.run(k.scheduled(func, schedule), [stored])
        want = pool(x.astype("float64"), size, stride, pad, how, include_pad, ceil)
        k.close(k.from_layout(got, layout, "NCHW"), want)


@pytest.mark.parametrize("channels", [5, 37, 149])
@pytest.mark.parametrize(
    ("how", "size", "stride", "pad", "include_pad", "ceil"),
    [
        ("max", 5, 1, 2, False, False),
        ("max", 13, 1, 6, False, False),
        ("avg", 3, 1, 1, False, False),
        ("avg", 3, 2, 1, True, False),
        ("max", 3, 2, 1, False, True),
    ],
)
def test_pool_of_tiles_that_nothing_divides(
    channels: int, how: str, size: int, stride: int, pad: int, include_pad: bool, ceil: bool
) -> None:
    """Columns at the padding, whole tiles of those inside and the rest; and windows that always reach the padding."""
    x = np.random.default_rng(0).standard_normal((1, channels, 17, 12)).astype("float32")
    stored = k.to_layout(x, "NHWC", "NCHW")
    extra = {"count_include_pad": include_pad} if how == "avg" else {}
    operator = op.nn.max_pool2d if how == "max" else op.nn.avg_pool2d

    def build(x: relax.Var) -> relax.Expr:
        return operator(x, (size, size), (stride, stride), (pad, pad), ceil_mode=ceil, layout="NHWC", **extra)

    func = k.fused(build, stored.shape)
    (got,) = k.run(k.scheduled(func, k.sample(func, seed=1)[0]), [stored])
    want = pool(x.astype("float64"), size, stride, pad, how, include_pad, ceil)
    k.close(k.from_layout(got, "NHWC", "NCHW"), want)


@pytest.mark.parametrize("threads", [1, 2, 6])
@pytest.mark.parametrize("shape", [(1, 7, 9, 1000), (1, 31, 13, 40), (3, 14, 15, 69), (1, 57, 33, 16)])
@pytest.mark.parametrize("how", ["mean", "max", "min"])
def test_global_pool_of_channels_last(shape: tuple[int, ...], how: str, threads: int) -> None:
    """Strips of channels as tasks, and partial results where the channels are few."""
    x = np.random.default_rng(0).standard_normal(shape).astype("float32")
    func = k.fused(lambda x: getattr(op, how)(x, [1, 2], True), shape)
    target = dataclasses.replace(k.INFO, threads=threads)
    (got,) = k.run(k.scheduled(func, k.sample(func, seed=1, target=target)[0], target), [x])
    k.close(got, getattr(np, how)(x.astype("float64"), (1, 2), keepdims=True))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NCHW8c"])
@pytest.mark.parametrize("size", [(1, 1), (3, 5)])
def test_adaptive_average(layout: str, size: tuple[int, int]) -> None:
    x = np.random.default_rng(0).standard_normal((2, 24, 9, 10)).astype("float32")
    stored = k.to_layout(x, layout, "NCHW")
    func = k.fused(lambda x: op.nn.adaptive_avg_pool2d(x, size, layout=layout, out_layout=layout), stored.shape)
    (got,) = k.run(k.scheduled(func, k.sample(func, seed=1)[0]), [stored])
    want = np.empty((2, 24, *size))
    for i in range(size[0]):
        for j in range(size[1]):
            rows = slice(i * 9 // size[0], -(-(i + 1) * 9 // size[0]))
            columns = slice(j * 10 // size[1], -(-(j + 1) * 10 // size[1]))
            want[:, :, i, j] = x[:, :, rows, columns].astype("float64").mean((2, 3))
    k.close(k.from_layout(got, layout, "NCHW"), want)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NCHW16c"])
def test_resize_nearest(layout: str) -> None:
    x = np.random.default_rng(0).standard_normal((1, 16, 10, 12)).astype("float32")
    stored = k.to_layout(x, layout, "NCHW")

    def build(x: relax.Var) -> relax.Expr:
        return op.image.resize2d(
            x,
            (20, 24),
            layout=layout,
            method="nearest_neighbor",
            coordinate_transformation_mode="asymmetric",
            rounding_method="floor",
        )

    func = k.fused(build, stored.shape)
    (got,) = k.run(k.scheduled(func, k.sample(func, seed=1)[0]), [stored])
    k.close(k.from_layout(got, layout, "NCHW"), x.repeat(2, 2).repeat(2, 3))


LAYOUTS = ["NCHW", "NHWC", "NCHW16c", "NCHW8c", "NCHW4c", "NCHW32c", "NCHW6c"]


@pytest.mark.parametrize("shape", [(2, 96, 5, 7), (1, 96, 40, 52)])
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_layout_transform(source: str, target: str, shape: tuple[int, ...]) -> None:
    """Every pair of layouts, on a shape that no tile divides, and on one large enough to be shared by its pixels."""
    if source == target:
        return
    x = np.random.default_rng(0).standard_normal(shape).astype("float32")
    stored, want = k.to_layout(x, source, "NCHW"), k.to_layout(x, target, "NCHW")
    func = k.transform(source, target, x.shape)
    (got,) = k.run(k.scheduled(func, k.sample(func, seed=1)[0]), [stored])
    assert np.array_equal(got, want)


@pytest.mark.parametrize(("source", "target"), [("NCHW32c", "NCHW"), ("NCHW", "NCHW32c"), ("NCHW32c", "NCHW16c")])
def test_a_tensor_of_one_block_moves_by_vectors(source: str, target: str) -> None:
    """c // 32 and c % 32 of 32 channels hide a move that is as regular as any other."""
    x = np.random.default_rng(0).standard_normal((1, 32, 40, 52)).astype("float32")
    func = k.transform(source, target, x.shape)
    moved = k.scheduled(func, k.sample(func, seed=1)[0])
    (got,) = k.run(moved, [k.to_layout(x, source, "NCHW")])
    assert np.array_equal(got, k.to_layout(x, target, "NCHW"))
    assert "%" not in str(moved.body).split("task")[-1], "no coordinate is divided for every element"


@pytest.mark.parametrize("dtype", ["bool", "int32", "int64", "uint8"])
def test_layout_transform_of_other_types(dtype: str) -> None:
    x = np.random.default_rng(0).integers(0, 2, (1, 32, 9, 11)).astype(dtype)
    func = k.transform("NCHW", "NCHW16c", x.shape, dtype)
    (got,) = k.run(k.scheduled(func, k.sample(func, seed=1)[0]), [x])
    assert np.array_equal(got, k.to_layout(x, "NCHW16c", "NCHW"))


def _softmax(x: k.Array, axis: int) -> k.Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


OPERATORS: dict[str, tuple[Build, Reference, list[tuple[int, ...]]]] = {
    "softmax": (lambda x: op.nn.softmax(x, -1), lambda x: _softmax(x, -1), [(16, 1003)]),
    "softmax over channels": (lambda x: op.nn.softmax(x, 1), lambda x: _softmax(x, 1), [(1, 21, 20, 21)]),
    "mean over H, W": (lambda x: op.mean(x, [2, 3], True), lambda x: x.mean((2, 3), keepdims=True), [(1, 9, 7, 7)]),
    "mean over H, W of NHWC": (lambda x: op.mean(x, [1, 2]), lambda x: x.mean((1, 2)), [(2, 7, 9, 37)]),
    "mean over packed C": (
        lambda x: op.mean(x, [1, 4], True),
        lambda x: x.mean((1, 4), keepdims=True),
        [(1, 3, 20, 7, 16)],
    ),
    "max of rows": (lambda x: op.max(x, [-1]), lambda x: x.max(-1), [(10, 1003)]),
    "sum of all": (lambda x: op.sum(x), lambda x: x.sum(), [(3, 40, 41)]),
    "argmax": (lambda x: op.argmax(x, 1), lambda x: x.argmax(1), [(1, 33, 35, 7)]),
    "layer norm": (
        lambda x, g, b: op.nn.layer_norm(x, g, b, [-1]),
        lambda x, g, b: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * g + b,
        [(5, 33, 96), (96,), (96,)],
    ),
    "transpose": (lambda x: op.permute_dims(x, [0, 3, 1, 2]), lambda x: x.transpose(0, 3, 1, 2), [(2, 17, 19, 33)]),
    "shuffle of channels": (
        lambda x: op.reshape(op.permute_dims(op.reshape(x, (1, 2, 16, 20, 21)), [0, 2, 1, 3, 4]), (1, 32, 20, 21)),
        lambda x: x.reshape(1, 2, 16, 20, 21).swapaxes(1, 2).reshape(1, 32, 20, 21),
        [(1, 32, 20, 21)],
    ),
    "concat C": (
        lambda x, y, z: op.concat([x, y, z], 1),
        lambda x, y, z: np.concatenate([x, y, z], 1),
        [(1, 24, 9, 11), (1, 3, 9, 11), (1, 5, 9, 11)],
    ),
    "concat of the last axis, then relu": (
        lambda x, y: op.nn.relu(op.concat([x, y], 3)),
        lambda x, y: np.maximum(np.concatenate([x, y], 3), 0),
        [(1, 20, 21, 24), (1, 20, 21, 5)],
    ),
    "pad": (
        lambda x: op.nn.pad(x, (0, 0, 0, 0, 1, 1, 2, 2)),
        lambda x: np.pad(x, ((0, 0), (0, 0), (1, 1), (2, 2))),
        [(1, 33, 35, 7)],
    ),
    "strided slice": (
        lambda x: op.strided_slice(x, [1, 2], [1, 0], [30, 34], [1, 2]),
        lambda x: x[:, 1:30, 0:34:2],
        [(1, 33, 35, 7)],
    ),
    "first half of a split": (lambda x: op.split(x, 2, 1)[0], lambda x: x[:, :16], [(1, 32, 20, 20)]),
    "add and relu": (
        lambda x, y: op.nn.relu(op.add(x, y)),
        lambda x, y: np.maximum(x + y, 0),
        [(1, 51, 7, 7), (1, 51, 7, 7)],
    ),
    "broadcast over pixels": (op.multiply, lambda x, y: x * y, [(1, 51, 7, 7), (1, 51, 1, 1)]),
    "broadcast over channels": (op.multiply, lambda x, y: x * y, [(1, 51, 7, 7), (1, 1, 7, 7)]),
    "hard swish": (
        lambda x: op.multiply(x, op.clip(op.add(x, relax.const(3.0)), 0, 6)),
        lambda x: x * np.clip(x + 3, 0, 6),
        [(1, 33, 35, 7)],
    ),
    "gelu": (
        lambda x: op.nn.gelu_tanh(x),
        lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        [(1, 33, 35, 7)],
    ),
    "reshape": (lambda x: op.reshape(x, (16, 800)), lambda x: x.reshape(16, 800), [(1, 32, 20, 20)]),
    "scalar": (lambda x: op.nn.relu(x), lambda x: np.maximum(x, 0), [()]),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operator(name: str) -> None:
    build, reference, shapes = OPERATORS[name]
    check(build, reference, *shapes)


@pytest.mark.parametrize("name", ["exp", "sigmoid", "tanh"])
def test_exp_family(name: str) -> None:
    """Accurate over the whole range; infinities and NaN come out as they should."""
    operator, reference, relative, absolute = {
        "exp": (op.exp, np.exp, 3e-7, 0.0),
        "sigmoid": (op.sigmoid, lambda v: 1 / (1 + np.exp(-v)), 3e-7, 0.0),
        "tanh": (op.tanh, np.tanh, 3e-7, 3e-7),
    }[name]
    x = np.concatenate([np.linspace(-100, 100, 4001), np.linspace(-1, 1, 1001), [np.inf, -np.inf, np.nan]])
    x = x.astype("float32")
    func = k.fused(operator, x.shape)
    (got,) = k.run(k.scheduled(func, k.sample(func, seed=1)[0]), [x])
    with np.errstate(over="ignore"):
        want = reference(x.astype("float64"))
    normal = (np.abs(want) > 1.2e-38) & (np.abs(want) < 3.4e38)
    assert (np.abs(got[normal] - want[normal]) <= relative * np.abs(want[normal]) + absolute).all()
    assert np.array_equal(got[-3:], want[-3:].astype("float32"), equal_nan=True)
