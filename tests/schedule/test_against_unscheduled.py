"""Operators and types off the main road: the scheduled kernel gives what TVM's own unscheduled lowering gives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import relax

from tests.schedule import kernels as k

op = relax.op
F32 = "float32"

CASES: dict[str, tuple[Callable[..., relax.Expr], list[tuple[tuple[int, ...], str]]]] = {
    "take": (lambda x, i: op.take(x, i, axis=0), [((50, 133), F32), ((70,), "int32")]),
    "gather by 64-bit indices": (
        lambda x, i: op.gather_elements(x, i, axis=1),
        [((40, 150), F32), ((40, 150), "int64")],
    ),
    "where": (op.where, [((40, 150), "bool"), ((40, 150), F32), ((40, 150), F32)]),
    "cast to 64 bits": (lambda x: op.astype(x, "int64"), [((40, 150), F32)]),
    "64-bit sum": (lambda x: op.sum(x, [1]), [((40, 150), "int64")]),
    "comparison": (op.equal, [((40, 150), "int64"), ((40, 150), "int64")]),
    "half precision": (
        lambda x, w: op.nn.relu(op.nn.conv2d(x, w, padding=(1, 1))),
        [((1, 8, 12, 12), "float16"), ((8, 8, 3, 3), "float16")],
    ),
    "int8 into int32": (
        lambda x, w: op.nn.conv2d(x, w, padding=(1, 1), out_dtype="int32"),
        [((1, 8, 12, 12), "int8"), ((8, 8, 3, 3), "int8")],
    ),
    "half precision product": (
        lambda x, w: op.matmul(x, w, out_dtype=F32),
        [((12, 64), "float16"), ((64, 40), "float16")],
    ),
    "group norm": (
        lambda x, g, b: op.nn.group_norm(x, g, b, 4, 1, [2, 3]),
        [((1, 24, 10, 11), F32), ((24,), F32), ((24,), F32)],
    ),
    "variance": (lambda x: op.variance(x, [1, 2]), [((5, 24, 30), F32)]),
    "product": (lambda x: op.prod(x, [1]), [((50, 24), F32)]),
    "log softmax": (lambda x: op.nn.log_softmax(x, -1), [((40, 150), F32)]),
    "stack": (lambda x, y: op.stack([x, y], 0), [((50, 124), F32), ((50, 124), F32)]),
    "repeat": (lambda x: op.repeat(x, 2, 1), [((50, 124), F32)]),
    "pool behind a convolution": (
        lambda x, w: op.nn.max_pool2d(op.nn.relu(op.nn.conv2d(x, w)), (2, 2), (2, 2)),
        [((1, 16, 10, 11), F32), ((24, 16, 1, 1), F32)],
    ),
    "mean behind a convolution": (
        lambda x, w: op.mean(op.nn.conv2d(x, w), [2, 3], True),
        [((1, 16, 10, 11), F32), ((24, 16, 1, 1), F32)],
    ),
    "bias given as a vector": (
        lambda x, w, b: op.nn.relu(op.add(op.nn.conv2d(x, w), op.reshape(b, (1, 24, 1, 1)))),
        [((1, 16, 10, 11), F32), ((24, 16, 1, 1), F32), ((24,), F32)],
    ),
    "scores": (
        lambda q, t: op.nn.softmax(op.matmul(q, op.permute_dims(t, [0, 1, 3, 2])), -1),
        [((1, 4, 33, 16), F32), ((1, 4, 33, 16), F32)],
    ),
    "conv1d": (lambda x, w: op.nn.conv1d(x, w, padding=(1, 1)), [((1, 4, 60), F32), ((8, 4, 3), F32)]),
    "vector by matrix": (op.matmul, [((64,), F32), ((64, 40), F32)]),
}


@pytest.mark.parametrize("name", CASES)
def test_same_result(name: str) -> None:
    build, params = CASES[name]
    rng = np.random.default_rng(2)
    arrays = [
        rng.standard_normal(shape).astype(dtype) if "float" in dtype else rng.integers(0, 2, shape).astype(dtype)
        for shape, dtype in params
    ]
    func = k.fused(build, *(s for s, _ in params), dtypes=[d for _, d in params])
    want = k.run(func, arrays)
    for schedule in k.sample(func, seed=4, count=2):
        got = k.run(k.scheduled(func, schedule), arrays)
        for g, w in zip(got, want, strict=True):
            tolerance = 4e-3 if g.dtype == np.float16 else 1e-4
            np.testing.assert_allclose(g.astype("float64"), w.astype("float64"), rtol=tolerance, atol=tolerance)
