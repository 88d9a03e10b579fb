"""oneDNN's convolutions compute what ours do: in every layout, with every epilogue, or they are refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

from layoutsearch.errors import MaterializeError
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.candidates import nearest
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.rules import why_illegal
from layoutsearch.layout.space import parse_space, with_library
from layoutsearch.materialize.convert import materialize
from layoutsearch.materialize.verify import find_mismatches
from layoutsearch.search.workloads import kernel_nodes
from tests.contrib.onednn import needs_onednn, run_linked
from tests.materialize.cases import Case, assert_outputs
from tests.models import nets
from tests.models.nets import Net, build

op = relax.op
pytestmark = needs_onednn


def onednn(layout: str, out: str = "") -> Candidate:
    return Candidate.of(layout, "OIHW", out or layout, "onednn")


def by_onednn(case: Case, layout: str, out: str = "") -> dict[str, Candidate]:
    """Every convolution that may be in a layout by oneDNN, the rest near that layout."""
    found = {name: nearest(space.candidates, Layout(out or layout)) for name, space in case.spaces.items()}
    for node in case.graph.ops:
        if node.op == "relax.nn.conv2d" and why_illegal(node, onednn(layout, out)) is None:
            found[node.name] = onednn(layout, out)
    assert any(choice.extern for choice in found.values())
    return found


def check(module: tvm.IRModule, folder: Path, layout: str, out: str = "") -> None:
    case = Case.of(module)
    assignment = by_onednn(case, layout, out)
    converted = materialize(case.module, case.graph, assignment).module
    assert find_mismatches(converted, case.graph, assignment) == []
    assert_outputs(run_linked(converted, case.inputs, folder), case.wanted)


def conv(channels: int, out: int, kernel: int, stride: int, groups: int, pad: int | None = None) -> tvm.IRModule:
    def body(n: Net, x: relax.Expr) -> relax.Expr:
        return n.relu(n.conv(x, out, kernel, stride, pad, groups))

    return build((1, channels, 11, 14), body=body)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NCHW8c", "NCHW16c"])
@pytest.mark.parametrize(
    ("channels", "out", "kernel", "stride", "groups"),
    [(16, 48, 3, 1, 1), (32, 16, 1, 1, 1), (32, 32, 3, 2, 32), (32, 64, 3, 1, 2)],
    ids=["3x3", "pointwise", "depthwise", "grouped"],
)
def test_geometries(
    layout: str, channels: int, out: int, kernel: int, stride: int, groups: int, tmp_path: Path
) -> None:
    check(conv(channels, out, kernel, stride, groups), tmp_path, layout)


@pytest.mark.parametrize(("layout", "out"), [("NCHW", "NCHW16c"), ("NHWC", "NHWC")])
def test_an_image(layout: str, out: str, tmp_path: Path) -> None:
    check(conv(3, 16, 7, 2, 1), tmp_path, layout, out)


def test_odd_channels_with_channels_last(tmp_path: Path) -> None:
    """oneDNN fills up the blocks of its weights."""
    check(conv(7, 13, 3, 1, 1, pad=0), tmp_path, "NHWC")


def asymmetric(n: Net, x: relax.Expr) -> relax.Expr:
    weight = n.const((32, 16, 3, 2), 0.1)
    return n.emit(op.nn.conv2d(x, weight, strides=(2, 1), padding=(0, 2, 1, 1), dilation=(2, 3)))


@pytest.mark.parametrize("layout", ["NHWC", "NCHW16c"])
def test_strides_padding_and_dilation_that_differ_by_side(layout: str, tmp_path: Path) -> None:
    check(build((2, 16, 13, 17), body=asymmetric), tmp_path, layout)


def with_sum(n: Net, x: relax.Expr) -> relax.Expr:
    left = n.conv(x, 32, 1)
    return n.relu(n.emit(op.add(n.conv(x, 32), left)))


def with_hard_swish(n: Net, x: relax.Expr) -> relax.Expr:
    y = n.conv(x, 32)
    gate = n.emit(op.clip(n.emit(op.add(y, relax.const(3.0, "float32"))), 0.0, 6.0))
    return n.emit(op.multiply(n.emit(op.multiply(y, gate)), relax.const(1 / 6, "float32")))


def with_swish(n: Net, x: relax.Expr) -> relax.Expr:
    y = n.conv(x, 32)
    return n.emit(op.multiply(n.emit(op.sigmoid(y)), y))


def with_hard_sigmoid(n: Net, x: relax.Expr) -> relax.Expr:
    y = n.emit(op.multiply(n.conv(x, 32), relax.const(0.2, "float32")))
    return n.emit(op.clip(n.emit(op.add(y, relax.const(0.5, "float32"))), 0.0, 1.0))


def with_scale_and_shift(n: Net, x: relax.Expr) -> relax.Expr:
    """Operands on either side, one value a channel and one at all."""
    y = n.emit(op.multiply(n.const((1, 32, 1, 1)), n.conv(x, 32, bias=False)))
    y = n.emit(op.subtract(relax.const(0.25, "float32"), y))
    return n.emit(op.maximum(n.emit(op.nn.leakyrelu(n.emit(op.add(y, n.const((1, 32, 1, 1)))))), relax.const(-0.1)))


EPILOGUES = [with_sum, with_hard_swish, with_swish, with_hard_sigmoid, with_scale_and_shift]


@pytest.mark.parametrize("layout", ["NHWC", "NCHW16c"])
@pytest.mark.parametrize("body", EPILOGUES, ids=lambda body: body.__name__)
def test_epilogues(body: Callable[[Net, relax.Expr], relax.Expr], layout: str, tmp_path: Path) -> None:
    check(build((1, 16, 9, 14), body=body), tmp_path, layout)


def test_a_sum_in_channels_first_is_added_in_place(tmp_path: Path) -> None:
    """No fast kernel of oneDNN reads a second operand there."""
    check(build((1, 16, 9, 14), body=with_sum), tmp_path, "NCHW")


def test_weights_that_are_no_constants_are_packed_at_run_time(tmp_path: Path) -> None:
    module = build((1, 16, 9, 14), (32, 16, 3, 3), body=lambda n, x, w: n.emit(op.nn.conv2d(x, w, padding=1)))
    check(module, tmp_path, "NCHW16c")


def test_no_thread_is_started_beside_those_of_tvm(tmp_path: Path) -> None:
    """libgomp's would spin beside TVM's."""
    case = Case.of(nets.residual())
    plain = {name: nearest(space.candidates, Layout("NCHW16c")) for name, space in case.spaces.items()}
    run_linked(materialize(case.module, case.graph, plain).module, case.inputs, tmp_path)
    before = len(os.listdir("/proc/self/task"))
    converted = materialize(case.module, case.graph, by_onednn(case, "NCHW16c")).module
    assert_outputs(run_linked(converted, case.inputs, tmp_path), case.wanted)
    assert len(os.listdir("/proc/self/task")) == before


def erf(n: Net, x: relax.Expr) -> relax.Expr:
    return n.emit(op.erf(n.conv(x, 32)))


def by_pixel(n: Net, x: relax.Expr) -> relax.Expr:
    return n.emit(op.add(n.conv(x, 32), n.const((1, 1, 9, 14))))


def twice(n: Net, x: relax.Expr) -> relax.Expr:
    y = n.conv(x, 32)
    return n.emit(op.add(y, y))


SPACE = """
[target]
match = { kind = "llvm" }
blocks = [16]
[[rule]]
name = "all"
match = {}
layouts = ["NCHW", "NHWC", "NCHW{b}c"]
"""


@pytest.mark.parametrize("body", [erf, by_pixel, twice], ids=lambda body: body.__name__)
def test_an_epilogue_that_it_does_not_have_is_no_candidate_and_no_kernel(
    body: Callable[[Net, relax.Expr], relax.Expr], tmp_path: Path
) -> None:
    space = with_library(parse_space(SPACE, "test"), "onednn", ["NCHW16c", "NHWC"])
    case = Case.of(build((1, 16, 9, 14), body=body), space)
    (name,) = [n.name for n in case.graph.ops if n.op == "relax.nn.conv2d"]
    assert onednn("NCHW16c") in case.spaces[name].candidates
    (node,) = [n for n in kernel_nodes(case.module, case.graph, case.spaces) if n.root == name]
    assert node.choices
    assert not any(choice is not None and choice.extern for choice in node.choices)
    assignment = {**{m: Candidate.uniform(Layout("NCHW16c")) for m in case.spaces}, name: onednn("NCHW16c")}
    with pytest.raises(MaterializeError, match=r"onednn does not compute it: .*; tune again"):
        run_linked(materialize(case.module, case.graph, assignment).module, case.inputs, tmp_path)


def test_layouts_without_a_fast_kernel_are_no_candidates() -> None:
    space = with_library(parse_space(SPACE, "test"), "onednn", ["NCHW16c", "NHWC->NCHW16c"])
    case = Case.of(build((1, 16, 9, 14), body=lambda n, x: n.conv_relu(x, 32)), space)
    (node,) = [n for n in kernel_nodes(case.module, case.graph, case.spaces) if n.workload.facts.conv is not None]
    assert [str(c) for c in node.choices if c is not None and c.extern] == ["NCHW16c,OIHW,NCHW16c,onednn"]


def test_an_error_of_the_library_is_an_error_of_the_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The runtime refuses a text that it does not know, whatever wrote it."""
    case = Case.of(build((1, 16, 9, 14), body=lambda n, x: n.conv_relu(x, 32)))
    converted = materialize(case.module, case.graph, by_onednn(case, "NCHW16c")).module
    from layoutsearch.contrib.onednn import conv as texts

    before = texts.TAGS["NCHW16c"]
    texts.TAGS["NCHW16c"] = f"{before} 0 fft"
    try:
        with pytest.raises(Exception, match=r"fast|know|layoutsearch_onednn_conv failed"):
            run_linked(converted, case.inputs, tmp_path)
    finally:
        texts.TAGS["NCHW16c"] = before
    assert np.isfinite(case.wanted[0]).all()
    capfd.readouterr()
