"""MetaSchedule's schedules as values: there and back, replayed, and what does not fit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, s_tir, tirx

from layoutsearch.errors import PlanError
from layoutsearch.schedule import Schedule, ScheduleError, apply
from layoutsearch.schedule.metaschedule import as_module, from_trace
from tests.schedule import kernels as k


@pytest.fixture(scope="module")
def func() -> tirx.PrimFunc:
    return k.fused(lambda x: relax.op.nn.max_pool2d(x, (3, 2), (2, 1), (1, 0, 1, 0)), (1, 5, 11, 8))


@pytest.fixture(scope="module")
def schedule(func: tirx.PrimFunc) -> Schedule:
    """As MetaSchedule would: a loop split by a drawn factor, one parallel, an annotation, one vectorised."""
    state = s_tir.Schedule(as_module(func), seed=3)
    block = next(b for b in state.get_child_blocks(state.get_sblock("root")) if state.get(b).name_hint == "pool_max")
    loops = state.get_loops(block)
    outer, inner = state.split(loops[2], state.sample_perfect_tile(loops[2], n=2, max_innermost_factor=4))
    state.annotate(block, "meta_schedule.unroll_explicit", 16)
    state.unannotate(block, "meta_schedule.unroll_explicit")
    state.parallel(state.fuse(loops[0], loops[1], outer))
    state.unroll(inner)
    return from_trace(state.trace)


def test_there_and_back(schedule: Schedule) -> None:
    data = json.loads(json.dumps(schedule.to_json()))
    assert data["template"] == "metaschedule"
    assert isinstance(data["params"]["trace"], list)
    assert Schedule.from_json(data) == schedule
    assert hash(Schedule.from_json(data)) == hash(schedule)


def test_a_replayed_trace_computes_the_same(func: tirx.PrimFunc, schedule: Schedule) -> None:
    x = np.random.default_rng(0).normal(size=(1, 5, 11, 8)).astype("float32")
    made = apply(func, schedule, k.INFO)
    assert "T.parallel" in made.script()
    assert made.attrs["tirx.is_scheduled"]
    assert "global_symbol" not in made.attrs
    k.close(k.run(made, [x])[0], k.run(apply(func, Schedule.make("loops"), k.INFO), [x])[0])


def test_the_kernel_is_left_as_it_was(func: tirx.PrimFunc, schedule: Schedule) -> None:
    tvm.ir.assert_structural_equal(apply(func, schedule, k.INFO), apply(func, schedule, k.INFO))


def test_a_trace_of_another_kernel(schedule: Schedule) -> None:
    other = k.fused(lambda x: relax.op.mean(x, axis=[2, 3]), (1, 5, 11, 8))
    with pytest.raises(ScheduleError, match=r"trace does not apply to this kernel: .*; tune again") as caught:
        apply(other, schedule, k.INFO)
    assert "\n" not in str(caught.value)


def test_a_trace_that_was_cut(func: tirx.PrimFunc, schedule: Schedule) -> None:
    instructions, decisions = schedule.to_json()["params"]["trace"]
    cut = {**schedule.to_json(), "params": {"trace": [instructions[2:], [[i - 2, d] for i, d in decisions]]}}
    with pytest.raises(ScheduleError, match="trace does not apply to this kernel"):
        apply(func, Schedule.from_json(cut), k.INFO)


@pytest.mark.parametrize(
    ("trace", "named"),
    [
        ("x", "not a list of instructions"),
        ([[]], "not a list of instructions"),
        ([[["Split"]], []], "instruction 0"),
        ([[["Tensorize", [], [], []]], []], "'Tensorize'"),
        ([[["Annotate", ["b0", "'text'"], ["pragma_import_llvm"], []]], []], "pragma_import_llvm"),
        ([[["Annotate", ["b0", 1], [], []]], []], "annotation"),
        ([[["SamplePerfectTile", ["l0"], [2, 4], ["v0", "v1"]]], []], "SamplePerfectTile 0"),
        ([[["Fuse", [float("nan")], [True], ["l2"]]], []], "plain JSON"),
    ],
)
def test_refuses(trace: Any, named: str) -> None:
    with pytest.raises(PlanError, match="schedule template metaschedule") as caught:
        Schedule.from_json({"template": "metaschedule", "version": 1, "params": {"trace": trace}})
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
