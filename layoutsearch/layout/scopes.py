"""Memory scopes: where a tensor lies on targets that have textures.

A texture is an array of images whose pixels, texels, hold four channels: `Texture` says how a tensor lies in one. Any
kernel can read any scope, so no scope asks for a transform.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from layoutsearch.layout.layout import Layout

GLOBAL = "global"
TEXTURE = "global.texture"
TEXTURE_WEIGHT = "global.texture-weight"
TEXTURE_NHWC = "global.texture-nhwc"
SCOPES = (GLOBAL, TEXTURE, TEXTURE_WEIGHT, TEXTURE_NHWC)
"""A buffer, and TVM's three ways to fold a tensor into images."""

TEXEL = 4
"""Channels of a texel."""
# What Qualcomm's devices hold at least, as in TVM's target `qcom/adreno-opencl-texture`.
_SPATIAL_LIMIT, _DEPTH_LIMIT = 16384, 2048
# Texels of halves have not been run anywhere: the OpenCL that tests run on has none.
_DTYPE = "float32"


@dataclass(frozen=True)
class Texture:
    """Extents of an image array, in texels: `depth` images of `height` rows of `width` texels."""

    width: int
    height: int
    depth: int

    @classmethod
    def of(cls, shape: Sequence[int], scope: str) -> Texture:
        """How TVM folds a tensor of physical `shape`, (..., 4), with at least 3 axes: an (N, C, H, W, 4) becomes

        * `global.texture`: N * C images of H rows,
        * `global.texture-weight`: one image of N rows,
        * `global.texture-nhwc`: N images of C rows.
        """
        rows = {TEXTURE: len(shape) - 2, TEXTURE_WEIGHT: 1, TEXTURE_NHWC: 2}[scope]
        return cls(math.prod(shape[rows:-1]), shape[rows - 1], math.prod(shape[: rows - 1]))

    @property
    def fits(self) -> bool:
        """Whether every device holds it."""
        return max(self.width, self.height) <= _SPATIAL_LIMIT and self.depth <= _DEPTH_LIMIT


def fits_texture(shape: Sequence[int], dtype: str, scope: str) -> bool:
    """Whether a tensor of physical `shape` can be in a scope that is no buffer."""
    return len(shape) > 2 and shape[-1] == TEXEL and dtype == _DTYPE and Texture.of(shape, scope).fits


def why_no_scope(scope: str, layout: Layout, shape: Sequence[int] | None, axes: str, dtype: str) -> str | None:
    """Why a tensor of logical `shape` (named by `axes`) in `layout` cannot be in `scope`, or None when it can."""
    if scope == GLOBAL:
        return None
    if layout.axes[-1].factor != TEXEL:
        return f"{scope} needs a layout that ends in a block of {TEXEL}, not {layout}"
    if dtype != _DTYPE:
        return f"{scope} holds {_DTYPE}, not {dtype}"
    if shape is None:
        return f"{scope} needs a static shape"
    texture = Texture.of(layout.physical_shape(shape, axes), scope)
    if not texture.fits:
        return (
            f"{scope} of {layout} would be {texture.width} x {texture.height} x {texture.depth} texels, more than "
            f"{_SPATIAL_LIMIT} x {_SPATIAL_LIMIT} x {_DEPTH_LIMIT}"
        )
    return None
