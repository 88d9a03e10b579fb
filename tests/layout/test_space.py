"""Search-space files: the shipped ones load; a wrong one is an error that names the line, the rule or the operator."""

from __future__ import annotations

from pathlib import Path

import pytest

from layoutsearch.errors import SpaceError
from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidates import enumerate_candidates
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.space import builtin_space, load_space, parse_space
from layoutsearch.model import canonicalize
from tests.layout.ops import HEAD, candidates_of, everywhere, first, graph_of, space
from tests.models import nets

SHIPPED = sorted((Path(__file__).resolve().parents[2] / "search_spaces").glob("*.toml"))


def test_spaces_are_shipped() -> None:
    assert {p.stem for p in SHIPPED} >= {"x86_avx512", "x86_avx2", "arm_neon", "cpu_generic"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_spaces_serve_every_model(path: Path) -> None:
    """Each parses, has a rule for every operator, and offers the packed layouts it is about."""
    shipped = load_space(path)
    assert shipped.source == str(path)
    for model in nets.ALL.values():
        graph = build_graph(canonicalize(model()))
        spaces = enumerate_candidates(graph, shipped)
        assert spaces.keys() == {op.name for op in graph.ops if op.role is not Role.FROZEN}
        assert all(s.candidates for s in spaces.values())
    graph = build_graph(canonicalize(nets.residual((1, 64, 10, 14))))
    conv = graph.anchors[0]
    assert {b for b in shipped.blocks if 64 % b == 0} == {
        c.data.block("C") for c in enumerate_candidates(graph, shipped)[conv.name].candidates if c.data.is_blocked
    }


@pytest.mark.parametrize(
    ("features", "source"),
    [
        ({"avx512f", "avx2"}, "x86_avx512.toml"),
        ({"avx2"}, "x86_avx2.toml"),
        ({"neon"}, "arm_neon.toml"),
        (set(), "cpu_generic.toml"),
    ],
)
def test_the_space_of_a_target(features: set[str], source: str) -> None:
    assert builtin_space("llvm", features.__contains__).source == source


def test_a_target_without_a_space() -> None:
    with pytest.raises(SpaceError, match="no search space is shipped for target kind 'cuda'; give one with --space"):
        builtin_space("cuda", lambda feature: True)


RULE = '[[rule]]\nname = "all"\nmatch = {}\nlayouts = ["NCHW"]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + RULE + 'layout = ["NHWC"]\n', r"s.toml, line 8: .*'layout' was unexpected"),
        (HEAD + RULE + RULE.replace("match = {}", 'match = { ops = "add" }'), r"line 10: .*'ops' was unexpected"),
        (HEAD + RULE.replace("match = {}", 'match = { position = "second" }'), r"line 6: 'second' is not one of"),
        (HEAD + "block = 3\n" + RULE, r"line 4: .*'block' was unexpected"),
        (HEAD + "# speed = 1\n" + RULE + "[speed]\nx = 1\n", r"line 9: .*'speed' was unexpected"),
        (HEAD + RULE + RULE.replace('["NCHW"]', '"NCHW"'), r"line 11: 'NCHW' is not of type 'array'"),
        (HEAD + RULE.replace("match = {}", "match = { kernel = [3] }"), r"line 6: \[3\] is too short"),
        (HEAD.replace("[4, 8, 16]", "[1]") + RULE, r"line 3: 1 is less than the minimum of 2"),
        (HEAD + RULE + '[[rule]]\nname = "x"\n', r"line 8: 'match' is a required property"),
        (HEAD, r"'rule' is a required property"),
        (HEAD + RULE + RULE.replace('layouts = ["NCHW"]', ""), r"line 8: rule 'all' needs either layouts or pin"),
        (HEAD + RULE + 'pin = ["NCHW"]\n', r"line 4: rule 'all' needs either layouts or pin"),
        (HEAD + "blocks 3\n", r"not valid TOML: .*line 4"),
    ],
)
def test_wrong_files_name_the_line(text: str, message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        parse_space(text, "s.toml")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpaceError, match=r"cannot read search space .*nothing.toml"):
        load_space(tmp_path / "nothing.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpaceError, match=r"cannot read search space .*binary.toml"):
        load_space(tmp_path / "binary.toml")


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ('["NCHW{x}c"]', r"test.toml: pattern 'NCHW\{x\}c': 'NCHW\{x\}c' is not a layout"),
        ('["NCHC"]', "pattern 'NCHC': .* names an axis twice"),
        ('["NCHW->"]', None),
        ('["NHWC:OHWI{o}o"]', r"pattern 'NHWC:OHWI\{o\}o': 'OHWI\{o\}o' is not a layout"),
        ('["NCHW->NHW4c"]', "pattern 'NCHW->NHW4c': .* has no axis C"),
    ],
)
def test_wrong_patterns(layouts: str, message: str | None) -> None:
    graph = graph_of(8, lambda n, x: n.conv(x, 16))
    if message is None:
        assert candidates_of(graph, first(graph, "nn.conv2d"), everywhere(layouts)) == {"NCHW,OIHW,NCHW"}
        return
    with pytest.raises(SpaceError, match=message):
        enumerate_candidates(graph, everywhere(layouts))


def test_a_pin_that_is_impossible_names_rule_and_operator() -> None:
    graph = graph_of(3, lambda n, x: n.conv(x, 16))
    wrong = space('match = { op = "nn.conv2d" }\npin = ["NCHW16c", "OIHW16i16o", "NCHW16c"]')
    with pytest.raises(
        SpaceError, match=r"rule 'rule0' leaves no candidate for conv2d:\w+:0: .*16 does not divide C=3"
    ):
        enumerate_candidates(graph, wrong)


