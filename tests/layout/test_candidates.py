"""Each operator gets exactly its legal candidates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tvm import relax

from layoutsearch.errors import SpaceError
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.candidates import enumerate_candidates, nearest, uniform_layouts
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.rules import initial_candidate
from tests.layout.ops import candidates_of, everywhere, first, graph_of, space
from tests.models.nets import Net

op = relax.op
CONV = '["NCHW", "NHWC", "NCHW{i}c->NCHW{o}c"]'
PLAIN = {"NCHW,OIHW,NCHW", "NHWC,HWIO,NHWC"}


def packed(inputs: list[int], outputs: list[int], kernel: str = "OIHW") -> set[str]:
    return {f"NCHW{i}c,{kernel}{i}i{o}o,NCHW{o}c" for i in inputs for o in outputs}


@pytest.mark.parametrize(
    ("channels", "out", "groups", "blocks", "wanted"),
    [
        (16, 16, 1, "[4, 8, 16]", packed([4, 8, 16], [4, 8, 16])),
        (16, 24, 1, "[4, 8, 16]", packed([4, 8, 16], [4, 8])),
        (24, 48, 1, "[8, 16, 32]", packed([8], [8, 16])),
        # An image: all its channels are one block.
        (3, 16, 1, "[4, 8, 16]", packed([3], [4, 8, 16])),
        (4, 16, 1, "[8, 16]", packed([4], [8, 16])),
        (1, 16, 1, "[4, 8, 16]", set()),
        # No block divides: the largest common divisor with the largest block, if it is worth a vector.
        (20, 36, 1, "[8, 16]", packed([4], [4])),
        (20, 16, 1, "[16]", packed([4], [16])),
        (16, 10, 1, "[4, 8, 16]", set()),
        (16, 7, 1, "[4, 8, 16]", set()),
        (6, 16, 1, "[4, 8, 16]", set()),
        # Blocks must not cross groups: 8 in and 24 out in each of two.
        (16, 48, 2, "[4, 8, 16]", packed([4, 8], [4, 8])),
        (24, 24, 2, "[4, 8, 16]", packed([4], [4])),
        (8, 16, 4, "[4, 8, 16]", packed([], [])),
        # Two filters a channel are groups of one input channel.
        (16, 32, 16, "[4, 8, 16]", set()),
    ],
)
def test_conv2d(channels: int, out: int, groups: int, blocks: str, wanted: set[str]) -> None:
    graph = graph_of(channels, lambda n, x: n.conv(x, out, groups=groups))
    conv = first(graph, "nn.conv2d")
    assert candidates_of(graph, conv, everywhere(CONV, blocks)) == PLAIN | wanted


@pytest.mark.parametrize(("channels", "lanes"), [(16, [4, 8, 16]), (24, [4, 8]), (3, []), (7, []), (20, [4])])
def test_depthwise(channels: int, lanes: list[int]) -> None:
    graph = graph_of(channels, lambda n, x: n.depthwise(x))
    layouts = '["NCHW", "NHWC", "NCHW{b}c", "NCHW{i}c->NCHW{o}c"]'
    wanted = {f"NCHW{b}c,OIHW{b}o,NCHW{b}c" for b in lanes}
    assert candidates_of(graph, first(graph, "nn.conv2d"), everywhere(layouts)) == PLAIN | wanted


def test_mixed_sides() -> None:
    graph = graph_of(8, lambda n, x: n.conv(x, 24))
    layouts = '["NCHW->NCHW{o}c", "NCHW{i}c->NCHW", "NHWC->NCHW", "NCHW->NHWC", "NCHW{i}c->NHWC"]'
    assert candidates_of(graph, first(graph, "nn.conv2d"), everywhere(layouts, "[8]")) == {
        "NCHW,OIHW8o,NCHW8c",
        "NCHW8c,OIHW8i,NCHW",
        "NHWC,OIHW,NCHW",
        "NCHW,HWIO,NHWC",
        "NCHW8c,HWIO8i,NHWC",
    }


@pytest.mark.parametrize(
    ("out", "blocks", "wanted"),
    [
        (48, "[16, 32]", "OHWI16o"),
        (1000, "[16, 32]", "OHWI40o"),
        (24, "[16, 32]", "OHWI24o"),
        (360, "[16, 32]", "OHWI72o"),
        (1000, "[4, 8]", "OHWI4o"),
        # Nothing between one vector and six: the best is not full enough.
        (17 * 101, "[16]", None),
        (12, "[16]", None),
    ],
)
def test_packs_of_output_channels(out: int, blocks: str, wanted: str | None) -> None:
    graph = graph_of(16, lambda n, x: n.conv(x, out, 1))
    found = candidates_of(graph, first(graph, "nn.conv2d"), everywhere('["NCHW", "NHWC:OHWI{k}o"]', blocks))
    assert found == {"NCHW,OIHW,NCHW"} | ({f"NHWC,{wanted},NHWC"} if wanted else set())


def test_an_algorithm_is_refused_where_it_is_none_or_not_for_the_operator() -> None:
    graph = graph_of(16, lambda n, x: n.emit(op.nn.max_pool2d(n.conv(x, 16))))
    pool = first(graph, "nn.max_pool2d")
    spaces = enumerate_candidates(graph, everywhere('["NCHW", "NCHW@winograd2"]', "[8]"))
    assert [why for _, why in spaces[pool.name].refused] == ["winograd2 is for convolutions"]
    with pytest.raises(SpaceError, match="'fft' is not an algorithm; known are direct, winograd2, winograd4"):
        enumerate_candidates(graph, everywhere('["NCHW", "NCHW@fft"]', "[8]"))


WINOGRAD = '["NCHW", "NCHW@winograd2", "NHWC@winograd4", "NCHW{i}c->NCHW{o}c@winograd2", "NHWC:OHWI8o@winograd4"]'


@pytest.mark.parametrize(
    ("channels", "out", "options", "wanted"),
    [
        (
            16,
            24,
            {},
            {
                "NHWC,HWOI8o,NHWC,winograd4",
                "NHWC,OHWI8o,NHWC,winograd4",
                "NCHW8c,HWOI8o,NCHW8c,winograd2",
                "NCHW16c,HWOI8o,NCHW8c,winograd2",
            },
        ),
        # No block divides: weights in plain order, blocks of the data by the greatest common divisor.
        (
            24,
            40,
            {"blocks": "[16]"},
            {"NHWC,HWIO,NHWC,winograd4", "NHWC,OHWI8o,NHWC,winograd4", "NCHW8c,HWIO,NCHW8c,winograd2"},
        ),
        (12, 16, {}, set()),
        (16, 16, {"groups": 2}, set()),
        (16, 16, {"stride": 2}, set()),
        (16, 16, {"kernel": 5}, set()),
    ],
)
def test_winograd(channels: int, out: int, options: dict[str, int | str], wanted: set[str]) -> None:
    blocks = str(options.pop("blocks", "[8, 16]"))
    graph = graph_of(channels, lambda n, x: n.conv(x, out, **options))
    found = candidates_of(graph, first(graph, "nn.conv2d"), everywhere(WINOGRAD, blocks))
    assert found - {"NCHW,OIHW,NCHW"} == wanted


@pytest.mark.parametrize(
    ("out", "groups", "wanted"),
    [
        (24, 1, {"NHWC,OHWI8o,NHWC", "NCHW4c,IHWO4i8o,NCHW"}),
        (12, 1, set()),
        (24, 2, set()),
    ],
)
def test_kernels_that_a_pattern_names(out: int, groups: int, wanted: set[str]) -> None:
    """Weights may be blocked beside unblocked data, where their block divides and crosses no group."""
    graph = graph_of(16, lambda n, x: n.conv(x, out, groups=groups))
    conv = first(graph, "nn.conv2d")
    patterns = '["NCHW", "NHWC:OHWI8o", "NCHW4c->NCHW:IHWO4i8o"]'
    assert candidates_of(graph, conv, everywhere(patterns)) == {"NCHW,OIHW,NCHW"} | wanted
    refused = dict(enumerate_candidates(graph, everywhere(patterns))[conv.name].refused)
    assert refused.keys() == (set() if wanted else {"NHWC->NHWC:OHWI8o", "NCHW4c->NCHW:IHWO4i8o"})


def transposed(groups: int, out: int) -> Callable[[Net, relax.Expr], relax.Expr]:
    def body(n: Net, x: relax.Expr) -> relax.Expr:
        weight = n.const((n.channels(x), out // groups, 3, 3))
        return n.emit(op.nn.conv2d_transpose(x, weight, strides=2, groups=groups))

    return body


@pytest.mark.parametrize(
    ("channels", "out", "groups", "wanted"),
    [
        (16, 24, 1, packed([4, 8, 16], [4, 8], "IOHW")),
        (3, 8, 1, packed([3], [4, 8], "IOHW")),
        (16, 16, 2, packed([4, 8], [4, 8], "IOHW")),
        (8, 8, 8, {f"NCHW{b}c,IOHW{b}i,NCHW{b}c" for b in (4, 8)}),
    ],
)
def test_conv2d_transpose(channels: int, out: int, groups: int, wanted: set[str]) -> None:
    graph = graph_of(channels, transposed(groups, out))
    conv = first(graph, "nn.conv2d_transpose")
    plain = {"NCHW,IOHW,NCHW", "NHWC,HWIO,NHWC"}
    assert candidates_of(graph, conv, everywhere(CONV)) == plain | wanted


@pytest.mark.parametrize("pool", ["max_pool2d", "avg_pool2d", "adaptive_avg_pool2d"])
@pytest.mark.parametrize(("channels", "lanes"), [(16, [4, 8, 16]), (24, [4, 8]), (3, []), (20, [4])])
def test_pools(pool: str, channels: int, lanes: list[int]) -> None:
    make = getattr(op.nn, pool)
    graph = graph_of(channels, lambda n, x: n.emit(make(x, (2, 2))))
    found = candidates_of(graph, first(graph, f"nn.{pool}"), everywhere('["NCHW", "NHWC", "NCHW{b}c", "NCHW->NHWC"]'))
    assert found == {"NCHW,NCHW", "NHWC,NHWC"} | {f"NCHW{b}c,NCHW{b}c" for b in lanes}


@pytest.mark.parametrize(
    ("body", "kind", "lanes"),
    [
        (lambda n, x: op.concat([x, n.conv(x, 24)], axis=1), "concat", [4, 8]),
        (lambda n, x: op.split(x, [4], axis=1), "split", [4]),
        (lambda n, x: op.split(x, 2, axis=1), "split", [4, 8]),
        (lambda n, x: op.split(x, 2, axis=2), "split", [4, 8, 16]),
        (lambda n, x: op.nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1]), "nn.pad", [4, 8, 16]),
        (lambda n, x: op.nn.pad(x, [0, 0, 8, 8, 1, 1, 1, 1]), "nn.pad", []),
        (lambda n, x: op.strided_slice(x, [-1], [0], [5]), "strided_slice", [4, 8, 16]),
        (lambda n, x: op.strided_slice(x, [-3], [0], [8]), "strided_slice", []),
        (lambda n, x: op.nn.softmax(x, axis=1), "nn.softmax", []),
        (lambda n, x: op.nn.softmax(x, axis=2), "nn.softmax", [4, 8, 16]),
        (lambda n, x: op.max(x, axis=[-1, -2], keepdims=True), "max", [4, 8, 16]),
        (lambda n, x: op.mean(x, axis=[1], keepdims=True), "mean", []),
        (lambda n, x: op.add(x, n.const((1, 16, 1, 1))), "add", [4, 8, 16]),
        (lambda n, x: op.add(x, n.const((1, 1, 8, 10))), "add", [4, 8, 16]),
        (lambda n, x: op.greater(x, n.const((1, 16, 1, 1))), "greater", []),
        (lambda n, x: op.clip(x, 0.0, 6.0), "clip", [4, 8, 16]),
        (lambda n, x: op.image.resize2d(x, (4, 4), layout="NCHW"), "image.resize2d", [4, 8, 16]),
    ],
)
def test_other_operators(body: Callable[[Net, relax.Expr], relax.Expr], kind: str, lanes: list[int]) -> None:
    graph = graph_of(16, lambda n, x: n.emit(body(n, n.relu(x))))
    found = candidates_of(graph, first(graph, kind), everywhere('["NCHW", "NHWC", "NCHW{b}c"]'))
    assert found == {"NCHW,NCHW", "NHWC,NHWC"} | {f"NCHW{b}c,NCHW{b}c" for b in lanes}


def test_a_reduction_that_drops_axes_keeps_their_order() -> None:
    graph = graph_of(16, lambda n, x: n.emit(op.mean(n.relu(x), axis=[1])))
    assert candidates_of(graph, first(graph, "mean"), everywhere('["NCHW", "NHWC", "CNHW", "NCHW4c"]')) == {
        "NCHW,NCHW",
        "NHWC,NHWC",
        "CNHW,CNHW",
    }
    graph = graph_of(16, lambda n, x: n.emit(op.mean(n.relu(x), axis=[2])))
    assert candidates_of(graph, first(graph, "mean"), everywhere('["NCHW", "NHWC", "NCHW4c"]')) == {"NCHW,NCHW"}


def test_refusals_are_kept_with_their_reasons() -> None:
    graph = graph_of(16, lambda n, x: n.conv(x, 24, groups=2))
    conv = first(graph, "nn.conv2d")
    refused = dict(enumerate_candidates(graph, everywhere(CONV, "[8]"))[conv.name].refused)
    assert refused.keys() == {"NCHW8c->NCHW8c"}
    assert "crosses the groups" in refused["NCHW8c->NCHW8c"]


def test_the_first_rule_decides_and_forbids() -> None:
    graph = graph_of(16, lambda n, x: n.conv(n.conv(x, 16), 16, 1))
    rules = space(
        'match = { kind = "conv2d_pointwise" }\nlayouts = ["NCHW{i}c->NCHW{o}c"]\nforbid = ["NCHW4c->NCHW{o}c"]\n'
        "blocks = [4, 8]",
        'match = { op = "nn.conv2d" }\npin = ["NCHW", "OIHW8o", "NCHW8c"]',
        'match = {}\nlayouts = ["NHWC"]',
    )
    found = enumerate_candidates(graph, rules)
    kinds = {op.name: op.kind for op in graph.ops}
    by_kind = {kinds[name]: {str(c) for c in s.candidates} for name, s in found.items()}
    assert by_kind["conv2d_pointwise"] == packed([8], [4, 8])
    assert by_kind["conv2d"] == {"NCHW,OIHW8o,NCHW8c"}
    # What is flexible can always stay as it is.
    assert by_kind["add"] == {"NHWC,NHWC", "NCHW,NCHW"}


def test_the_original_layout_is_a_legal_candidate_of_everything() -> None:
    graph = graph_of(16, lambda n, x: n.conv(n.relu(n.conv(x, 16)), 16, 1))
    for node in graph.ops:
        assert str(initial_candidate(node)) in candidates_of(graph, node, everywhere(CONV))


@pytest.mark.parametrize(
    ("channels", "out", "wanted", "nearest_one"),
    [
        (16, 16, "NCHW16c", "NCHW16c,OIHW16i16o,NCHW16c"),
        (8, 16, "NCHW16c", "NCHW8c,OIHW8i16o,NCHW16c"),
        (3, 16, "NCHW16c", "NCHW3c,OIHW3i16o,NCHW16c"),
        (16, 7, "NCHW16c", "NCHW,OIHW,NCHW"),
        (16, 16, "NHWC", "NHWC,HWIO,NHWC"),
        (16, 16, "NCHW", "NCHW,OIHW,NCHW"),
    ],
)
def test_uniform_assignments_take_the_nearest(channels: int, out: int, wanted: str, nearest_one: str) -> None:
    graph = graph_of(channels, lambda n, x: n.conv(x, out))
    conv = first(graph, "nn.conv2d")
    found = enumerate_candidates(graph, everywhere(CONV))[conv.name]
    assert nearest(found.candidates, Layout(wanted)) == Candidate.parse(nearest_one)


def test_uniform_layouts_are_those_a_convolution_has_on_both_sides() -> None:
    graph = graph_of(16, lambda n, x: n.conv(x, 24))
    found = enumerate_candidates(graph, everywhere(CONV))
    assert [str(x) for x in uniform_layouts(list(found.values()))] == ["NCHW", "NHWC", "NCHW4c", "NCHW8c"]
