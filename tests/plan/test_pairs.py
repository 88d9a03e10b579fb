"""Plans in which pairs of kernels are one: saved, applied, explained, or refused with the operators' names."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

import layoutsearch
from layoutsearch.bench.per_op import PAIR, kernel_times
from layoutsearch.cli.table import explanation_table
from layoutsearch.errors import PlanError
from layoutsearch.materialize.verify import find_mismatches
from layoutsearch.measure.in_situ import StepTimes
from layoutsearch.plan.apply import apply_plan
from layoutsearch.plan.explain import explain
from layoutsearch.plan.plan import LayoutPlan, PlanFusion
from layoutsearch.plan.steps import plan_steps
from layoutsearch.schedule import Schedule
from layoutsearch.search.jobs import PlanJob, build_marked
from tests.models import nets
from tests.models.plans import make_plan
from tests.models.running import native_target, range_error, run_tvm

SCHEDULE = Schedule.make("depthwise_pointwise", rows=2, tile=5, vectors=1, dw_tile=3, dw_vectors=1)
SPACE = """
[target]
match = {{ kind = "llvm" }}
blocks = [{block}]
[[rule]]
name = "all"
match = {{}}
layouts = ["{layout}"]
"""


def plan_in(module: tvm.IRModule, layout: str, folder: Path, block: int = 8) -> LayoutPlan:
    """A plan with one layout wherever it is legal."""
    (folder / "space.toml").write_text(SPACE.format(layout=layout, block=block))
    return make_plan(module, native_target(), space=folder / "space.toml")


def paired(plan: LayoutPlan, schedule: Schedule = SCHEDULE) -> LayoutPlan:
    """The plan with each depthwise convolution and the pointwise one behind it as one kernel."""
    ids = [op.id for op in plan.ops]
    kinds = {op.id: op.kind for op in plan.ops}
    found = []
    for position, op_id in enumerate(ids):
        if kinds[op_id] == "conv2d_depthwise":
            behind = next(i for i in ids[position:] if kinds[i] == "conv2d_pointwise")
            found.append(PlanFusion(op_id, behind, schedule, 10.0, 12.5))
    return replace(plan, fusions=tuple(found))


@pytest.fixture(scope="module")
def module() -> tvm.IRModule:
    return nets.inverted_residuals()


@pytest.fixture(scope="module")
def plan(module: tvm.IRModule, tmp_path_factory: pytest.TempPathFactory) -> LayoutPlan:
    return paired(plan_in(module, "NHWC", tmp_path_factory.mktemp("space")))


def calls(module: tvm.IRModule) -> list[str]:
    """Names of the kernels that `main` calls."""
    bindings = [b for block in module["main"].body.blocks for b in block.bindings]
    return [b.value.args[0].name_hint for b in bindings if isinstance(b.value, relax.Call)]


def output(module: tvm.IRModule, plan: LayoutPlan) -> tuple[np.ndarray, np.ndarray]:
    """Of the compiled plan, and of the untouched module."""
    x = np.random.default_rng(0).normal(size=(1, 8, 22, 18)).astype("float32")
    machine = relax.VirtualMachine(layoutsearch.compile(module, plan), tvm.cpu())
    return machine["main"](tvm.runtime.tensor(x)).numpy(), run_tvm(module, [x])[0]


def test_saved_and_loaded(plan: LayoutPlan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert LayoutPlan.load(tmp_path / "plan.json") == plan
    assert len(plan.fusions) == 3


def test_a_plan_without_pairs_does_not_speak_of_them(plan: LayoutPlan) -> None:
    data = replace(plan, fusions=()).to_json()
    assert "fusions" not in data
    assert "fusions" not in data["digests"]
    assert LayoutPlan.from_json(data).fusions == ()


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d.pop("fusions"),
        lambda d: d["fusions"].pop(),
        lambda d: d["fusions"][0]["schedule"]["params"].update(rows=1),
        lambda d: d["digests"].pop("fusions"),
    ],
)
def test_pairs_cannot_be_edited(plan: LayoutPlan, edit: Callable[[Any], Any]) -> None:
    data = json.loads(json.dumps(plan.to_json()))
    edit(data)
    with pytest.raises(PlanError, match=r"'fusions' was edited"):
        LayoutPlan.from_json(data)


def test_two_calls_become_one(module: tvm.IRModule, plan: LayoutPlan) -> None:
    apart, joined = (apply_plan(module, p) for p in (replace(plan, fusions=()), plan))
    assert apart.joins == ()
    assert len(calls(apart.module)) - len(calls(joined.module)) == 3
    assert sum(name.startswith("pair_") for name in calls(joined.module)) == 3
    # What is not called any more is gone.
    functions = {g.name_hint for g, f in joined.module.functions_items() if isinstance(f, tvm.tirx.PrimFunc)}
    assert functions == set(calls(joined.module))
    assert joined.slow_loops == {}
    assert find_mismatches(joined.materialized.module, joined.graph, joined.assignment) == []
    got, want = output(module, plan)
    assert range_error(got, want) < 1e-5


def test_in_blocks(module: tvm.IRModule, tmp_path: Path) -> None:
    blocked = paired(plan_in(module, "NCHW{b}c", tmp_path))
    assert {str(op.choice.out) for op in blocked.ops if op.choice and op.kind == "conv2d_depthwise"} == {"NCHW8c"}
    got, want = output(module, blocked)
    assert range_error(got, want) < 1e-5


def test_some_of_several_equal_kernels(module: tvm.IRModule, plan: LayoutPlan) -> None:
    """The depthwise convolutions of the first two blocks are one function; only the second is in a pair."""
    some = replace(plan, fusions=plan.fusions[1:2])
    joined = apply_plan(module, some)
    assert sum(name.startswith("pair_") for name in calls(joined.module)) == 1
    steps = plan_steps(joined)
    assert steps is not None
    pair = next(step for step in steps if step.second)
    assert (pair.ops[0], pair.second) == (some.fusions[0].first, some.fusions[0].second)
    got, want = output(module, some)
    assert range_error(got, want) < 1e-5


def test_equal_pairs_are_one_function() -> None:
    def body(n: nets.Net, x: relax.Expr) -> relax.Expr:
        for _ in range(2):
            x = n.conv(n.depthwise(n.conv(x, 16, 1)), 8, 1)
        return x

    module = nets.build((1, 8, 6, 10), body=body)
    schedule = Schedule.make("depthwise_pointwise", rows=1, tile=4, vectors=1, dw_tile=3, dw_vectors=1)
    plan = paired(make_uniform(module), schedule)
    joined = apply_plan(module, plan)
    names = [name for name in calls(joined.module) if name.startswith("pair_")]
    assert len(names) == 2
    assert len(set(names)) == 1
    steps = plan_steps(joined)
    assert steps is not None
    assert [step.second for step in steps if step.second] == [f.second for f in plan.fusions]


def make_uniform(module: tvm.IRModule) -> LayoutPlan:
    """All in NHWC."""
    with tempfile.TemporaryDirectory() as folder:
        return plan_in(module, "NHWC", Path(folder))


def test_twice_the_same(module: tvm.IRModule, plan: LayoutPlan) -> None:
    first, second = (apply_plan(module, plan).module for _ in range(2))
    assert tvm_ffi.structural_hash(first) == tvm_ffi.structural_hash(second)


def test_steps_have_the_work_of_both(module: tvm.IRModule, plan: LayoutPlan) -> None:
    apart, joined = (plan_steps(apply_plan(module, p)) for p in (replace(plan, fusions=()), plan))
    assert apart is not None
    assert joined is not None
    assert [op for step in joined for op in step.ops] == [op for step in apart for op in step.ops]
    by_root = {step.ops[0]: step.facts for step in apart if step.facts is not None}
    for step in (s for s in joined if s.second):
        one, two = by_root[step.ops[0]], by_root[step.second]
        assert step.facts is not None
        assert step.facts.flops == one.flops + two.flops
        assert step.facts.weight_bytes == one.weight_bytes + two.weight_bytes
        # The tensor between is gone.
        assert step.facts.written_bytes == two.written_bytes
        assert step.facts.read_bytes == one.read_bytes + two.read_bytes - one.written_bytes
        assert "conv2d" not in step.facts.epilogue


def test_per_operator_times_know_pairs(module: tvm.IRModule, plan: LayoutPlan) -> None:
    steps = plan_steps(apply_plan(module, plan))
    assert steps is not None
    times = StepTimes(((5.0, 5.0),) * len(steps), (5.0 * len(steps),), 0.1)
    pairs = [k for k in kernel_times(steps, times, plan, None) if k.group == PAIR]
    assert {k.kind for k in pairs} == {"conv2d_depthwise+conv2d_pointwise"}
    assert [k.alone_us for k in pairs] == [10.0] * 3


def test_marks_are_put_between_the_kernels_that_are_left(
    module: tvm.IRModule, plan: LayoutPlan, tmp_path: Path
) -> None:
    (tmp_path / "model.json").write_text(tvm.ir.save_json(module))
    job = PlanJob(str(tmp_path / "model.json"), True, "1", (), plan.to_json(), str(tmp_path / "m.so"))
    built = build_marked(job)
    assert built.steps is not None
    assert sum(bool(step.second) for step in built.steps) == 3
    assert Path(built.marked).exists()


def test_explained(plan: LayoutPlan) -> None:
    explanation = explain(plan)
    joined = {row.op.id: row.joined for row in explanation.rows}
    fusion = plan.fusions[0]
    assert joined[fusion.first] == f"one kernel with {fusion.second}: 10.0 us, 12.5 us apart"
    assert joined[fusion.second] == f"one kernel with {fusion.first}"
    assert any("3 pairs" in line and "8 us" in line for line in explanation.summary)
    assert explanation_table(explanation.rows).row_count == len(explanation.rows)
    assert not any("pair" in line for line in explain(replace(plan, fusions=())).summary)


def refused(module: tvm.IRModule, plan: LayoutPlan, *fusions: PlanFusion) -> str:
    with pytest.raises(PlanError) as caught:
        apply_plan(module, replace(plan, fusions=fusions))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_refusals_name_the_operators(module: tvm.IRModule, plan: LayoutPlan) -> None:
    first, other, last = plan.fusions
    relu = next(op.id for op in plan.ops if op.kind == "relu")
    assert "conv2d:0:9" in refused(module, plan, replace(first, first="conv2d:0:9"))
    assert relu in refused(module, plan, replace(first, second=relu))
    # In two pairs.
    assert first.first in refused(module, plan, first, replace(first, second=other.second))
    for wrong in (replace(first, second=last.second), PlanFusion(first.second, first.first, SCHEDULE)):
        message = refused(module, plan, wrong)
        assert wrong.first in message
        assert wrong.second in message
        assert "does not read" in message
    tall = Schedule.make("depthwise_pointwise", rows=99, tile=5, vectors=1, dw_tile=3, dw_vectors=1)
    assert "99 rows" in refused(module, plan, replace(first, schedule=tall))
    assert "loops" in refused(module, plan, replace(first, schedule=Schedule.make("loops")))


def test_an_operator_pair_that_no_template_joins(tmp_path: Path) -> None:
    """Two pointwise ones."""
    module = nets.build((1, 8, 6, 10), body=lambda n, x: n.conv(n.conv(x, 16, 1), 24, 1))
    plan = plan_in(module, "NHWC", tmp_path)
    first, second = (op.id for op in plan.ops if op.kind == "conv2d_pointwise")
    message = refused(module, plan, PlanFusion(first, second, SCHEDULE))
    assert "depthwise" in message
    assert first in message


def test_the_wrong_template_for_the_order_of_the_two(module: tvm.IRModule, plan: LayoutPlan) -> None:
    depthwise = plan.fusions[0].first
    ids = [op.id for op in plan.ops]
    expand = next(op.id for op in reversed(plan.ops[: ids.index(depthwise)]) if op.kind == "conv2d_pointwise")
    message = refused(module, plan, replace(plan.fusions[0], first=expand, second=depthwise))
    assert "depthwise_pointwise" in message
    assert expand in message


@pytest.mark.parametrize("layout", ["NHWC", "NCHW{b}c"])
def test_the_pointwise_one_first(module: tvm.IRModule, layout: str, tmp_path: Path) -> None:
    plan = plan_in(module, layout, tmp_path)
    kinds = {op.id: op.kind for op in plan.ops}
    schedule = Schedule.make("pointwise_depthwise", rows=2, tile=5, vectors=2, dw_tile=3)
    ids = list(kinds)
    found = []
    for position, op_id in enumerate(ids):
        if kinds[op_id] == "conv2d_depthwise":
            before = next(i for i in reversed(ids[:position]) if kinds[i] == "conv2d_pointwise")
            found.append(PlanFusion(before, op_id, schedule, 10.0, 12.5))
    plan = replace(plan, fusions=tuple(found))
    assert sum(name.startswith("pair_") for name in calls(apply_plan(module, plan).module)) == 3
    got, want = output(module, plan)
    assert range_error(got, want) < 1e-5


def test_layouts_without_channels_innermost(module: tvm.IRModule, tmp_path: Path) -> None:
    planes = paired(plan_in(module, "NCHW", tmp_path))
    message = refused(module, planes, *planes.fusions[:1])
    assert "channels innermost" in message
    assert planes.fusions[0].first in message


@pytest.mark.parametrize("where", ["another reader", "an output"])
def test_what_is_between_is_read_elsewhere(where: str) -> None:
    def body(n: nets.Net, x: relax.Expr) -> relax.Expr:
        y = n.depthwise(n.conv(x, 16, 1))
        z = n.conv(y, 24, 1)
        return relax.Tuple([z, n.conv(y, 8, 3) if where == "another reader" else y])

    module = nets.build((1, 8, 6, 10), body=body)
    plan = paired(make_uniform(module))
    message = refused(module, plan, *plan.fusions)
    # As an output in NCHW it is read by a transform.
    assert "read elsewhere" in message
    assert plan.fusions[0].first in message
