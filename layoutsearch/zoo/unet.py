"""A U-Net (Ronneberger et al. 2015) with padded convolutions and batch normalization, at 256."""

from __future__ import annotations

import onnx

from layoutsearch.zoo.network import Network

_CHANNELS = (32, 64, 128, 256, 512)
_SIZE = 256


def unet(seed: int = 0) -> onnx.ModelProto:
    """Input `input` of (1, 3, 256, 256), output `output` of (1, 1, 256, 256); four transposed convolutions."""
    net = Network("unet", (1, 3, _SIZE, _SIZE), seed)
    value, skips = net.input, []
    for channels in _CHANNELS[:-1]:
        value = _double(net, value, channels)
        skips.append(value)
        value = net.max_pool(value)
    value = _double(net, value, _CHANNELS[-1])
    for channels, skip in zip(reversed(_CHANNELS[:-1]), reversed(skips), strict=True):
        value = _double(net, net.concat(skip, net.conv_transpose(value, channels)), channels)
    return net.model(net.sigmoid(net.conv(value, 1, 1, bias=True, gain=1.0)))


def _double(net: Network, value: str, channels: int) -> str:
    for _ in range(2):
        value = net.relu(net.batch_norm(net.conv(value, channels, 3)))
    return value
