"""All kernels behind one call: the same outputs, memory that is never shared too early, or the module as it was."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax

from layoutsearch.plan.apply import apply_plan, vm_pipeline
from layoutsearch.plan.sequence import Region, place, sequence_kernels
from layoutsearch.schedule import BUILD_CONFIG
from tests.models import nets
from tests.models.nets import Net
from tests.models.plans import make_plan, two_in_three_out
from tests.models.running import native_target, range_error, run_tvm

op = relax.op


def scheduled(module: tvm.IRModule) -> tvm.IRModule:
    return apply_plan(module, make_plan(module, native_target(), seed=1)).module


def calls(module: tvm.IRModule) -> int:
    return sum(len(block.bindings) for block in module["main"].body.blocks)


def run(module: tvm.IRModule, inputs: list[np.ndarray]) -> list[np.ndarray]:
    with tvm.transform.PassContext(config=BUILD_CONFIG):
        built = tvm.compile(module, native_target(), relax_pipeline=vm_pipeline(), tir_pipeline="default")
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
