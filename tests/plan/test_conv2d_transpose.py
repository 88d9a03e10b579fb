"""Transposed convolutions: the final module has them in the plan's layouts, with nothing around them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from tvm import relax

from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.candidates import nearest
from layoutsearch.layout.layout import Layout
from layoutsearch.materialize.copies import only_copies
from layoutsearch.model import canonicalize, load, parse_shapes
from layoutsearch.plan.apply import Applied, apply_plan, vm_pipeline
from layoutsearch.plan.border import from_plan, to_plan
from layoutsearch.plan.calls import trace_calls
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.schedule import BUILD_CONFIG
from layoutsearch.search.workloads import KernelNode
from tests.materialize.cases import TARGET
from tests.models import nets, zoo
from tests.models.plans import make_plan
from tests.models.running import range_error, run_tvm

op = relax.op
SPACE = """
[target]
match = { kind = "llvm" }
blocks = [8, 16]

[[rule]]
name = "transposed"
match = { op = "nn.conv2d_transpose" }
layouts = ["NCHW", "NHWC", "NHWC:HWOI", "NCHW{i}c->NCHW{o}c", "NHWC->NCHW{o}c", "NCHW{i}c->NHWC"]

[[rule]]
name = "few_channels"
match = { op = "nn.conv2d", in_channels = { max = 4 } }
layouts = ["NCHW", "NHWC", "NCHW->NCHW{o}c"]

