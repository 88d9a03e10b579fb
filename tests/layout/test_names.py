"""Axis names: how they spread, what happens where they disagree, and what becomes a view."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tvm
from tvm import relax

from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.names import Pin, Relation, assign_names
from layoutsearch.layout.rules import initial_assignment, transforms_of
from layoutsearch.model import canonicalize
from tests.models import nets, odd_nets
from tests.models.nets import Net, build

op = relax.op
LAST, FIRST = [0, 2, 3, 1], [0, 3, 1, 2]


def graph_of(module: tvm.IRModule) -> LayoutGraph:
    return build_graph(canonicalize(module))


def frozen(graph: LayoutGraph) -> dict[str, str]:
    return {o.name: o.why_frozen for o in graph.ops if o.role is Role.FROZEN}


def axes(graph: LayoutGraph) -> dict[str, str]:
    return {name: t.axes for name, t in graph.tensors.items()}


class TestPropagation:
    def test_names_spread_in_both_directions_and_turn_with_transposes(self) -> None:
        relations = [Relation("r", "a", "b"), Relation("t", "b", "c", (0, 2, 3, 1)), Relation("s", "c", "d")]
        found = assign_names("abcde", relations, [Pin("conv", "b", "NCHW")], frozenset("t"))
        assert found.names == {"a": "NCHW", "b": "NCHW", "c": "NHWC", "d": "NHWC", "e": "NCHW"}
        assert not found.set_apart

    def test_a_transpose_gives_way_first(self) -> None:
        relations = [Relation("r", "a", "b"), Relation("t", "b", "c", (0, 2, 3, 1))]
        pins = [Pin("one", "a", "NCHW"), Pin("two", "c", "NCHW")]
        found = assign_names("abc", relations, pins, frozenset("t"))
        assert found.set_apart == {"t"}
        assert set(found.names.values()) == {"NCHW"}

    def test_then_what_is_flexible(self) -> None:
        found = assign_names(
            "ab", [Relation("r", "a", "b")], [Pin("one", "a", "NCHW"), Pin("two", "b", "NHWC")], frozenset()
        )
        assert found.set_apart == {"r"}
        assert found.names == {"a": "NCHW", "b": "NHWC"}

    def test_then_the_anchor(self) -> None:
        found = assign_names("a", [], [Pin("one", "a", "NCHW"), Pin("two", "a", "NHWC")], frozenset())
        assert found.set_apart == {"two"}
        assert found.names == {"a": "NCHW"}

    def test_a_ring_that_does_not_close(self) -> None:
        """x + transpose(x): the sum's operands cannot have the same names."""
        relations = [Relation("t", "a", "b", (0, 1, 3, 2)), Relation("s", "a", "b")]
        found = assign_names("ab", relations, [Pin("conv", "a", "NCHW")], frozenset("t"))
        assert found.set_apart == {"t"}

    def test_names_that_nobody_gives_agree_with_each_other(self) -> None:
        found = assign_names("ab", [Relation("t", "a", "b", (0, 2, 3, 1))], [], frozenset("t"))
        assert found.names == {"a": "NCHW", "b": "NHWC"}


def test_a_model_of_transposes_has_only_views() -> None:
    graph = graph_of(nets.wrapped_in_transposes())
    assert not [o for o in graph.ops if o.op == "relax.permute_dims"]
    assert graph.inputs[0].axes == "NHWC"
    assert {v.info.axes for v in graph.views.values()} == {"NCHW", "NHWC"}
    # An image that arrives as NHWC is read by convolutions in NCHW: one transform for the two, one at the end, and
    # none around the addition in the middle.
    needed = transforms_of(graph, initial_assignment(graph))
    assert [(str(a), str(b)) for _, a, b in needed][:1] == [("NHWC", "NCHW")]
    assert needed[0][0] == "x"
    assert len([t for t, _, _ in needed if t == "x"]) == 1
    assert frozen(graph) == {}


def test_consumers_of_a_view_read_what_is_behind_it() -> None:
    graph = graph_of(odd_nets.transposed_output())
    view, plain = graph.outputs
    assert view.tensor == plain.tensor == "relu_0"
    assert (view.info.axes, plain.info.axes) == ("NHWC", "NCHW")
    assert [str(t[2]) for t in transforms_of(graph, initial_assignment(graph))] == ["NHWC"]


