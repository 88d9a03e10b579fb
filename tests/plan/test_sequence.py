"""All kernels behind one call: the same outputs, memory that is never shared too early, or the module as it was."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
import tvm_ffi
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax

from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidates import enumerate_candidates, nearest
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.space import parse_space
from layoutsearch.materialize.convert import materialize
from layoutsearch.materialize.lower import lower
from layoutsearch.model import canonicalize, load
from layoutsearch.plan.apply import apply_plan, schedule_kernels, vm_pipeline
from layoutsearch.plan.sequence import Region, SequenceStep, place, sequence_kernels, sequence_steps
from layoutsearch.schedule import BUILD_CONFIG, TargetInfo
from tests.models import nets
from tests.models.nets import Net
from tests.models.plans import make_plan, two_in_three_out
from tests.models.running import native_target, range_error, run_tvm

op = relax.op
SPACE = """
[target]
match = { kind = "llvm" }
blocks = [8]

[[rule]]
name = "all"
match = {}
layouts = ["NCHW", "NHWC", "NCHW{b}c"]
"""


def scheduled(module: tvm.IRModule) -> tvm.IRModule:
    return apply_plan(module, make_plan(module, native_target(), seed=1)).module


def uniform(module: tvm.IRModule, layout: str) -> tvm.IRModule:
    """The module in one layout, every kernel under its default schedule."""
    canonical = canonicalize(load(module).module)
    graph = build_graph(canonical)
    spaces = enumerate_candidates(graph, parse_space(SPACE, "test"))
    chosen = {name: nearest(space.candidates, Layout(layout)) for name, space in spaces.items()}
    lowered = lower(materialize(canonical, graph, chosen).module, native_target())
    return schedule_kernels(lowered, {}, TargetInfo.from_target(native_target(), 2))[0]


def calls(module: tvm.IRModule) -> int:
    return sum(len(block.bindings) for block in module["main"].body.blocks)


def run(module: tvm.IRModule, inputs: list[np.ndarray], marker: str = "") -> list[np.ndarray]:
    with tvm.transform.PassContext(config=BUILD_CONFIG):
        built = tvm.compile(module, native_target(), relax_pipeline=vm_pipeline(marker), tir_pipeline="default")
    machine = relax.VirtualMachine(built, tvm.cpu())
    outs = []
    for _ in range(2):
        # Twice: the second run finds the workspace as the first one left it.
        result = machine["main"](*map(tvm.runtime.tensor, inputs))
        outs.append([result.numpy()] if hasattr(result, "numpy") else [r.numpy() for r in result])
    for first, second in zip(*outs, strict=True):
        np.testing.assert_array_equal(first, second)
    return outs[0]


def check(module: tvm.IRModule) -> tvm.IRModule:
    """Outputs as TVM's own, and whether there is one call."""
    ready = scheduled(module)
    shapes = [[int(s) for s in p.ty.shape.values] for p in module["main"].params]
    inputs = [np.random.default_rng(i).normal(size=s).astype("float32") for i, s in enumerate(shapes)]
    for got, want in zip(run(ready, inputs), run_tvm(module, inputs), strict=True):
        assert got.shape == want.shape
        assert range_error(got, want) < 5e-5
    return sequence_kernels(ready)


@pytest.mark.parametrize("make", [nets.residual, nets.mixed, nets.classifier, two_in_three_out])
def test_one_call_with_the_same_outputs(make: Callable[[], tvm.IRModule]) -> None:
    module = check(make())
    main = module["main"]
    results = len(main.body.body.fields) if isinstance(main.body.body, relax.Tuple) else 1
    # The call, and each result taken out of what it makes.
    assert calls(module) == 1 + results


def test_a_reshape_is_a_view_of_what_it_reads() -> None:
    def body(n: Net, x: relax.Expr) -> relax.Expr:
        y = n.conv_relu(x, 16)
        flat = n.emit(op.reshape(y, (1, 16, 48)))
        return n.emit(op.nn.relu(op.permute_dims(flat, (0, 2, 1))))

    module = check(nets.build((1, 8, 6, 8), body=body))
    script = module["run_kernels"].script()
    assert script.count("tvm_call_cpacked") + script.count("call_cpacked") < calls(
        scheduled(nets.build((1, 8, 6, 8), body=body))
    )


@pytest.mark.parametrize(
    "body",
    [
        # A result that is an input, one that is another one's view, one that is there twice.
        lambda n, x: relax.Tuple([n.conv_relu(x, 8), x]),
        lambda n, x: n.emit(op.reshape(x, (1, 8, 48))),
        lambda n, x: (lambda y: relax.Tuple([y, y]))(n.conv_relu(x, 8)),
    ],
)
def test_what_would_have_to_be_copied_is_left_to_the_machine(body: Callable[[Net, relax.Expr], relax.Expr]) -> None:
    module = nets.build((1, 8, 6, 8), body=body)
    ready = scheduled(module)
    assert sequence_kernels(ready).same_as(ready)
    check(module)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 12), st.integers(0, 6)), min_size=1, max_size=24))
