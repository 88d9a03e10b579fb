"""matmul with NumPy broadcasting, annotated for the matrix template."""

from __future__ import annotations

import json

from tvm import te, tirx

from layoutsearch.schedule.compute.conv import ANCHOR
from layoutsearch.schedule.indexing import static_shape


def _broadcast(a: list[int], b: list[int]) -> list[int]:
    rank = max(len(a), len(b))
    a, b = [1] * (rank - len(a)) + a, [1] * (rank - len(b)) + b
    return [max(x, y) for x, y in zip(a, b, strict=True)]


def matmul(a: te.Tensor, b: te.Tensor, out_dtype: str = "") -> te.Tensor:
    """(..., M, K) by (..., K, N) -> (..., M, N), batch axes broadcast; operands of at least two dimensions.

    Block `matmul`.
    """
    a_shape, b_shape = static_shape(a.shape), static_shape(b.shape)
    batch = _broadcast(a_shape[:-2], b_shape[:-2])
    dtype = out_dtype or str(a.dtype)
    k = te.reduce_axis((0, a_shape[-1]), "k")

    def at(shape: list[int], outer: tuple[tirx.Expr, ...]) -> list[tirx.Expr | int]:
        own = outer[len(outer) - (len(shape) - 2) :] if len(shape) > 2 else ()
        return [0 if extent == 1 else index for extent, index in zip(shape[:-2], own, strict=True)]

    def compute(*indices: tirx.Expr) -> tirx.Expr:
        outer, (row, column) = indices[:-2], indices[-2:]
        left = a(*at(a_shape, outer), row, k)
        right = b(*at(b_shape, outer), k, column)
        return te.sum(left.astype(dtype) * right.astype(dtype), axis=k)

    return te.compute(
        [*batch, a_shape[-2], b_shape[-1]], compute, name="matmul", attrs={ANCHOR: json.dumps({"op": "matmul"})}
    )
