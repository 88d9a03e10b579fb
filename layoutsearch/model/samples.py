"""Inputs of realistic range for validation and timing: smooth images with edges, not white noise.

On noise many vision models saturate (a text detector answers 1e-8 everywhere), and a comparison of such outputs shows
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from layoutsearch.model.load import ModelInput


def sample_inputs(inputs: Sequence[ModelInput], seed: int) -> list[np.ndarray]:
    """One array per input, in order. Floats lie in about [-2, 2], as normalised images do; integers are small."""
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
    image = np.zeros(tuple(shape))
    rows = np.linspace(0, 1, shape[h]).reshape([-1 if i == h else 1 for i in range(4)])
    columns = np.linspace(0, 1, shape[w]).reshape([-1 if i == w else 1 for i in range(4)])
    rest = [1 if i in (h, w) else n for i, n in enumerate(shape)]
    for frequency in (1, 2, 5):
        phase = generator.uniform(0, 2 * np.pi, size=(2, *rest))
        image = image + np.sin(2 * np.pi * frequency * rows + phase[0]) * np.cos(
            2 * np.pi * frequency * columns + phase[1]
        ) / (frequency + 1)
    for _ in range(12):
        top, left = generator.uniform(0, 0.8, size=2)
        height, width = generator.uniform(0.03, 0.2, size=2)
        inside = (rows >= top) & (rows < top + height) & (columns >= left) & (columns < left + width)
        image = np.where(inside, generator.choice([-1.5, 1.5]), image)
    image = image + 0.05 * generator.standard_normal(tuple(shape))
    return np.clip(image, -2, 2).astype(kind)


def relative_error(outputs: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> float:
    """Largest absolute difference over the reference's range, over all outputs; infinite where NaN or shape differ."""
    worst = 0.0 if len(outputs) == len(reference) else float("inf")
    for got, want in zip(outputs, reference, strict=False):
        if got.shape != want.shape or not np.array_equal(np.isnan(got), np.isnan(want)):
            return float("inf")
        a, b = np.nan_to_num(got.astype(np.float64)), np.nan_to_num(want.astype(np.float64))
        if a.size == 0:
            continue
        difference = float(np.abs(a - b).max())
        scale = float(b.max() - b.min()) or float(np.abs(b).max()) or 1.0
        worst = max(worst, difference / scale)
    return worst
