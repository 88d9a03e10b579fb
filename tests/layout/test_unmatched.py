"""Rules of a file that say nothing, or cannot be, for a model."""

from __future__ import annotations

import pytest
from tvm import relax

from layoutsearch.errors import SpaceError
from layoutsearch.layout.unmatched import unmatched_rules
from tests.layout.ops import graph_of, space

REST = 'match = {}\nlayouts = ["NCHW", "NHWC"]'
GRAPH = graph_of(3, lambda n, x: n.emit(relax.op.nn.max_pool2d(n.conv(n.conv(x, 10), 14, 1), (2, 2))))


@pytest.mark.parametrize(
    ("match", "line"),
    [
        (
            'op = "nn.avg_pool2d"',
            "rule 'rule0' matches no op of the model; the nearest op of the model is nn.max_pool2d",
        ),
        ('kind = "conv2d_depthwise"', "matches no op of the model; the nearest kind of the model is conv2d"),
        ('name = "conv2d_7"', "matches no op of the model; the nearest name of the model is conv2d_"),
        ('op = "nn.conv2d", in_channels = 4', "matches no op of the model; the nearest op of the model is nn.conv2d"),
        ("depthwise = true", "rule 'rule0' matches no op of the model"),
    ],
)
def test_a_rule_that_matches_nothing_is_a_line(match: str, line: str) -> None:
    (found,) = unmatched_rules(space(f"match = {{ {match} }}\nlayouts = ['NCHW']", REST), GRAPH)
    assert found.startswith("test.toml: ")
    assert line in found


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ('match = { op = "nn.conv9d" }\nlayouts = ["NCHW"]', "TVM has no op 'nn.conv9d'; the nearest op .* nn.conv2d"),
        ('match = { kind = "conv2d_depth" }\nlayouts = ["NCHW"]', "there is no kind 'conv2d_depth'; the nearest kind"),
        ('match = { op = "nn.conv2d", kernel = [1, 1] }\nlayouts = ["NCHW", "NCHW{i}c->NCHW{o}c"]\nblocks = [9, 11]',
         r"rule 'rule0': none of its blocks \[9, 11\] divides the channels of an op it matches: 10, 14"),
    ],
)  # fmt: skip
def test_a_rule_that_cannot_be_is_an_error(rule: str, message: str) -> None:
    with pytest.raises(SpaceError, match=message) as caught:
        unmatched_rules(space(rule, REST), GRAPH)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("blocks", ["[2, 9]", "[10]", "[16]"])
def test_blocks_of_which_one_fits_somewhere(blocks: str) -> None:
    """16 divides neither 10 nor 14, but an image's 3 channels are one block."""
    rule = f'match = {{ op = "nn.conv2d" }}\nlayouts = ["NCHW", "NCHW{{i}}c->NCHW"]\nblocks = {blocks}'
    assert unmatched_rules(space(rule, REST), GRAPH) == []
