"""Layouts wanted beside a search space: keys, values, what wins, and what cannot be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from layoutsearch.errors import SpaceError
from layoutsearch.layout.candidates import OpSpace, enumerate_candidates
from layoutsearch.layout.desired import Desired, most_specific, parse_desired
from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.layout.narrow import narrow
from layoutsearch.layout.space import SearchSpace
from layoutsearch.layout.unmatched import unmatched_layouts
from tests.layout.ops import graph_of, space
from tests.models.nets import Net

op = relax.op
OPTION = "--desired-layout"


def body(n: Net, x: relax.Expr) -> relax.Expr:
    """Stem, depthwise, pointwise, grouped, 3x3, each with its bias; pools; transposed."""
    y = n.conv(n.depthwise(n.conv(x, 16, 3, stride=2), 3), 24, 1)
    y = n.conv(n.conv(y, 32, 3, groups=2), 40, 3)
    y = n.emit(op.nn.avg_pool2d(y, pool_size=2, strides=1))
    y = n.emit(op.nn.max_pool2d(y, pool_size=2, strides=1))
    return n.emit(op.nn.conv2d_transpose(y, n.const((40, 8, 3, 3)), strides=2))


GRAPH = graph_of(3, body)
SPACE = space(
    'match = { op = "nn.conv2d", grouped = false, kernel = [3, 3] }\n'
    'layouts = ["NCHW", "NHWC", "NHWC:OHWI{k}o", "NCHW{i}c->NCHW{o}c", "NHWC@winograd2", "NHWC@winograd4"]',
    'match = {}\nlayouts = ["NCHW", "NHWC", "NCHW{b}c"]',
    blocks="[8, 16]",
)
NAMES = {
    "stem": "conv2d_0",
    "depthwise": "conv2d_depthwise_0",
    "pointwise": "conv2d_pointwise_0",
    "grouped": "conv2d_grouped_0",
    "wide": "conv2d_1",
    "avg": "avg_pool2d_0",
    "max": "max_pool2d_0",
    "transposed": "conv2d_transpose_0",
}


def narrowed(*wanted: str, rules: SearchSpace = SPACE, graph: LayoutGraph = GRAPH) -> dict[str, OpSpace]:
    return narrow(graph, rules, enumerate_candidates(graph, rules), parse_desired(wanted))


def layouts(found: dict[str, OpSpace], name: str) -> set[str]:
    return {str(c) for c in found[NAMES[name]].candidates}


def pinned(found: dict[str, OpSpace]) -> set[str]:
    return {name for name, variable in NAMES.items() if found[variable].pinned}


def test_the_names_are_those_of_the_model() -> None:
    assert {op.name for op in GRAPH.ops} >= set(NAMES.values())


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("nn.conv2d", {"stem", "depthwise", "pointwise", "grouped", "wide"}),
        ("relax.nn.conv2d", {"stem", "depthwise", "pointwise", "grouped", "wide"}),
        ("nn.conv2d_depthwise", {"depthwise"}),
        ("conv2d_depthwise", {"depthwise"}),
        ("nn.conv2d_pointwise", {"pointwise"}),
        ("nn.conv2d_grouped", {"grouped"}),
        ("nn.conv2d_dense", {"stem", "wide"}),
        ("nn.avg_pool2d", {"avg"}),
        ("nn.max_pool2d", {"max"}),
        ("nn.conv2d_transpose", {"transposed"}),
        ("conv2d_1", {"wide"}),
        ("conv2d_*_0", {"depthwise", "pointwise", "grouped", "transposed"}),
        ("max_pool2d:*", {"max"}),
        ("default", set(NAMES)),
    ],
)
def test_what_keys_mean(key: str, meant: set[str]) -> None:
    found = narrowed(f"{key}=NHWC")
    assert pinned(found) == meant
    assert all({c.split(",")[0] for c in layouts(found, name)} == {"NHWC"} for name in meant)
    free = enumerate_candidates(GRAPH, SPACE)
    assert all(found[v].candidates == free[v].candidates for name, v in NAMES.items() if name not in meant)


def test_an_id_is_a_key() -> None:
    wide = GRAPH.by_name["conv2d_1"]
    assert pinned(narrowed(f"{wide.id}=NHWC")) == {"wide"}


def test_a_data_layout_leaves_kernel_and_algorithm_to_the_search() -> None:
    assert layouts(narrowed("conv2d_1=NHWC"), "wide") == {
        "NHWC,HWIO,NHWC",
        "NHWC,OHWI8o,NHWC",
        "NHWC,HWOI8o,NHWC,winograd2",
        "NHWC,HWOI8o,NHWC,winograd4",
    }


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("NHWC:HWIO", {"NHWC,HWIO,NHWC"}),
        ("NHWC:default", {"NHWC,HWIO,NHWC", "NHWC,OHWI8o,NHWC", "NHWC,HWOI8o,NHWC,winograd2",
                          "NHWC,HWOI8o,NHWC,winograd4"}),
        ("NHWC:OHWI8o:NHWC", {"NHWC,OHWI8o,NHWC"}),
        ("NCHW8c:OIHW8i8o:NCHW8c", {"NCHW8c,OIHW8i8o,NCHW8c"}),
        ("NCHW{i}c->NCHW{o}c", {"NCHW8c,OIHW8i8o,NCHW8c", "NCHW16c,OIHW16i8o,NCHW8c"}),
        ("NHWC@winograd4", {"NHWC,HWOI8o,NHWC,winograd4"}),
        ("NHWC:HWIO,NCHW", {"NHWC,HWIO,NHWC", "NCHW,OIHW,NCHW"}),
        ("NCHW7c,NCHW", {"NCHW,OIHW,NCHW"}),
        # Not of the space, but possible.
        ("NCHW->NCHW8c", {"NCHW,OIHW8o,NCHW8c"}),
        ("NCHW:OIHW8o:NCHW8c", {"NCHW,OIHW8o,NCHW8c"}),
        ("NCHW4c", {"NCHW4c,OIHW4i4o,NCHW4c"}),
    ],
)  # fmt: skip
def test_values(value: str, wanted: set[str]) -> None:
    assert layouts(narrowed(f"conv2d_1={value}"), "wide") == wanted


def test_a_mapping_is_as_in_convert_layout() -> None:
    given = {"nn.conv2d": ["NHWC", "HWIO"], "nn.max_pool2d": "NCHW8c", "default": ["NHWC", "default"]}
    assert [str(d) for d in parse_desired(given)] == [
        f"{OPTION} default=NHWC:default", f"{OPTION} nn.conv2d=NHWC:HWIO", f"{OPTION} nn.max_pool2d=NCHW8c",
    ]  # fmt: skip
    with pytest.raises(SpaceError, match=r"'nn.conv2d=NHWC': expected a list of KEY=LAYOUT"):
        parse_desired("nn.conv2d=NHWC")


LEVELS = ["default=NCHW", "nn.conv2d=NHWC", "nn.conv2d_dense=NCHW8c,NCHW3c->NCHW8c", "conv2d_?=NCHW->NHWC",
          "conv2d_1=NHWC->NCHW"]  # fmt: skip


@settings(max_examples=30)
@given(st.sets(st.sampled_from(range(len(LEVELS))), min_size=1).flatmap(lambda s: st.permutations(sorted(s))))
def test_the_more_specific_wins_whatever_the_order(order: Sequence[int]) -> None:
    wide = GRAPH.by_name["conv2d_1"]
    found = most_specific(wide, parse_desired([LEVELS[i] for i in order]))
    assert found is not None
    assert found == parse_desired([LEVELS[max(order)]])[0]


def test_each_level_is_for_what_the_others_are_not() -> None:
    wanted = ["default=NCHW", "nn.conv2d=NHWC", "nn.conv2d_depthwise=NCHW8c", "conv2d_1=NCHW8c"]
    for order in itertools.permutations(wanted):
        found = narrowed(*order)
        data = {name: {c.split(",")[0] for c in layouts(found, name)} for name in NAMES}
        assert data == {
            "stem": {"NHWC"}, "pointwise": {"NHWC"}, "grouped": {"NHWC"}, "depthwise": {"NCHW8c"}, "wide": {"NCHW8c"},
            "avg": {"NCHW"}, "max": {"NCHW"}, "transposed": {"NCHW"},
        }  # fmt: skip


def test_what_is_pinned_away_says_by_what() -> None:
    refused = dict(narrowed("nn.conv2d_depthwise=NCHW")[NAMES["depthwise"]].refused)
    assert refused["NHWC,HWIO,NHWC"] == f"pinned by {OPTION} nn.conv2d_depthwise=NCHW"


def test_what_follows_a_convolution_can_follow_it_into_any_layout() -> None:
    """No rule of the space has blocks of 4; the bias must not be torn from its convolution for that."""
    graph = graph_of(8, lambda n, x: n.conv_relu(x, 12))
    found = narrowed("nn.conv2d=NCHW4c", graph=graph)
    assert {name: "NCHW4c,NCHW4c" in map(str, found[name].candidates) for name in ("add_0", "relu_0")} == {
        "add_0": True,
        "relu_0": True,
    }


def test_what_follows_a_convolution_keeps_to_its_own_rule() -> None:
    rules = space(
        'match = { op = "nn.relu" }\nlayouts = ["NCHW", "NHWC"]\nforbid = ["NCHW{b}c", "NCHW4c"]',
        'match = {}\nlayouts = ["NCHW", "NHWC", "NCHW{b}c"]',
        blocks="[8]",
    )
    graph = graph_of(8, lambda n, x: n.conv_relu(x, 12))
    found = narrowed("nn.conv2d=NCHW4c", graph=graph, rules=rules)
    assert {str(c) for c in found["relu_0"].candidates} == {"NCHW,NCHW", "NHWC,NHWC"}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (["nn.conv2d"], r"--desired-layout 'nn.conv2d': expected KEY=LAYOUT, such as nn.conv2d=NHWC:HWIO"),
        (["=NHWC"], "expected KEY=LAYOUT"),
        (["nn.conv2d="], "expected KEY=LAYOUT"),
        (["nn.conv2d=NHWC,"], "nn.conv2d=NHWC,: '' is not a layout"),
        (["nn.conv2d=NCHW16"], "nn.conv2d=NCHW16: 'NCHW16' is not a layout"),
        (["nn.conv2d=NCHW:OIHW:NCHW:NCHW"], "is not DATA, DATA:KERNEL or DATA:KERNEL:OUT"),
        (["nn.conv2d=NHWC@fft"], "'fft' is not an algorithm"),
        (["nn.conv2d=NHWC", "nn.conv2d=NCHW"], "nn.conv2d=NHWC and .*nn.conv2d=NCHW contradict each other"),
        (["nn.conv2d=NHWC", "relax.nn.conv2d=NCHW"], "contradict each other"),
        (["conv2d_depthwise=NHWC", "nn.conv2d_depthwise=NCHW"], "contradict each other"),
    ],
)
def test_what_cannot_be_read(wanted: list[str], message: str) -> None:
    with pytest.raises(SpaceError, match=message) as caught:
        parse_desired(wanted)
    assert "\n" not in str(caught.value)


def test_the_same_twice_is_no_contradiction() -> None:
    (one,) = parse_desired(["nn.conv2d=NHWC,NCHW", "relax.nn.conv2d=NCHW,NHWC"])
    assert one == Desired("nn.conv2d", ("NHWC", "NCHW"))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (["nn.conv2d=NCHW16c"], r"NCHW16c: no candidate of conv2d:\w+:0 \(conv2d_0\) is so: .*16 does not divide C=3"),
        (["conv2d_1=NCHW7c"], r"conv2d_1=NCHW7c: no candidate of .*: block 7 does not divide C=32"),
        (["conv2d_1=NCHW:OIHW:NCHW8c"], r"as in OIHW8o"),
        (["nn.conv2d_depthwise=NHWC@winograd2"], "no candidate of conv2d_depthwise"),
        (["conv2d_0=NHWC@winograd2"], "no winograd2 kernel for stride 2: it is for 3x3"),
        (["nn.max_pool2d=NCHW->NHWC"], "nn.max_pool2d has one layout"),
        (["nn.conv2d=OIHW"], "does not fit a tensor with axes NCHW"),
        (["conv2d_?=NHWC", "*_1=NCHW"], r"(?:NHWC|NCHW) contradict each other for conv2d:\w+:0 \(conv2d_1\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_names_rule_and_operator(wanted: list[str], message: str) -> None:
    with pytest.raises(SpaceError, match=message) as caught:
        narrowed(*wanted)
    assert "\n" not in str(caught.value)


def test_a_rule_of_the_file_is_not_overruled_in_silence() -> None:
    rules = space(
        'match = { in_channels = { max = 4 } }\npin = ["NCHW", "OIHW16o", "NCHW16c"]',
        'match = { depthwise = true }\nlayouts = ["NCHW"]\nforbid = ["NHWC"]',
        'match = {}\nlayouts = ["NCHW", "NHWC", "NCHW{b}c"]',
    )
    assert layouts(narrowed("nn.conv2d_depthwise=NCHW", "conv2d_0=NCHW->NCHW16c", rules=rules), "stem") == {
        "NCHW,OIHW16o,NCHW16c"
    }
    with pytest.raises(
        SpaceError, match=r"nn.conv2d=NHWC: .* conv2d:\w+:0 .* rule 'rule0' of test.toml pins NCHW,OIHW16o"
    ):
        narrowed("nn.conv2d=NHWC", rules=rules)
    with pytest.raises(SpaceError, match=r"conv2d_depthwise:\w+:0 .* forbidden by rule 'rule1' of test.toml"):
        narrowed("nn.conv2d_depthwise=NHWC", rules=rules)


def test_what_is_frozen_may_be_as_it_is_wanted() -> None:
    graph = graph_of(8, lambda n, x: n.emit(op.nn.relu(op.reshape(x, (2, 8, 10, 8)))))
    assert narrowed("reshape=NCHW", graph=graph)
    with pytest.raises(SpaceError, match=r"reshape=NHWC: no candidate of reshape:\w+:0 .* is frozen"):
        narrowed("reshape=NHWC", graph=graph)
    assert narrowed("default=NHWC", graph=graph)


def test_unknown_and_absent_operators() -> None:
    with pytest.raises(
        SpaceError, match=r"nn.conv9d=NHWC: unknown op 'nn.conv9d'; the nearest op of the model is nn.conv2d;"
    ):
        unmatched_layouts(parse_desired(["nn.conv9d=NHWC"]), GRAPH)
    with pytest.raises(SpaceError, match=r"unknown op 'conv2d_7'; the nearest op of the model is conv2d_"):
        unmatched_layouts(parse_desired(["conv2d_7=NHWC"]), GRAPH)
    wanted = ["nn.adaptive_avg_pool2d=NCHW", "resize2d:*=NHWC", "nn.conv2d=NHWC"]
    lines = unmatched_layouts(parse_desired(wanted), GRAPH)
    assert len(lines) == 2
    assert (
        "nn.adaptive_avg_pool2d=NCHW matches no op of the model; the nearest op of the model is nn.avg_pool2d"
        in lines[0]
    )
    assert "resize2d:*=NHWC matches no op" in lines[1]


def test_nothing_wanted_changes_nothing() -> None:
    free = enumerate_candidates(GRAPH, SPACE)
    assert narrow(GRAPH, SPACE, free, ()) == free
