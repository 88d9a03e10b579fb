"""Winograd's minimal filtering F(m x m, 3 x 3): its matrices, and its transforms as few additions.

    Y = A^T [ (G g G^T) * (B^T d B) ] A        for a tile d of (m + 2) x (m + 2) inputs and m x m outputs

with (m + 2)^2 multiplications in place of 9 m^2 (S. Winograd, Arithmetic Complexity of Computations, 1980; A. Lavin and
S. Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016). Interpolation points are 0, 1, -1 and for m = 4
also 2, -2. Points come in pairs +-p, so rows of B^T and columns of A^T do too: their even and odd parts are shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

KERNEL = 3
"""Extent of the kernels, along both axes."""


@dataclass(frozen=True)
class Minimal:
    """F(m x m, 3 x 3), one axis of it; matrices as nested tuples.

    Attributes:
        outputs: m, outputs of a tile along one axis.
        gather: A^T, m x (m + 2): from products to outputs.
        weights: G, (m + 2) x 3: of a kernel.
        data: B^T, (m + 2) x (m + 2): of a tile of inputs.
    """

    outputs: int
    gather: tuple[tuple[float, ...], ...]
    weights: tuple[tuple[float, ...], ...]
    data: tuple[tuple[float, ...], ...]

    @property
    def points(self) -> int:
        """m + 2, inputs of a tile along one axis, and products."""
        return self.outputs + KERNEL - 1

    def data_parts(self, d: Sequence[Any]) -> list[Any]:
        """B^T d for a column `d` of m + 2 values: anything that can be added and multiplied by numbers."""
        out: list[Any] = [None] * self.points
        for ends in (0, self.points - 1):
            out[ends] = _combine(self.data[ends], d)
        for i in range(1, self.points - 1, 2):
            plus, minus = self.data[i], self.data[i + 1]
            even = _combine([p if p == q else 0.0 for p, q in zip(plus, minus, strict=True)], d)
            odd = _combine([p if p == -q else 0.0 for p, q in zip(plus, minus, strict=True)], d)
            out[i], out[i + 1] = even + odd, even - odd
        return out

    def outputs_of(self, products: Sequence[Any]) -> list[Any]:
        """A^T p for a column `products` of m + 2 values."""
        pairs = range(1, self.points - 1, 2)
        sums = {i: products[i] + products[i + 1] for i in pairs}
        differences = {i: products[i] - products[i + 1] for i in pairs}
        out = []
        for row in self.gather:
            terms = [(row[0], products[0])]
            terms += [(row[i], sums[i] if row[i] == row[i + 1] else differences[i]) for i in pairs]
            terms.append((row[-1], products[-1]))
            out.append(_combine([c for c, _ in terms], [v for _, v in terms]))
        return out


def _combine(coefficients: Sequence[float], values: Sequence[Any]) -> Any:
    """The sum of coefficient times value; zeros left out, ones not multiplied by, positive terms first."""
    terms = sorted(((c, v) for c, v in zip(coefficients, values, strict=True) if c), key=lambda t: t[0] < 0)
    total: Any = None
    for c, v in terms:
        scaled = v if abs(c) == 1 else v * abs(c)
        if total is None:
            total = scaled if c > 0 else scaled * -1.0
        else:
            total = total + scaled if c > 0 else total - scaled
    return total


_MINIMAL = {
    2: Minimal(
        2,
        gather=((1, 1, 1, 0), (0, 1, -1, -1)),
        weights=((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1)),
        data=((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
    ),
    4: Minimal(
        4,
        gather=((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1)),
        weights=(
            (1 / 4, 0, 0),
            (-1 / 6, -1 / 6, -1 / 6),
            (-1 / 6, 1 / 6, -1 / 6),
            (1 / 24, 1 / 12, 1 / 6),
            (1 / 24, -1 / 12, 1 / 6),
            (0, 0, 1),
        ),
        data=(
            (4, 0, -5, 0, 1, 0),
            (0, -4, -4, 1, 1, 0),
            (0, 4, -4, -1, 1, 0),
            (0, -2, -1, 2, 1, 0),
            (0, 2, -1, -2, 1, 0),
            (0, 4, 0, -5, 0, 1),
        ),
    ),
}

OUTPUTS = tuple(_MINIMAL)
"""Known m."""


@cache
def minimal(outputs: int) -> Minimal:
    """F(`outputs`, 3).

    Raises:
        KeyError: no such algorithm here.
    """
    return _MINIMAL[outputs]


def transform_weights(kernel: np.ndarray, outputs: int) -> np.ndarray:
    """G g G^T of every kernel of (O, I, 3, 3), as (O, I, m + 2, m + 2), computed in float64."""
    g = np.asarray(minimal(outputs).weights, dtype="float64")
    return np.einsum("er,oirs,fs->oief", g, kernel.astype("float64"), g, optimize=True).astype(kernel.dtype)
