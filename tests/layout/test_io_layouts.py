"""What `--io-layout` says, what it means for a model, and the one line where it cannot be."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax

from layoutsearch.errors import SpaceError
from layoutsearch.layout.border import Border
from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.layout.io_layouts import BorderRules, IoLayouts
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.rules import initial_assignment, transforms_of
from layoutsearch.model import canonicalize
from tests.models import nets


def two_readers() -> tvm.IRModule:
    """An input that two convolutions read, a second one that is not read by any; outputs of four and of two dimensions.

    The first output has 24 channels, the second is the mean of another tensor.
    """

    def body(n: nets.Net, x: relax.Expr, y: relax.Expr) -> relax.Expr:
        joined = n.emit(relax.op.add(n.conv(x, 24, 1), n.conv(x, 24, 3)))
        mean = n.emit(relax.op.mean(n.emit(relax.op.add(joined, y)), axis=[2, 3]))
        return relax.Tuple([n.relu(joined), mean])

    return nets.build((1, 16, 6, 9), (1, 24, 6, 9), body=body)


@pytest.fixture(scope="module")
def graph() -> LayoutGraph:
    return build_graph(canonicalize(two_readers()))


def rules(graph: LayoutGraph, *words: str) -> BorderRules:
    return IoLayouts.parse(words).rules(graph, ["image", "y"], ["mask", "score"])


def test_words() -> None:
    assert IoLayouts.parse(None).words is None
    assert IoLayouts.parse("keep").words is None
    assert IoLayouts.parse(["y=NHWC", "free", "a=b=NCHW16c"]).words == ["free", "a=b=NCHW16c", "y=NHWC"]
    assert IoLayouts.parse({"x": "NHWC"}) == IoLayouts.parse("x=NHWC") == IoLayouts.parse(["x=NHWC", "x=NHWC"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("NHWC", "--io-layout 'NHWC': expected keep, free or NAME=LAYOUT, such as x=NHWC"),
        ("x=", "--io-layout 'x=': expected keep, free or NAME=LAYOUT"),
        (["x=NHWC", "x=NCHW"], "--io-layout: x is to be NHWC and NCHW; give one of them"),
        (["keep", "free"], "keep and free contradict each other"),
    ],
)
def test_words_that_say_nothing(words: str | list[str], message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        IoLayouts.parse(words)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("x=NHWC", "the model has no 'x'; its inputs are image, y, its outputs mask, score"),
        ("score=NHWC", "score=NHWC: output score has 2 dimensions; only a tensor of four"),
        ("image=NCHW5c", "input image is NCHW 1x16x6x9: block 5 does not divide C=16; give another layout"),
        ("image=NCHW16h", r"layout 'NCHW16h' .*|blocks another axis|block 16 does not divide H=6"),
        ("mask=NCHW16c", "output mask is NCHW 1x24x6x9: block 16 does not divide C=24; give another layout"),
        ("image=OIHW", "layout OIHW does not fit a tensor with axes NCHW"),
        ("image=nhwc", "image=nhwc: layout 'nhwc' blocks N but has no axis N, or keep, or free"),
    ],
)
def test_what_cannot_be_is_one_line(graph: LayoutGraph, word: str, message: str) -> None:
    with pytest.raises(SpaceError, match=message) as caught:
        rules(graph, word)
    assert "\n" not in str(caught.value)


def test_what_they_mean(graph: LayoutGraph) -> None:
    assert rules(graph) == rules(graph, "keep") == rules(graph, "image=NCHW", "mask=keep") == BorderRules()
    one = rules(graph, "image=NHWC", "mask=NCHW8c")
    assert one == BorderRules(Border({"x": Layout("NHWC")}, {0: Layout("NCHW8c")}))
    assert rules(graph, "free") == BorderRules(free_inputs=frozenset({"x", "x1"}), free_outputs=frozenset({0}))
    assert rules(graph, "free", "y=keep") == BorderRules(free_inputs=frozenset({"x"}), free_outputs=frozenset({0}))
    mixed = rules(graph, "free", "image=NHWC")
    assert (mixed.fixed.inputs, mixed.free_inputs) == ({"x": Layout("NHWC")}, {"x1"})


def test_the_border_of_an_assignment(graph: LayoutGraph) -> None:
    nhwc = {name: Candidate.uniform(Layout("NHWC")) for name in initial_assignment(graph)}
    for op in graph.anchors:
        nhwc[op.name] = Candidate.of("NHWC", "HWIO" if "conv" in op.op else None)
    free = rules(graph, "free")
    border = free.border(graph, nhwc)
    assert border == Border({"x": Layout("NHWC"), "x1": Layout("NHWC")}, {0: Layout("NHWC")})
    # What is left is in front of the output of two dimensions.
    assert [t for t, _, _ in transforms_of(graph, nhwc, border)] == ["adaptive_avg_pool2d_0"]
    assert len(transforms_of(graph, nhwc)) == 4
    assert free.border(graph, initial_assignment(graph)) == Border()
    assert free.border(graph, nhwc, {"x": Layout("NCHW8c")}).inputs["x"] == Layout("NCHW8c")
    assert free.admits(graph, border)
    assert not rules(graph, "free", "mask=keep").admits(graph, border)
    assert not BorderRules().admits(graph, border)
