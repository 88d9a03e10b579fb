"""Seeded inputs that look like what the models see: images with structure, normalised as the models expect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from layoutsearch.model import LoadedModel

IMAGENET_MEAN = np.array([0.485, 0.456, 0.406], "float32").reshape(1, 3, 1, 1)
IMAGENET_STD = np.array([0.229, 0.224, 0.225], "float32").reshape(1, 3, 1, 1)


def _photo(height: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """An RGB image in 0..1: gradients, a few flat shapes with hard edges, sensor noise."""
    y, x = np.mgrid[0:height, 0:width].astype("float64")
    y, x = y / max(height - 1, 1), x / max(width - 1, 1)
    image = np.stack([0.5 + 0.3 * np.sin(rng.uniform(2, 9) * x + rng.uniform(2, 9) * y + rng.uniform(0, 6))] * 3)
    image += rng.uniform(-0.15, 0.15, (3, 1, 1)) * x
    for _ in range(12):
        cy, cx, radius = rng.uniform(size=3) * (1, 1, 0.25)
        image[:, (y - cy) ** 2 + (x - cx) ** 2 < radius**2] = rng.uniform(0, 1, (3, 1))
    return np.clip(image + rng.normal(0, 0.02, image.shape), 0, 1)


def _page(height: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """An RGB image in 0..1: dark strokes in rows on light paper, as scanned text has them."""
    image = np.full((3, height, width), 0.93) + rng.normal(0, 0.01, (3, height, width))
    size = max(height // 6, 6)
    for top in range(size // 2, height - size, size + size // 2):
        left = rng.integers(1, max(width // 8, 2))
        while left < width - size:
            stroke = max(size // 6, 1)
            ink = rng.uniform(0.05, 0.25)
            image[:, top : top + size, left : left + stroke] = ink
            middle = top + int(rng.integers(0, size - stroke))
            image[:, middle : middle + stroke, left : left + size // 2] = ink
            left += int(rng.integers(size // 2 + 1, size + 2))
    return np.clip(image, 0, 1)


def photo(shape: Sequence[int], seed: int = 0) -> np.ndarray:
    """Photograph-like (N, 3, H, W), float32, ImageNet's mean and deviation taken out."""
    images = [_photo(shape[2], shape[3], np.random.default_rng([seed, n])) for n in range(shape[0])]
    return ((np.stack(images) - IMAGENET_MEAN) / IMAGENET_STD).astype("float32")


def page(shape: Sequence[int], seed: int = 0) -> np.ndarray:
    """Text-like (N, 3, H, W), float32, in -1..1."""
    images = [_page(shape[2], shape[3], np.random.default_rng([seed, n])) for n in range(shape[0])]
    return ((np.stack(images) - 0.5) / 0.5).astype("float32")


def tensor(shape: Iterable[int], dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Unit normal numbers, or small integers for an integer type, for graphs that are no image models."""
    rng = np.random.default_rng([seed, 7])
    if "float" in dtype:
        return rng.normal(size=tuple(shape)).astype(dtype)
    return rng.integers(0, 4, size=tuple(shape)).astype(dtype)


def for_model(model: LoadedModel, seed: int = 0) -> list[np.ndarray]:
    """Inputs in the order of the model: images for (N, 3, H, W) of at least 32 pixels, else `tensor`."""
    arrays = []
    for i, spec in enumerate(model.inputs):
        if len(spec.shape) == 4 and spec.shape[1] == 3 and min(spec.shape[2:]) >= 32 and spec.dtype == "float32":
            make = page if "ppocr" in model.name.lower().replace("-", "") else photo
            arrays.append(make(spec.shape, seed + i))
        else:
            arrays.append(tensor(spec.shape, spec.dtype, seed + i))
    return arrays
