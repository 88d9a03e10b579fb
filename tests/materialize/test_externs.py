"""External functions that declare layouts take part like any operator; those that declare none are barriers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import tvm
import tvm_ffi
from tvm import relax

from layoutsearch.errors import ModelError
from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.candidates import nearest
from layoutsearch.layout.declare import chosen_by, declare_layouts, is_external
from layoutsearch.layout.declared import ATTRIBUTE
from layoutsearch.layout.kinds import EXTERN_CALL, Role
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.rules import transforms_of, why_illegal
from layoutsearch.materialize.codegen import inlined
from layoutsearch.materialize.convert import Materialized, materialize
from layoutsearch.materialize.verify import find_mismatches
from layoutsearch.model import canonicalize
from tests.contrib.made_codegen import partition
from tests.materialize.cases import Case, assert_outputs
from tests.models.interpreter import interpret
from tests.models.nets import Net, build

op = relax.op
B16 = {"sources": ["NCHW16c"], "destination": "NCHW16c"}
B8 = {"sources": ["NCHW8c"], "destination": "NCHW8c"}


def chain(n: Net, x: relax.Expr) -> relax.Expr:
    y = n.emit(op.nn.max_pool2d(n.conv_relu(x, 48), pool_size=3, strides=2, padding=1))
    y = n.emit(op.nn.adaptive_avg_pool2d(n.conv_relu(y, 64), (1, 1)))
    return n.emit(op.matmul(n.emit(op.reshape(y, (1, 64))), n.const((64, 10))))


def beside_a_convolution(n: Net, x: relax.Expr) -> relax.Expr:
    """The convolution of the shortcut is TVM's: pointwise ones are no external functions here."""
    return n.emit(op.add(n.conv_relu(x, 48), n.conv(x, 48, 1, bias=False)))


def case_of(
    body: Callable[..., relax.Expr], layouts: Callable[[int], Any] | None, shape: Any = (1, 16, 11, 14)
) -> Case:
    return Case.of(partition(build(shape, body=body), layouts))


def uniform(case: Case, layout: str) -> dict[str, Candidate]:
    return {name: nearest(space.candidates, Layout(layout)) for name, space in case.spaces.items()}


def check(case: Case, assignment: dict[str, Candidate]) -> Materialized:
    """Layouts achieved, transforms as counted; the rewritten functions' bodies still say what is computed."""
    result = materialize(case.module, case.graph, assignment)
    assert find_mismatches(result.module, case.graph, assignment) == []
    counted = transforms_of(case.graph, assignment)
    found = [(t.tensor, t.source, t.target) for t in result.transforms]
    assert sorted(map(str, found)) == sorted(map(str, counted))
    relax.analysis.well_formed(result.module)
    wanted = interpret(inlined(case.module), case.inputs)
    assert_outputs(interpret(inlined(result.module), case.inputs), wanted)
    return result


def externals(module: tvm.IRModule) -> dict[str, relax.Function]:
    return {g.name_hint: f for g, f in module.functions_items() if is_external(f)}


def calls(module: tvm.IRModule) -> list[relax.Call]:
    values = [b.value for block in module["main"].body.blocks for b in block.bindings]
    return [v for v in values if isinstance(v, relax.Call) and isinstance(v.op, tvm.ir.GlobalVar)]


def test_two_of_them_with_a_pool_between_stay_in_their_layout() -> None:
    case = case_of(chain, lambda i: B16)
    assert [n.role for n in case.graph.ops if n.op == EXTERN_CALL] == [Role.ANCHOR] * 2
    result = check(case, uniform(case, "NCHW16c"))
    assert [(t.tensor, str(t.source), str(t.target)) for t in result.transforms] == [
        ("x", "NCHW", "NCHW16c"),
        ("adaptive_avg_pool2d_0", "NCHW16c", "NCHW"),
    ]


def test_the_signature_is_rewritten_and_the_body_is_left_alone() -> None:
    case = case_of(chain, lambda i: B16)
    before = externals(case.module)
    after = externals(materialize(case.module, case.graph, uniform(case, "NCHW16c")).module)
    assert len(after) == len(before)
    assert not set(after) & set(before)
    for name, function in after.items():
        assert function.attrs["global_symbol"] == name
        assert (function.attrs["Codegen"], ATTRIBUTE in function.attrs) == ("made", False)
        assert str(chosen_by(function).param(0)) == str(chosen_by(function).destination) == "NCHW16c"
        assert len(function.params[0].ty.shape.values) == len(function.ret_ty.shape.values) == 5
        assert len(function.params[1].ty.shape.values) == 4
    inner = [_inner(f) for f in before.values()]
    for function in after.values():
        assert any(tvm_ffi.structural_equal(_inner(function), one, map_free_vars=True) for one in inner)


def _inner(function: relax.Function) -> relax.Function:
    values = [b.value for block in function.body.blocks for b in block.bindings]
    return next(v for v in values if isinstance(v, relax.Function))


