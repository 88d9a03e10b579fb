"""A plan applied to modules: deterministic, right, or an error that names what differs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

import layoutsearch
from layoutsearch.errors import MaterializeError, PlanError
from layoutsearch.layout.candidate import Candidate
from layoutsearch.plan.apply import apply_plan
from layoutsearch.plan.plan import LayoutPlan
from tests.models import nets
from tests.models.plans import make_plan, two_in_three_out
from tests.models.running import native_target, range_error, run_tvm

ROOT = Path(__file__).resolve().parents[2]


def _inputs() -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    return [generator.normal(size=s).astype("float32") for s in ((1, 3, 16, 16), (1, 16, 8, 8))]


def _run(executable: object) -> list[np.ndarray]:
    machine = relax.VirtualMachine(executable, tvm.cpu())
    return [out.numpy() for out in machine["main"](*map(tvm.runtime.tensor, _inputs()))]


def _assert_right(got: list[np.ndarray], module: tvm.IRModule) -> None:
    want = run_tvm(module, _inputs())
    assert [(g.shape, g.dtype) for g in got] == [(w.shape, w.dtype) for w in want]
    assert max(range_error(g, w) for g, w in zip(got, want, strict=True)) < 1e-5


def test_twice_the_same_lowered_module(module: tvm.IRModule, plan: LayoutPlan) -> None:
    first, second = (apply_plan(module, plan).module for _ in range(2))
    assert tvm_ffi.structural_hash(first) == tvm_ffi.structural_hash(second)
    tvm.ir.assert_structural_equal(first, second)


def test_the_same_lowered_module_in_another_process(module: tvm.IRModule, plan: LayoutPlan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    (tmp_path / "model.json").write_text(tvm.ir.save_json(module))
    script = """
import sys, tvm_ffi, layoutsearch
from layoutsearch.plan.compile import apply_to
plan = layoutsearch.LayoutPlan.load(sys.argv[2])
print(tvm_ffi.structural_hash(apply_to(sys.argv[1], plan).module))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "model.json", tmp_path / "plan.json"],
        capture_output=True, text=True, check=True, timeout=120, env={"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    assert int(done.stdout) == tvm_ffi.structural_hash(apply_plan(module, plan).module)


def test_every_kernel_is_scheduled(module: tvm.IRModule, plan: LayoutPlan) -> None:
    assert apply_plan(module, plan).slow_loops == {}


def test_as_a_pass(module: tvm.IRModule, plan: LayoutPlan) -> None:
    applied = layoutsearch.ApplyPlan(plan)(module)
    assert tvm_ffi.structural_hash(applied) == tvm_ffi.structural_hash(apply_plan(module, plan).module)
    with native_target():
        assert tvm_ffi.structural_hash(layoutsearch.ApplyPlan(plan)(module)) == tvm_ffi.structural_hash(applied)


def test_as_the_pipeline_of_a_script_of_ones_own(module: tvm.IRModule, plan: LayoutPlan) -> None:
    """The one line more: nothing else of the usual script changes."""
    executable = tvm.compile(module, native_target(), relax_pipeline=layoutsearch.pipeline(plan))
    _assert_right(_run(executable), module)


def test_compile_and_pipeline_give_equal_outputs(module: tvm.IRModule, plan: LayoutPlan) -> None:
    ours = _run(layoutsearch.compile(module, plan))
    theirs = _run(tvm.compile(module, native_target(), relax_pipeline=layoutsearch.pipeline(plan)))
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_module_is_left_as_it_was(plan: LayoutPlan) -> None:
    module = two_in_three_out()
    before = tvm_ffi.structural_hash(module)
    apply_plan(module, plan)
    assert tvm_ffi.structural_hash(module) == before


def test_new_weights_keep_their_plan(plan: LayoutPlan) -> None:
    """A retrained model has the same operators."""

    class Retrained(nets.Net):
        def __init__(self, seed: int = 0) -> None:
            super().__init__(seed + 99)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nets, "Net", Retrained)
        retrained = two_in_three_out()
    assert tvm_ffi.structural_hash(retrained) != tvm_ffi.structural_hash(two_in_three_out())
    _assert_right(_run(layoutsearch.compile(retrained, plan)), retrained)


