"""Families of networks by number of operators, for `bench solver`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from layoutsearch.bench.graphs import Net, Value

_DENSENET_121 = (6, 12, 24, 16)


def chain(net: Net, n_ops: int, seed: int) -> None:
    """A long chain of convolutions with skips over up to ten operators, about three in ten."""
    rng = np.random.default_rng(seed + 1)
    x = net.conv(None, 64, side=56)
    history = [x]
    while len(net) < n_ops:
        x = net.conv(x, int(rng.choice([48, 64, 96, 128])) if rng.random() < 0.3 else x.channels, kernel=3)
        earlier = [v for v in history[-10:-2] if v.channels == x.channels]
        if rng.random() < 0.3 and earlier and len(net) < n_ops:
            x = net.flexible(x, earlier[int(rng.integers(len(earlier)))])
        history.append(x)


def resnet(net: Net, n_ops: int, seed: int) -> None:
    """Bottleneck blocks (He et al. 2016); a block's input is read by its first convolution and by the add."""
    blocks = [max(1, round(b * (n_ops - 4) / 68)) for b in (3, 4, 6, 3)]
    x = net.flexible(net.conv(None, 64, kernel=7, stride=2), stride=2)
    for stage, n in enumerate(blocks):
        width = 64 * 2**stage
        for b in range(n):
            stride = 2 if b == 0 and stage else 1
            y = net.conv(net.conv(x, width, kernel=1), width, stride=stride)
            y = net.conv(y, 4 * width, kernel=1)
            x = net.flexible(y, net.conv(x, 4 * width, kernel=1, stride=stride) if b == 0 else x)
    net.conv(net.flexible(x, stride=x.side), 1000, kernel=1)


def inception(net: Net, n_ops: int, seed: int) -> None:
    """Modules of four branches that meet in one n-ary concat (Szegedy et al. 2016), repeated as often as it takes."""
    x = net.conv(None, 32, stride=2, side=256)
    x = net.flexible(net.conv(net.conv(x, 32), 64), stride=2)
    x = net.flexible(net.conv(net.conv(x, 80, kernel=1), 192), stride=2)
    per_module = 9
    for module in range(max(1, round((n_ops - 9) / per_module))):
        width = 64 * (1 + min(3, module // 3))
        if module in (3, 8):
            x = net.concat(net.conv(x, 2 * width, stride=2), net.flexible(x, stride=2))
        one = net.conv(x, width, kernel=1)
        three = net.conv(net.conv(x, width, kernel=1), width)
        double = net.conv(net.conv(net.conv(x, width, kernel=1), width), width)
        pool = net.conv(net.flexible(x), width, kernel=1)
        x = net.concat(one, three, double, pool)
    net.conv(net.flexible(x, stride=x.side), 1000, kernel=1)


def densenet(net: Net, n_ops: int, seed: int) -> None:
    """Each layer reads one n-ary concat of all earlier layers of its block (Huang et al. 2017).

    185 operators are DenseNet-121; more lengthen its blocks (to some 40 layers) and then repeat them.
    """
    scale = n_ops / 185
    stretch = min(scale, 1.7)
    blocks = [max(2, round(n * stretch)) for n in _DENSENET_121]
    blocks *= max(1, round(scale / stretch))
    x = net.flexible(net.conv(None, 64, kernel=7, stride=2), stride=2)
    for number, n in enumerate(blocks):
        features = [x]
        for _ in range(n):
            joined = net.concat(*features) if len(features) > 1 else x
            features.append(net.conv(net.conv(joined, 128, kernel=1), 32))
        x = net.conv(net.concat(*features), 32 * (n + 1), kernel=1)
        x = net.flexible(x, stride=2 if number < 3 else 1)
    net.conv(x, 1000, kernel=1)


def unet(net: Net, n_ops: int, seed: int) -> None:
    """Encoder and decoder of five levels with a skip at each (Ronneberger et al. 2015); more operators lengthen them.

    Skips are concats, and each level's value is also read by the pool that leads down.
    """
    levels = 4
    per_level = max(1, round((n_ops - 2 * levels - levels - 1) / (2 * levels + 1)))

    def stack(x: Value | None, width: int) -> Value:
        for _ in range(per_level):
            x = net.conv(x, width, side=512)
        assert x is not None
        return x

    x: Value | None = None
    skips = []
    for level in range(levels):
        x = stack(x, 32 * 2**level)
        skips.append(x)
        x = net.flexible(x, stride=2)
    x = stack(x, 32 * 2**levels)
    for skip in reversed(skips):
        x = stack(net.concat(net.upsample(x, skip.channels), skip), skip.channels)
    net.conv(x, 2, kernel=1)


FAMILIES: dict[str, Callable[[Net, int, int], None]] = {
    "chain": chain,
    "densenet": densenet,
    "unet": unet,
    "resnet": resnet,
    "inception": inception,
}
