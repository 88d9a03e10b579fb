"""How much memory an inference goes over."""

from __future__ import annotations

import pytest

from layoutsearch.layout.build import build_graph
from layoutsearch.layout.footprint import footprint, footprint_class
from layoutsearch.model.canonicalize import canonicalize
from tests.models import nets

MIB = 1 << 20


def test_weights_and_what_is_alive_together() -> None:
    """24 to 40 and on to 16 channels of 60x100 pixels: the widest step holds 40 and either neighbor."""
    module = nets.build((1, 24, 60, 100), body=lambda n, x: n.conv_relu(n.conv_relu(x, 40), 16))
    size = footprint(build_graph(canonicalize(module)))
    alive = 4 * 60 * 100 * (40 + 40)
    assert footprint_class(alive) <= size <= footprint_class(2 * alive)


def test_large_weights_count() -> None:
    module = nets.build((1, 512, 3, 5), body=lambda n, x: n.conv_relu(x, 1024))
    assert footprint(build_graph(canonicalize(module))) >= 4 * 512 * 1024


@pytest.mark.parametrize(
    ("size", "bound"),
    [(0, 1 << 16), (1 << 16, 1 << 16), ((1 << 16) + 1, 1 << 17), (22 * MIB, 32 * MIB), (64 * MIB, 64 * MIB),
     (65 * MIB, 256 * MIB), (500 * MIB, 1024 * MIB)],
)  # fmt: skip
def test_classes(size: int, bound: int) -> None:
    assert footprint_class(size) == bound
