"""Inputs of realistic range for validation and timing: printed pages, not white noise.

On noise many vision models saturate (a text detector answers 1e-8 everywhere), and a comparison of such outputs shows
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from layoutsearch.model.load import ModelInput


def sample_inputs(inputs: Sequence[ModelInput], seed: int) -> list[np.ndarray]:
    """One array per input, in order. Floats lie in about [-1, 1], as normalised images do; integers are small."""
    generator = np.random.default_rng(seed)
    return [_sample(i.shape, i.dtype, generator) for i in inputs]


def _sample(shape: Sequence[int], dtype: str, generator: np.random.Generator) -> np.ndarray:
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return generator.random(tuple(shape)) < 0.5
    if kind.kind in "iu":
        return generator.integers(0, 4, size=tuple(shape)).astype(kind)
    if len(shape) != 4:
        return generator.standard_normal(tuple(shape)).astype(kind)
    # The two largest axes are taken for height and width, whichever layout the model has.
    h, w = sorted(sorted(range(4), key=lambda i: -shape[i])[:2])
    page = _page(shape[h], shape[w], generator).reshape([shape[i] if i in (h, w) else 1 for i in range(4)])
    tint = generator.uniform(0.8, 1.0, size=[1 if i in (h, w) else n for i, n in enumerate(shape)])
    return (page * tint + 0.02 * generator.standard_normal(tuple(shape))).astype(kind)


def _page(height: int, width: int, generator: np.random.Generator) -> np.ndarray:
    """Light paper, unevenly lit, with rows of dark strokes like print, in [-1, 1]; shape (height, width)."""
    y, x = np.mgrid[0:height, 0:width]
    light, period = generator.uniform(0, 6), generator.uniform(0.5, 2, size=2)
    page = 0.75 + 0.2 * np.sin(light + period[0] * y / max(height, 1) + period[1] * x / max(width, 1))
    size = int(np.clip(min(height, width) // 10, 5, 40))
    stroke = max(size // 6, 1)
    for top in range(size // 2, height - size, size + size // 2):
        left = int(generator.integers(1, size + 2))
        while left < width - size:
            ink = generator.uniform(-0.95, -0.6)
            # One upright, one or two bars: enough of a letter for a detector of text.
            page[top : top + size, left : left + stroke] = ink
            for _ in range(int(generator.integers(1, 3))):
                bar = top + int(generator.integers(0, size - stroke))
                page[bar : bar + stroke, left : left + size // 2] = ink
            left += int(generator.integers(size // 2 + 1, size + 2))
    return page


def relative_error(outputs: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> float:
    """Largest absolute difference over the reference's range, over all outputs.

    Infinite where the shapes differ, or what is no finite number does.
    """
    worst = 0.0 if len(outputs) == len(reference) else float("inf")
    for got, want in zip(outputs, reference, strict=False):
        if got.shape != want.shape:
            return float("inf")
        a, b = got.astype(np.float64), want.astype(np.float64)
        # An infinity has no part in the range: every other difference would be nothing beside it.
        finite = np.isfinite(a) & np.isfinite(b)
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return float("inf")
        a, b = a[finite], b[finite]
        if a.size == 0:
            continue
        difference = float(np.abs(a - b).max())
        scale = float(b.max() - b.min()) or float(np.abs(b).max()) or 1.0
        worst = max(worst, difference / scale)
    return worst
