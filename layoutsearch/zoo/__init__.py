"""Models that the project builds itself: known architectures with seeded random weights, as ONNX."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx

from layoutsearch.zoo.mobilenet_v2 import mobilenet_v2
from layoutsearch.zoo.unet import unet
from layoutsearch.zoo.vgg16 import vgg16

MODELS: Mapping[str, Callable[[int], onnx.ModelProto]] = {
    "mobilenet_v2": mobilenet_v2,
    "unet": unet,
    "vgg16": vgg16,
}
"""Name -> builder, which takes a seed."""