def test_a_pin_that_is_no_layout_names_the_rule() -> None:
    graph = graph_of(3, lambda n, x: n.conv(x, 16))
    with pytest.raises(SpaceError, match="rule 'rule0': 'NCHW16' is not a layout"):
        enumerate_candidates(graph, space('match = {}\npin = ["NCHW16"]'))


def test_no_candidate_is_an_error_with_the_reasons() -> None:
    graph = graph_of(8, lambda n, x: n.conv(n.conv(x, 16), 24, groups=2))
    with pytest.raises(SpaceError, match=r"rule 'rule0' leaves no candidate .* a block of .* crosses the groups"):
        enumerate_candidates(graph, everywhere('["NCHW8c->NCHW8c"]'))
    with pytest.raises(SpaceError, match=r"leaves no candidate for .*: everything is forbidden"):
        enumerate_candidates(graph, space('match = {}\nlayouts = ["NCHW"]\nforbid = ["NCHW"]'))


def test_no_rule_for_an_operator_is_an_error() -> None:
    graph = graph_of(8, lambda n, x: n.conv(x, 16))
    with pytest.raises(SpaceError, match=r"no rule matches add:\w+:0 \(relax.add\); end the file with a rule"):
        enumerate_candidates(graph, space('match = { op = "nn.conv2d" }\nlayouts = ["NCHW"]'))


@pytest.mark.parametrize(
    ("match", "hits"),
    [
        ('op = "nn.conv2d"', {"stem", "wide", "depthwise", "grouped"}),
        ('op = "relax.nn.conv2d"', {"stem", "wide", "depthwise", "grouped"}),
        ('kind = "conv2d_pointwise"', {"wide"}),
        ("depthwise = true", {"depthwise"}),
        ("pointwise = true", {"wide"}),
        ("grouped = true", {"grouped"}),
        ("depthwise = false", {"stem", "wide", "grouped"}),
        ("kernel = [3, 3]", {"stem", "depthwise", "grouped"}),
        ("stride = [2, 2]", {"stem"}),
        ("dilation = [2, 2]", set()),
        ("in_channels = 3", {"stem"}),
        ("in_channels = { max = 4 }", {"stem"}),
        ("in_channels = { min = 4, max = 16 }", {"wide"}),
        ("out_channels = { min = 24 }", {"wide", "depthwise", "grouped"}),
        ('id = "conv2d_depthwise:*"', {"depthwise"}),
        ('op = "nn.conv2d", kernel = [1, 1], stride = [1, 1]', {"wide"}),
        ("dense = true", {"stem"}),
        ('dense = false, op = "nn.conv2d"', {"wide", "depthwise", "grouped"}),
        ('dtype = "float32"', {"stem", "wide", "depthwise", "grouped"}),
        ('dtype = "int8"', set()),
        ('name = "conv2d_?"', {"stem"}),
        ('name = "conv2d_*:*"', {"wide", "depthwise", "grouped"}),
        ('op = "nn.conv2d", position = "first"', {"stem"}),
        ('op = "nn.conv2d", position = "last"', {"grouped"}),
        ('kernel = [3, 3], stride = [1, 1], position = "first"', {"depthwise"}),
        ('kind = "conv2d_grouped", position = "first"', {"grouped"}),
        ('kind = "max_pool2d", position = "first"', set()),
    ],
)
def test_what_rules_match(match: str, hits: set[str]) -> None:
    def body(n: nets.Net, x: nets.relax.Expr) -> nets.relax.Expr:
        y = n.conv(n.conv(x, 16, 3, stride=2, bias=False), 24, 1, bias=False)
        return n.conv(n.conv(y, 24, 3, groups=24, bias=False), 32, 3, groups=2, bias=False)

    graph = graph_of(3, body)
    names = dict(zip((op.name for op in graph.ops), ("stem", "wide", "depthwise", "grouped"), strict=True))
    found = space(f"match = {{ {match} }}\nlayouts = ['NCHW']", 'match = {}\nlayouts = ["NCHW"]').rules_for(graph)
    assert {names[op.name] for op in graph.ops if found[op.name][0].name == "rule0"} == hits


@pytest.mark.parametrize(
    ("match", "hits"),
    [
        ("kernel = [3, 2]", {"max_pool2d_0"}),
        ("stride = [2, 2]", {"max_pool2d_0", "avg_pool2d_0"}),
        ("in_channels = { min = 20 }", {"avg_pool2d_0", "adaptive_avg_pool2d_0"}),
        ("out_channels = 24", {"conv2d_0", "avg_pool2d_0", "adaptive_avg_pool2d_0"}),
        ('op = "nn.adaptive_avg_pool2d", kernel = [1, 1]', set()),
        ("pointwise = false", {"conv2d_0"}),
    ],
)
def test_pools_have_windows_and_channels(match: str, hits: set[str]) -> None:
    def body(n: nets.Net, x: nets.relax.Expr) -> nets.relax.Expr:
        y = n.emit(nets.relax.op.nn.max_pool2d(x, pool_size=(3, 2), strides=2))
        y = n.emit(nets.relax.op.nn.avg_pool2d(n.conv(y, 24, 3), pool_size=2, strides=2))
        return n.emit(nets.relax.op.nn.adaptive_avg_pool2d(y, (1, 1)))

    graph = graph_of(16, body)
    found = space(f"match = {{ {match} }}\nlayouts = ['NCHW']").rules_for(graph)
    assert {name for name, rules in found.items() if rules} - {"add_0"} == hits