def test_regions_that_live_together_do_not_overlap(drawn: list[tuple[int, int, int]]) -> None:
    regions = [Region(size, first, first + more) for size, first, more in drawn]
    total = place(regions)
    for i, a in enumerate(regions):
        assert a.offset % 64 == 0
        assert a.offset + a.bytes <= total
        for b in regions[:i]:
            together = a.first <= b.last and b.first <= a.last
            apart = a.offset + a.bytes <= b.offset or b.offset + b.bytes <= a.offset
            assert apart or not together


def test_memory_is_used_again() -> None:
    regions = [Region(1000, i, i + 1) for i in range(50)]
    assert place(regions) <= 2 * 1024


def concatenated(n: Net, x: relax.Expr, channels: tuple[int, ...] = (16, 24, 8)) -> relax.Var:
    return n.emit(op.concat([n.conv_relu(x, c) for c in channels], axis=1))


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (lambda n, x: n.conv_relu(concatenated(n, x), 16), 0),
        # Within each other, and the result of `main`.
        (lambda n, x: concatenated(n, concatenated(n, x)), 0),
        (lambda n, x: n.emit(op.concat([concatenated(n, x), n.conv_relu(x, 8)], axis=1)), 0),
        # A part that is read elsewhere, later on, is where it is.
        (
            lambda n, x: (
                lambda a, b: n.emit(op.add(n.conv(n.emit(op.concat([a, b], axis=1)), 8), n.emit(op.nn.relu(a))))
            )(n.conv_relu(x, 8), n.conv_relu(x, 16)),
            0,
        ),
        # In two concatenations: one of them is copied.
        (
            lambda n, x: (
                lambda a, b: n.emit(op.add(n.emit(op.concat([a, b], axis=1)), n.emit(op.concat([b, a], axis=1))))
            )(n.conv_relu(x, 8), n.conv_relu(x, 16)),
            1,
        ),
        # The input itself; a transform of it has a place.
        (lambda n, x: n.conv_relu(n.emit(op.concat([x, n.conv_relu(x, 8)], axis=1)), 8), "NCHW only"),
    ],
)
@pytest.mark.parametrize("layout", ["NCHW", "NCHW8c"])
def test_a_concatenation_is_memory(body: Callable[[Net, relax.Expr], relax.Expr], left: int | str, layout: str) -> None:
    module = nets.build((1, 8, 6, 8), body=body)
    ready = uniform(module, layout)
    kernels = [g.name_hint for g, _ in ready.functions_items() if "concat" in g.name_hint]
    script = sequence_kernels(ready)["run_kernels"].script()
    assert sum(f'"{name}"' in script for name in kernels) == (left if isinstance(left, int) else int(layout == "NCHW"))
    inputs = [np.random.default_rng(0).normal(size=(1, 8, 6, 8)).astype("float32")]
    for got, want in zip(run(ready, inputs), run_tvm(module, inputs), strict=True):
        assert range_error(got, want) < 5e-5


@pytest.mark.parametrize("make", [nets.residual, two_in_three_out])
def test_a_marker_is_called_around_every_kernel(make: Callable[[], tvm.IRModule]) -> None:
    module, seen = make(), []
    tvm_ffi.register_global_func("test.sequence.mark", seen.append, override=True)
    ready = scheduled(module)
    shapes = [[int(s) for s in p.ty.shape.values] for p in module["main"].params]
    inputs = [np.random.default_rng(i).normal(size=s).astype("float32") for i, s in enumerate(shapes)]
    plain = run(ready, inputs)
    assert not seen
    for got, want in zip(run(ready, inputs, "test.sequence.mark"), plain, strict=True):
        np.testing.assert_array_equal(got, want)
    steps = sequence_steps(ready)
    assert steps is not None
    # Before each, after the last, and once more for the cost of a call; `run` runs twice.
    assert seen == 2 * list(range(len(steps) + 2))


def test_steps_are_calls_of_kernels() -> None:
    ready = uniform(nets.build((1, 8, 6, 8), body=lambda n, x: n.conv_relu(concatenated(n, x, (24, 24)), 16)), "NCHW8c")
    steps = sequence_steps(ready)
    assert steps is not None
    names = {g.name_hint for g, f in ready.functions_items() if not isinstance(f, relax.Function)}
    assert {step.function for step in steps} < names  # the concatenation is memory
    assert len(set(steps)) == len(steps)
    for step in steps:
        assert step.call == 0 or SequenceStep(step.function, step.call - 1) in steps


def test_no_steps_where_there_is_no_sequence() -> None:
    module = nets.build((1, 8, 6, 8), body=lambda n, x: relax.Tuple([n.conv_relu(x, 8), x]))
    ready = scheduled(module)
    assert sequence_steps(ready) is None
    assert sequence_kernels(ready, "test.sequence.mark").same_as(ready)


def test_channels_last_are_copied() -> None:
    ready = uniform(nets.build((1, 8, 6, 8), body=lambda n, x: n.conv_relu(concatenated(n, x), 16)), "NHWC")
    script = sequence_kernels(ready)["run_kernels"].script()
    assert any(f'"{g.name_hint}"' in script for g, _ in ready.functions_items() if "concat" in g.name_hint)
