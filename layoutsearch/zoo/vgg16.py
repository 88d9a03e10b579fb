"""VGG-16 at 224 (Simonyan and Zisserman 2015, configuration D)."""

from __future__ import annotations

import onnx

from layoutsearch.zoo.network import Network

# (channels, convolutions) of each stage; a pooling ends it.
_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
_HIDDEN, _CLASSES, _SIZE = 4096, 1000, 224


def vgg16(seed: int = 0) -> onnx.ModelProto:
    """Input `input` of (1, 3, 224, 224), output `output` of (1, 1000); 138 million weights."""
    net = Network("vgg16", (1, 3, _SIZE, _SIZE), seed)
    value = net.input
    for channels, count in _STAGES:
        for _ in range(count):
            value = net.relu(net.conv(value, channels, 3, bias=True))
        value = net.max_pool(value)
    side = _SIZE // 2 ** len(_STAGES)
    value = net.flatten(value, net.channels(value) * side * side)
    for _ in range(2):
        value = net.relu(net.dense(value, _HIDDEN, gain=2.0))
    return net.model(net.dense(value, _CLASSES))