def test_a_view_of_a_view() -> None:
    def body(n: Net, x: relax.Expr) -> relax.Expr:
        y = n.relu(n.emit(op.permute_dims(n.conv(x, 16), LAST)))
        z = n.emit(op.permute_dims(n.emit(op.permute_dims(y, [0, 2, 1, 3])), [0, 3, 2, 1]))
        return n.conv(z, 8, 1)

    graph = graph_of(build((1, 8, 9, 11), body=body))
    assert not [o for o in graph.ops if o.op == "relax.permute_dims"]
    (relu,) = [o for o in graph.ops if o.op == "relax.nn.relu"]
    assert relu.result.axes == "NHWC"
    second = [o for o in graph.ops if o.op == "relax.nn.conv2d"][1]
    assert second.operands[0].tensor == relu.name
    assert second.operands[0].info.axes == "NCHW"


@pytest.mark.parametrize(
    ("model", "ops"),
    [
        (odd_nets.transpose_as_data, {"relax.permute_dims"}),
        (odd_nets.data_as_kernel, {"relax.add", "relax.nn.relu"}),
        (odd_nets.shuffle, {"relax.permute_dims", "relax.reshape"}),
    ],
)
def test_conflicts_freeze_what_lies_between(model: Callable[[], tvm.IRModule], ops: set[str]) -> None:
    graph = graph_of(model())
    assert {graph.by_name[n].op for n in frozen(graph)} == ops
    assert all(o.role is Role.ANCHOR for o in graph.ops if o.op == "relax.nn.conv2d")


def test_an_anchor_that_takes_a_tensor_for_something_else() -> None:
    """A pool in NHWC over the (N, C, H, W) of a convolution: what is in between is set apart, then one anchor."""
    graph = graph_of(odd_nets.misnamed_pool())
    reasons = frozen(graph)
    assert set(reasons.values()) == {"its axes mean different things on its two sides"}
    assert not transforms_of(graph, initial_assignment(graph))


def test_models_in_nhwc_keep_their_own_names() -> None:
    graph = graph_of(odd_nets.channels_last())
    assert {a for n, a in axes(graph).items() if len(a) == 4} == {"NHWC"}
    assert [o.operands[1].info.axes for o in graph.ops if o.op == "relax.nn.conv2d"] == ["HWIO", "HWIO"]
    assert not transforms_of(graph, initial_assignment(graph))


def test_kernels_that_are_inputs_are_named_and_counted() -> None:
    graph = graph_of(odd_nets.weight_inputs())
    assert {t.name: t.axes for t in graph.inputs} == {"x": "NCHW", "x1": "OIHW", "x2": "OIHW"}
    assignment = initial_assignment(graph)
    first, second, third, _ = graph.anchors
    assignment[first.name] = assignment[third.name] = Candidate.of("NCHW8c", "OIHW8i8o", "NCHW8c")
    kernels = [(t, str(a), str(b)) for t, a, b in transforms_of(graph, assignment) if t in ("x1", "x2")]
    # Two convolutions read x1 in the same layout: one transform.
    assert kernels == [("x1", "OIHW", "OIHW8i8o")]
    assignment[second.name] = Candidate.of("NCHW16c", "OIHW16i8o", "NCHW8c")
    kernels = [(t, str(a), str(b)) for t, a, b in transforms_of(graph, assignment) if t in ("x1", "x2")]
    assert kernels == [("x1", "OIHW", "OIHW8i8o"), ("x2", "OIHW", "OIHW16i8o")]


def test_a_transposed_kernel_is_a_view() -> None:
    graph = graph_of(odd_nets.permuted_weight())
    assert {t.name: t.axes for t in graph.inputs}["x1"] == "HWIO"
    (conv,) = graph.anchors
    assert conv.operands[1].tensor == "x1"
    assert conv.operands[1].info.axes == "OIHW"


def test_given_names_of_inputs_count() -> None:
    """A kernel taken out of a model knows its operands' names from its neighbours."""
    module = canonicalize(build((1, 9, 11, 8), body=lambda n, x: n.relu(x)))
    assert build_graph(module).inputs[0].axes == "NCHW"
    named = build_graph(module, {"x": "NHWC"})
    assert named.inputs[0].axes == named.ops[0].result.axes == "NHWC"


def test_other_ranks_have_letters_without_meaning() -> None:
    graph = graph_of(nets.classifier())
    ranks = {o.op: o.result.axes for o in graph.ops}
    assert ranks["relax.matmul"] == "AB"
    assert frozen(graph).keys() == {o.name for o in graph.ops if o.result.axes == "AB"}
    assert set(frozen(graph).values()) == {"", "it has no operand of four dimensions"}
