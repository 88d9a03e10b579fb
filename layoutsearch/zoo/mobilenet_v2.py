"""MobileNetV2 1.0 at 224 (Sandler et al. 2018, table 2)."""

from __future__ import annotations

import onnx

from layoutsearch.zoo.network import Network

# (expansion, channels, repeats, stride of the first)
_BLOCKS = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
_STEM, _HEAD, _CLASSES, _SIZE = 32, 1280, 1000, 224


def mobilenet_v2(seed: int = 0) -> onnx.ModelProto:
    """Input `input` of (1, 3, 224, 224), output `output` of (1, 1000); 3.5 million weights."""
    net = Network("mobilenet_v2", (1, 3, _SIZE, _SIZE), seed)
    value = net.relu6(net.batch_norm(net.conv(net.input, _STEM, 3, 2)))
    for expansion, channels, repeats, first_stride in _BLOCKS:
        for index in range(repeats):
            value = _inverted_residual(net, value, expansion, channels, first_stride if index == 0 else 1)
    value = net.relu6(net.batch_norm(net.conv(value, _HEAD, 1)))
    return net.model(net.dense(net.global_average(value), _CLASSES))


def _inverted_residual(net: Network, value: str, expansion: int, channels: int, stride: int) -> str:
    """Expand, filter by channel, project without activation; the input is added where shapes agree."""
    hidden = net.channels(value) * expansion
    inner = value
    # What enters has no activation of its own, so its mean square is one, not two.
    if expansion != 1:
        inner = net.relu6(net.batch_norm(net.conv(inner, hidden, 1, gain=1.0)))
    inner = net.relu6(net.batch_norm(net.conv(inner, hidden, 3, stride, groups=hidden)))
    residual = stride == 1 and net.channels(value) == channels
    # The branch of a sum adds to the variance of what it is added to.
    inner = net.batch_norm(net.conv(inner, channels, 1, gain=0.3 if residual else 2.0))
    return net.add(value, inner) if residual else inner