@pytest.mark.parametrize("pool", ["NCHW16c", "NCHW8c"])
def test_two_blocks_are_one_transform_in_the_middle(pool: str) -> None:
    case = case_of(chain, lambda i: B16 if i == 0 else B8)
    assignment = {**uniform(case, "NCHW8c"), "max_pool2d_0": Candidate.of(pool)}
    found = [(t.tensor, str(t.source), str(t.target)) for t in check(case, assignment).transforms]
    assert found == [
        ("x", "NCHW", "NCHW16c"),
        ("max_pool2d_0" if pool == "NCHW16c" else "extern_0", "NCHW16c", "NCHW8c"),
        ("adaptive_avg_pool2d_0", "NCHW8c", "NCHW"),
    ]


def test_a_sum_with_a_convolution_of_tvm() -> None:
    case = case_of(beside_a_convolution, lambda i: B16)
    result = check(case, uniform(case, "NCHW16c"))
    assert [(t.tensor, str(t.target)) for t in result.transforms] == [("x", "NCHW16c"), ("add_0", "NCHW")]


def test_all_mixtures_of_several_declared_layouts() -> None:
    """The search chooses: whatever neighbours do, and the weights have a layout as well."""
    wide = {"sources": ["NCHW16c"], "weights": ["OIHW16i16o"], "destination": "NCHW16c"}
    case = case_of(
        chain, lambda i: [{"sources": ["NCHW"], "destination": "NCHW"}, wide, {**B8, "sources": ["NCHW16c"]}]
    )
    assert {str(c) for c in case.spaces["extern_0"].candidates} == {
        "NCHW,NCHW",
        "NCHW16c,OIHW16i16o,NCHW16c",
        "NCHW16c,NCHW8c",
    }
    for assignment in case.covering(seed=3):
        result = check(case, assignment)
        for call, name in zip(calls(result.module), ("extern_0", "extern_1"), strict=True):
            weights = call.args[1]
            assert isinstance(weights, tvm.ir.GenericConst)
            assert weights.value.numpy().ndim == (6 if assignment[name].kernel is not None else 4)


def test_functions_that_stay_as_they_are_keep_their_names() -> None:
    case = case_of(chain, lambda i: {"sources": ["NCHW"], "destination": "NCHW"})
    result = check(case, uniform(case, "NHWC"))
    assert set(externals(result.module)) == set(externals(case.module))


@pytest.mark.parametrize("layouts", [None, lambda i: None], ids=["nothing", "None"])
def test_one_that_declares_nothing_is_a_barrier(layouts: Callable[[int], Any] | None) -> None:
    case = case_of(chain, layouts)
    nodes = [n for n in case.graph.ops if n.op == EXTERN_CALL]
    assert [n.role for n in nodes] == [Role.FROZEN] * 2
    assert "declares no layouts" in nodes[0].why_frozen
    result = check(case, uniform(case, "NCHW16c"))
    # Around the pool between them, and behind the last pool.
    assert [str(t.target) for t in result.transforms] == ["NCHW16c", "NCHW", "NCHW16c", "NCHW"]
    assert set(externals(result.module)) == set(externals(case.module))


def test_only_one_of_two_declares() -> None:
    case = case_of(chain, lambda i: B16 if i else None)
    check(case, uniform(case, "NCHW16c"))


def test_what_is_not_declared_is_refused() -> None:
    case = case_of(chain, lambda i: B16)
    reason = why_illegal(case.graph.by_name["extern_0"], Candidate.of("NHWC"))
    assert reason is not None
    assert "declares no NHWC,NHWC" in reason


WRONG = [
    ("{", "is not JSON"),
    ("[]", "is an empty list"),
    ('"NCHW"', "is not an object with sources, weights, destination"),
    ('{"source": ["NCHW"]}', "is not an object with sources, weights, destination and nothing else"),
    ('{"sources": ["NCHW16"]}', "NCHW16"),
    ('{"sources": ["ABCD"]}', "is no layout over N, C, H, W or O, I, H, W"),
    ('{"sources": ["NCHW32c"]}', r"the block of NCHW32c does not divide parameter 0 of shape \(1, 16, 11, 14\)"),
    ('{"destination": "NCHW32c"}', r"does not divide the result of shape \(1, 48, 11, 14\)"),
    ('{"sources": [null, null, null, "NCHW"]}', "is about 4 parameters, the function has 3"),
    ('[{"destination": "NHWC"}, {"sources": [], "destination": "NHWC"}]', "twice"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[m[:24] for _, m in WRONG])
def test_a_wrong_declaration_is_one_line_that_names_the_function(text: str, message: str) -> None:
    module = partition(build((1, 16, 11, 14), body=lambda n, x: n.conv_relu(x, 48)))
    ((gv, function),) = [(g, f) for g, f in module.functions_items() if is_external(f)]
    module.update_func(gv, function.with_attr(ATTRIBUTE, text))
    with pytest.raises(ModelError, match=message) as caught:
        build_graph(canonicalize(module))
    assert gv.name_hint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_callback_gets_every_external_function_and_is_checked() -> None:
    module = partition(build((1, 16, 11, 14), body=chain))
    seen = []
    made = declare_layouts(module, lambda f: seen.append(str(f.attrs["global_symbol"])) or B16)
    assert sorted(seen) == sorted(externals(module))
    assert [json.loads(str(f.attrs[ATTRIBUTE])) for f in externals(made).values()] == [B16, B16]
    assert not any(ATTRIBUTE in f.attrs for f in externals(module).values())
    with pytest.raises(ModelError, match="NCHW32c"):
        declare_layouts(module, lambda f: {"sources": ["NCHW32c"]})
