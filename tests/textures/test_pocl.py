"""Models with textures compute what they should, on an OpenCL for CPUs."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import relax

from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.scopes import GLOBAL, SCOPES, TEXTURE, TEXTURE_NHWC, TEXTURE_WEIGHT
from layoutsearch.materialize.scopes import scope_of
from layoutsearch.plan.compile import build_executable
from tests.materialize.cases import Case, assert_outputs
from tests.models import nets, random_nets
from tests.textures.pocl import Launch, Place, Pocl, Program
from tests.textures.programs import TARGET, opencl_sources, parameters
from tests.textures.scoped import case_of, drawn, outputs, placed, scheduled


@cache
def three_convolutions() -> Case:
    """3x3, 1x1 and 3x3 of stride 2, each with another number of channels, padded, with biases and ReLUs."""
    return case_of(
        nets.build((1, 8, 6, 7), body=lambda n, x: n.conv_relu(n.conv_relu(n.conv_relu(x, 12), 16, 1), 8, stride=2))
    )


def in_scopes(case: Case, scopes: list[str], weights: list[str]) -> dict[str, Candidate]:
    """Every convolution in NCHW4c, with these scopes of results and weights; what follows each is in its kernel."""
    found: dict[str, Candidate] = {}
    pairs = iter(zip(scopes, weights, strict=True))
    for op in case.graph.ops:
        if op.op == "relax.nn.conv2d":
            scope, weight = next(pairs)
            found[op.name] = Candidate.of("NCHW4c", "OIHW4o", "NCHW4c", scope=scope, weight_scope=weight)
        else:
            found[op.name] = found[case.graph.ops[case.graph.ops.index(op) - 1].name].follower
    return found


COMBINATIONS = list(itertools.product(SCOPES, (GLOBAL, TEXTURE, TEXTURE_WEIGHT), (GLOBAL, TEXTURE_WEIGHT)))


def test_there_are_24_combinations() -> None:
    assert len(set(COMBINATIONS)) == 24


@pytest.mark.parametrize(("first", "second", "weights"), COMBINATIONS)
def test_scopes_of_three_convolutions(pocl: Pocl, first: str, second: str, weights: str) -> None:
    case = three_convolutions()
    last = TEXTURE_NHWC if weights == GLOBAL else GLOBAL
    assignment = in_scopes(case, [first, second, last], [weights, TEXTURE, weights])
    assert_outputs(outputs(case, assignment, pocl), case.wanted)


def test_kernels_have_images_where_and_only_where_a_texture_was_chosen() -> None:
    """Three convolutions, and a transform before the first and after the last; both of those are in buffers."""
    case = three_convolutions()
    lowered = placed(case, in_scopes(case, [TEXTURE, GLOBAL, TEXTURE_NHWC], [GLOBAL, TEXTURE_WEIGHT, GLOBAL]))
    module = scheduled(lowered)
    calls = [b.value for block in module["main"].body.blocks for b in block.bindings]
    found = []
    for call in calls:
        types = [*(a.ty for a in call.args[1].fields), call.ty_args[0]]
        assert all(ty.vdevice is not None for ty in types)
        scopes = [scope_of(ty).removeprefix("global.") for ty in types]
        assert scopes == [p.scope().removeprefix("global.") for p in module[call.args[0]].params]
        found.append(scopes)
    assert found == [
        ["global", "global"],
        ["global", "global", "global", "texture"],
        ["texture", "texture-weight", "global", "global"],
        ["global", "global", "global", "texture-nhwc"],
        ["texture-nhwc", "global"],
    ]
    sources = opencl_sources(build_executable(module, TARGET))
    for call, scopes in zip(calls, found, strict=True):
        declared = dict(parameters(sources[f"{call.args[0].name_hint}_kernel"]))
        names = [p.name for p in module[call.args[0]].params]
        assert set(declared) == set(names)
        for i, (name, scope) in enumerate(zip(names, scopes, strict=True)):
            access = "__write_only" if i == len(names) - 1 else "__read_only"
            is_image = declared[name].startswith(f"{access} image2d_array_t ")
            assert is_image == (scope != "global"), declared
            assert is_image or declared[name].startswith("__global float")


def test_convolutions_of_one_function_in_different_scopes(pocl: Pocl) -> None:
    """Three equal convolutions with weights of their own: without textures they are one function."""
    case = case_of(nets.build((1, 8, 5, 7), body=lambda n, x: n.conv_relu(n.conv_relu(n.conv_relu(x, 8), 8), 8)))
    one = placed(case, in_scopes(case, [GLOBAL] * 3, [GLOBAL] * 3))
    assert len([k for k in one.kernels if "conv2d" in k.function]) == 1
    mixed = in_scopes(case, [TEXTURE, TEXTURE_WEIGHT, GLOBAL], [TEXTURE_WEIGHT, GLOBAL, GLOBAL])
    several = placed(case, mixed)
    kernels = {k.function: k.groups for k in several.kernels if "conv2d" in k.function}
    assert [len(groups) for groups in kernels.values()] == [1, 1, 1]
    assert [group[0] for groups in kernels.values() for group in groups] == ["conv2d_0", "conv2d_1", "conv2d_2"]
    assert_outputs(outputs(case, mixed, pocl), case.wanted)


def test_equal_scopes_share_a_function(pocl: Pocl) -> None:
    def body(n: nets.Net, x: relax.Expr) -> relax.Expr:
        for _ in range(4):
            x = n.conv_relu(x, 8)
        return x

    case = case_of(nets.build((1, 8, 5, 7), body=body))
    assignment = in_scopes(case, [TEXTURE] * 3 + [GLOBAL], [TEXTURE_WEIGHT] * 4)
    kernels = {k.function: k.groups for k in placed(case, assignment).kernels if "conv2d" in k.function}
    assert [[group[0] for group in groups] for groups in kernels.values()] == [
        ["conv2d_0"],  # reads a buffer
        ["conv2d_1", "conv2d_2"],
        ["conv2d_3"],
    ]
    assert_outputs(outputs(case, assignment, pocl), case.wanted)


@pytest.mark.slow
@pytest.mark.parametrize("net", [nets.mixed, nets.grouped, nets.transposed, nets.diamond, nets.classifier])
def test_operators_of_all_kinds(pocl: Pocl, net: object) -> None:
    """Depthwise, grouped, transposed, pooled, split, joined, padded, resized, reshaped, multiplied; drawn scopes."""
    case = case_of(net())  # type: ignore[operator]
    assignment = drawn(case, random.Random(1))
    assert any(choice.has_textures for choice in assignment.values())
    assert_outputs(outputs(case, assignment, pocl), case.wanted)


@pytest.mark.slow
@given(random_nets.nets(), st.randoms(use_true_random=False))
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
def test_drawn_nets_in_drawn_scopes(pocl: Pocl, module: tvm.IRModule, rng: random.Random) -> None:
    case = case_of(module)
    assert_outputs(outputs(case, drawn(case, rng), pocl), case.wanted)


def test_what_fails_on_pocl_says_so(pocl: Pocl) -> None:
    """Else no test above could fail."""
    bad = Launch("missing", "__kernel void other() {}", (), 1, 1)
    with pytest.raises(RuntimeError, match="missing"):
        pocl.run(Program({"t": Place((1,), "float32")}, {}, (bad,), ("t",)))