def _refused(module: tvm.IRModule, plan: LayoutPlan) -> str:
    with pytest.raises(PlanError) as caught:
        apply_plan(module, plan)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_another_model(plan: LayoutPlan) -> None:
    message = _refused(nets.residual(), plan)
    assert "op conv2d" in message
    assert "the model" in message


@pytest.mark.parametrize("change", [{"stride": 1}, {"out": 32}, {"size": 24}])
def test_a_changed_op_is_named(plan: LayoutPlan, change: dict[str, int]) -> None:
    message = _refused(two_in_three_out(**change), plan)
    assert "op conv2d" in message or "op relu" in message or "op add" in message
    assert "tune again" in message


def test_another_target_names_what_differs(module: tvm.IRModule, plan: LayoutPlan) -> None:
    with pytest.raises(PlanError, match=r"mcpu=.*'core2'"):
        apply_plan(module, plan, tvm.target.Target({"kind": "llvm", "mcpu": "core2"}))
    with pytest.raises(PlanError, match="tuned for target"), tvm.target.Target({"kind": "llvm", "mcpu": "core2"}):
        layoutsearch.ApplyPlan(plan)(module)


def test_the_pipeline_raises_plan_errors_too(plan: LayoutPlan) -> None:
    """Through C++ and back: still the same class."""
    with pytest.raises(PlanError, match="tune again"):
        tvm.compile(two_in_three_out(out=32), native_target(), relax_pipeline=layoutsearch.pipeline(plan))


def test_same_operators_connected_otherwise() -> None:
    """Ids name operators alone; the fingerprint sees how they are connected."""

    def network(swap: bool) -> tvm.IRModule:
        def body(n: nets.Net, x: relax.Expr, y: relax.Expr) -> relax.Expr:
            left, right = n.conv(x, 16), n.conv(y, 16)
            pair = (right, left) if swap else (left, right)
            return n.emit(relax.op.subtract(n.relu(pair[0]), pair[1]))

        return nets.build((1, 8, 8, 8), (1, 8, 8, 8), body=body)

    message = _refused(network(True), make_plan(network(False), native_target()))
    assert "fingerprint" in message
    assert "connected" in message


def test_an_illegal_layout_is_refused_before_the_conversion(module: tvm.IRModule, plan: LayoutPlan) -> None:
    bad = Candidate.of("NCHW7c")
    ops = tuple(replace(op, choice=bad) if op.kind == "max_pool2d" else op for op in plan.ops)
    message = _refused(module, replace(plan, ops=ops))
    assert "max_pool2d" in message
    assert "NCHW7c" in message


def test_a_transform_that_the_plan_does_not_list(module: tvm.IRModule, plan: LayoutPlan) -> None:
    gone = plan.transforms[0]
    with pytest.raises(MaterializeError, match=f"{gone.source} to {gone.target}"):
        apply_plan(module, replace(plan, transforms=plan.transforms[1:]))


def test_an_empty_plan_for_a_model_without_a_choice() -> None:
    module = nets.without_convolution()
    plan = replace(make_plan(module, native_target()), ops=(), transforms=())
    executable = layoutsearch.compile(module, plan)
    x = np.random.default_rng(0).normal(size=(4, 12)).astype("float32")
    got = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy()
    assert range_error(got, run_tvm(module, [x])[0]) < 1e-5


def test_an_empty_plan_for_a_model_with_a_choice_is_refused(module: tvm.IRModule, plan: LayoutPlan) -> None:
    assert "op " in _refused(module, replace(plan, ops=(), transforms=()))
