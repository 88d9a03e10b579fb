"""A plan with a schedule of MetaSchedule: saved, loaded, replayed at compile, and refused where it does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx

from layoutsearch.errors import LayoutSearchError, PlanError
from layoutsearch.plan.apply import apply_plan
from layoutsearch.plan.compile import compile
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.schedule.metaschedule import as_module, from_trace
from layoutsearch.schedule.value import Schedule
from tests.models.running import range_error, run_tvm


def _parallel(func: tirx.PrimFunc) -> Schedule:
    """The trace that spreads the first two loops of every block over the threads."""
    state = s_tir.Schedule(as_module(func), seed=1)
    for block in state.get_child_blocks(state.get_sblock("root")):
        state.parallel(state.fuse(*state.get_loops(block)[:2]))
    return from_trace(state.trace)


@pytest.fixture(scope="module")
def traced(module: tvm.IRModule, plan: LayoutPlan) -> LayoutPlan:
    """The plan with the trace of its pooling."""
    lowered = apply_plan(module, plan).lowered
    ops = []
    for op in plan.ops:
        if op.kind == "max_pool2d":
            functions = {g.name_hint: f for g, f in lowered.module.functions_items()}
            (name,) = [k.function for k in lowered.kernels if "max_pool2d" in k.function]
            op = replace(op, schedule=_parallel(functions[name]))
        ops.append(op)
    return replace(plan, ops=tuple(ops))


def test_saved_loaded_and_replayed(module: tvm.IRModule, traced: LayoutPlan, tmp_path: Path) -> None:
    traced.save(tmp_path / "plan.json")
    loaded = LayoutPlan.load(tmp_path / "plan.json")
    assert loaded == traced
    first, second = (apply_plan(module, p).module for p in (traced, loaded))
    assert tvm_ffi.structural_hash(first) == tvm_ffi.structural_hash(second)
    executable = compile(module, loaded)
    draw = np.random.default_rng(1)
    inputs = [draw.normal(size=s).astype("float32") for s in ((1, 3, 16, 16), (1, 16, 8, 8))]
    outputs = relax.VirtualMachine(executable, tvm.cpu())["main"](*map(tvm.runtime.tensor, inputs))
    for got, want in zip(outputs, run_tvm(module, inputs), strict=True):
        assert range_error(got.numpy(), want) < 1e-5


def test_a_trace_that_no_longer_applies_is_one_line(module: tvm.IRModule, traced: LayoutPlan) -> None:
    trace = next(op.schedule for op in traced.ops if op.kind == "max_pool2d")
    assert trace is not None
    ops = tuple(replace(op, schedule=trace) if op.kind == "conv2d" else op for op in traced.ops)
    victim = next(op.id for op in ops if op.kind == "conv2d")
    with pytest.raises(LayoutSearchError, match="the MetaSchedule trace does not apply to this kernel") as caught:
        apply_plan(module, replace(traced, ops=ops))
    assert str(caught.value).startswith(f"op {victim}: ")
    assert str(caught.value).endswith("tune again")
    assert "\n" not in str(caught.value)


def test_a_plan_may_not_bring_code_of_its_own(traced: LayoutPlan) -> None:
    text = json.dumps(traced.to_json()).replace('"Parallel"', '"UnsafeSetDType"')
    with pytest.raises(PlanError, match=r"digest|not allowed"):
        LayoutPlan.from_json(json.loads(text))
