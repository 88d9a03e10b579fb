"""Models with seeded random weights, as ONNX: known architectures, built here or taken from the onnx package."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx

from layoutsearch.zoo.light import BUILDERS
from layoutsearch.zoo.mobilenet_v2 import mobilenet_v2
from layoutsearch.zoo.unet import unet
from layoutsearch.zoo.vgg16 import vgg16

MODELS: Mapping[str, Callable[[int], onnx.ModelProto]] = {
    "mobilenet_v2": mobilenet_v2,
    "unet": unet,
    "vgg16": vgg16,
    **BUILDERS,
}
"""Name -> builder, which takes a seed."""