[[rule]]
name = "everything_else"
match = {}
layouts = ["NCHW", "NHWC", "NCHW{b}c"]
"""
ROWS = {
    "IOHW": Candidate.of("NCHW", "IOHW", "NCHW"),
    "HWIO": Candidate.of("NHWC", "HWIO", "NHWC"),
    "HWOI": Candidate.of("NHWC", "HWOI", "NHWC"),
    "packed": Candidate.of("NCHW16c", "IOHW16i8o", "NCHW8c"),
    "unpacked": Candidate.of("NCHW16c", "HWIO16i", "NHWC"),
}


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("space") / "space.toml"
    path.write_text(SPACE)
    return path


def pinned(transposed: Candidate, rest: str) -> Callable[[KernelNode], Candidate | None]:
    """Transposed convolutions as one candidate where it is legal, else near it; all others near a layout."""

    def choose(node: KernelNode) -> Candidate | None:
        free = [c for c in node.choices if c is not None]
        if not free:
            return None
        if node.workload.facts.kind == "conv2d_transpose":
            return transposed if transposed in free else nearest(free, transposed.out)
        return nearest(free, Layout(rest))

    return choose


def head(n: nets.Net, x: relax.Expr) -> relax.Expr:
    """A convolution, two transposed ones that double the plane, and a sigmoid, as a segmentation head has them."""
    y = n.conv_relu(x, 32)
    for channels in (24, 8):
        weight = n.const((n.channels(y), channels, 2, 2), 0.2)
        y = n.emit(op.nn.conv2d_transpose(y, weight, strides=2))
        y = n.relu(n.emit(op.add(y, n.const((1, channels, 1, 1), 0.1))))
    return n.emit(op.sigmoid(n.conv(y, 1, 1)))


def finished(applied: Applied) -> tvm.IRModule:
    with TARGET:
        return vm_pipeline(proven=applied.proven)(applied.module)


def moves_around(applied: Applied, op_id: str) -> list[str]:
    """Transforms of what an operator reads or makes, as the final module has them."""
    call = next(c for c in applied.proven.calls if c.name == op_id)
    near = {v.tensor for v in (*call.reads, *call.makes) if v.tensor}
    return [c.name for c in applied.proven.calls if c.is_transform and c.reads[0].tensor in near]


def run(applied: Applied, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    with tvm.transform.PassContext(config=BUILD_CONFIG):
        built = tvm.compile(applied.module, TARGET, relax_pipeline=vm_pipeline(proven=applied.proven))
    result = relax.VirtualMachine(built, tvm.cpu())["main"](*map(tvm.runtime.tensor, arrays))
    return [result.numpy()] if hasattr(result, "numpy") else [r.numpy() for r in result]


@pytest.mark.parametrize("name", ROWS)
def test_a_segmentation_head_in_every_layout(name: str, space: Path) -> None:
    module, choice = nets.build((1, 12, 5, 9), body=head), ROWS[name]
    plan = make_plan(module, TARGET, space=space, choose=pinned(choice, str(choice.out)))
    applied = apply_plan(module, plan)
    first, second = (o for o in plan.ops if o.kind == "conv2d_transpose")
    assert first.choice == choice
    for row in (first, second):
        call = next(c for c in applied.proven.calls if c.name == row.id)
        assert row.choice is not None
        assert [str(v.layout) for v in (call.reads[0], call.makes[0])] == [str(row.choice.data), str(row.choice.out)]
        kernel = {f"{g.name_hint}": f for g, f in applied.module.functions_items()}[call.function]
        shapes = [tuple(int(s) for s in p.ty.shape) for p in kernel.params]
        info = applied.graph.by_name[call.ops[0]].operands[1].info
        assert row.choice.kernel is not None
        assert shapes[1] == row.choice.kernel.physical_shape(info.shape or (), info.axes)
        assert shapes[0] == call.reads[0].shape
        assert shapes[-1] == call.makes[0].shape
    between = {t.tensor for t in plan.transforms}
    if choice.data == choice.out:
        # All in one layout: nothing between the convolutions.
        assert moves_around(applied, first.id) == moves_around(applied, second.id) == []
    else:
        assert {first.id, second.id} & between or choice.out in (Layout("NCHW8c"), Layout("NHWC"))
    (x,) = [np.random.default_rng(3).normal(size=(1, 12, 5, 9)).astype("float32")]
    (got,), (want,) = run(applied, to_plan(plan, [x])), run_tvm(canonicalize(module), [x])
    assert range_error(from_plan(plan, [got])[0], want) < 1e-5


@pytest.mark.parametrize("io", [(), ("x=NHWC", "output0=NHWC"), ("free",)])
def test_2048_to_256_channels_on_7_by_7(io: tuple[str, ...]) -> None:
    """Channels last: with a border that is too, the module is the one kernel."""

    def body(n: nets.Net, x: relax.Expr) -> relax.Expr:
        return n.emit(op.nn.conv2d_transpose(x, n.const((2048, 256, 2, 2), 0.02), strides=2))

    module = nets.build((1, 2048, 7, 7), body=body)
    plan = make_plan(module, TARGET, choose=pinned(ROWS["HWIO"], "NHWC"), io=io)
    applied = apply_plan(module, plan)
    trace = trace_calls(finished(applied))
    functions = {g.name_hint: f for g, f in applied.module.functions_items()}
    copies = [c.function for c in trace.kernels if only_copies(functions[c.function])]
    assert len(trace.kernels) - len(copies) == 1
    assert len(copies) == len(plan.transforms) == (0 if io else 2)
    assert [p.shape for p in (*trace.parameters, *trace.results)] == (
        [(1, 7, 7, 2048), (1, 14, 14, 256)] if io else [(1, 2048, 7, 7), (1, 256, 14, 14)]
    )
    assert plan.io_layouts == ({"input x": "NHWC", "output output0": "NHWC"} if io else {})
    x = np.random.default_rng(5).normal(size=(1, 2048, 7, 7)).astype("float32")
    (got,) = from_plan(plan, run(applied, to_plan(plan, [x])))
    weight = canonicalize(module)["main"].body.blocks[0].bindings[0].value.args[1].value.numpy()
    # At stride 2 a kernel of 2 x 2 puts each pixel into a square of its own.
    want = np.einsum("nihw,ioyx->nohywx", x, weight).reshape(1, 256, 14, 14)
    assert range_error(got, want) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "rest"), [("HWIO", "NHWC"), ("HWOI", "NHWC"), ("packed", "NCHW8c")])
def test_the_detector(choice: str, rest: str, space: Path) -> None:
    """Its two transposed convolutions: 24 to 24 channels, then to 1."""
    proto = zoo.logits(onnx.load(str(zoo.detector_path())))
    module = load(proto, parse_shapes(["x=1,3,64,96"]))
    wanted = {
        "HWIO": Candidate.of("NHWC", "HWIO", "NHWC"),
        "HWOI": Candidate.of("NHWC", "HWOI", "NHWC"),
        "packed": Candidate.of("NCHW8c", "IOHW8i8o", "NCHW8c"),
    }[choice]
    plan: LayoutPlan = make_plan(
        module.module, TARGET, space=space, choose=pinned(wanted, rest), io=("free",), drawn=False
    )
    applied = apply_plan(module.module, plan)
    final = trace_calls(finished(applied))
    transposed = [o for o in plan.ops if o.kind == "conv2d_transpose"]
    assert str(transposed[0].choice) == str(wanted)
    for row in transposed:
        assert re.match(r"conv2d_transpose:\w+:0", row.id)
        listed = {(t.tensor, t.source, t.target) for t in plan.transforms}
        near = [c for c in applied.proven.calls if c.name in moves_around(applied, row.id)]
        ids = {o.name: o.id for o in applied.graph.ops}
        assert {(ids[c.reads[0].tensor], str(c.reads[0].layout), str(c.makes[0].layout)) for c in near} <= listed
        if rest == "NHWC":
            assert near == []
    functions = {g.name_hint: f for g, f in applied.module.functions_items()}
    copies = [c for c in final.kernels if only_copies(functions[c.function])]
    own = [c for c in applied.proven.calls if c.ops and only_copies(functions[c.function])]
    became_memory = len(applied.proven.calls) - len(final.kernels)
    assert len(plan.transforms) + len(own) - became_memory <= len(copies) <= len(plan.transforms) + len(own)
