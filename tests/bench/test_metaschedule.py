"""The peer that MetaSchedule tuned: its time, its database, and that it computes the model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.s_tir import meta_schedule as ms

from layoutsearch.bench import metaschedule_jobs as jobs
from layoutsearch.bench.metaschedule import MetaScheduleOptions, build_peer
from layoutsearch.bench.model import bench_model
from layoutsearch.errors import LayoutSearchError
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.search.jobs import PlanJob, file_stamp
from tests.models import nets
from tests.models.plans import make_plan, two_in_three_out
from tests.models.running import native_target, range_error, run_tvm


def write(folder: Path, module: tvm.IRModule, threads: int = 2) -> tuple[str, LayoutPlan]:
    path = folder / "model.json"
    path.write_text(tvm.ir.save_json(module), encoding="utf-8")
    plan = make_plan(module, native_target(), threads=threads)
    plan.save(folder / "plan.json")
    return str(path), plan


def job(folder: Path, module: tvm.IRModule) -> PlanJob:
    path, plan = write(folder, module)
    return PlanJob(path, False, file_stamp(path), (), plan.to_json(), str(folder / "peer.so"))


def outputs(library: str, inputs: list[np.ndarray]) -> list[np.ndarray]:
    machine = relax.VirtualMachine(tvm.runtime.load_module(library), tvm.cpu())
    result = machine["main"](*map(tvm.runtime.tensor, inputs))
    return [o.numpy() for o in ([result] if isinstance(result, tvm.runtime.Tensor) else result)]


def activation() -> tvm.IRModule:
    """So few schedules that MetaSchedule comes to their end by itself."""
    return nets.build((1, 6, 5, 4), body=lambda n, x: n.emit(relax.op.nn.relu(x)))


@pytest.mark.slow
def test_a_database_is_kept_used_and_tuned_further(tmp_path: Path) -> None:
    module = activation()
    plan_job = job(tmp_path, module)
    options = MetaScheduleOptions(300.0, tmp_path / "db")
    peer = build_peer(plan_job, 2, options, tmp_path)
    facts = peer.facts
    assert facts["metaschedule_budget_s"] == 300.0
    assert 0 < facts["metaschedule_seconds"] < 310
    assert facts["metaschedule_kernels"] == facts["metaschedule_kernels_tuned"] == 1
    assert facts["metaschedule_trials"] > 0
    x = np.random.default_rng(0).normal(size=(1, 6, 5, 4)).astype("float32")
    assert np.array_equal(outputs(peer.library, [x])[0], np.maximum(x, 0))
    again = build_peer(plan_job, 2, MetaScheduleOptions(None, tmp_path / "db"), tmp_path)
    assert again.facts == facts
    # A run that was killed while it wrote.
    with (tmp_path / "db" / "database_tuning_record.json").open("a") as file:
        file.write('[0, [[["GetSBl')
    assert build_peer(plan_job, 2, MetaScheduleOptions(None, tmp_path / "db"), tmp_path).facts == facts
    with pytest.raises(LayoutSearchError, match="was tuned for threads 2, this is 1; name another folder"):
        build_peer(plan_job, 1, options, tmp_path)


def test_the_time_is_over_before_anything_is_tuned(tmp_path: Path) -> None:
    """The peer is then what TVM builds without a schedule."""
    module = two_in_three_out()
    peer = build_peer(job(tmp_path, module), 2, MetaScheduleOptions(0.01), tmp_path)
    assert peer.facts["metaschedule_kernels"] == 6
    assert peer.facts["metaschedule_trials"] == peer.facts["metaschedule_kernels_tuned"] == 0
    assert peer.facts["metaschedule_budget_s"] == 0.01
    draw = np.random.default_rng(1)
    inputs = [draw.normal(size=s).astype("float32") for s in ((1, 3, 16, 16), (1, 16, 8, 8))]
    for got, want in zip(outputs(peer.library, inputs), run_tvm(module, inputs), strict=True):
        assert range_error(got, want) < 1e-6


@pytest.mark.slow
def test_tuned_kernels_with_weights_in_layouts_of_their_own(tmp_path: Path) -> None:
    module = two_in_three_out()
    peer = jobs.PeerJob(job(tmp_path, module), 2, str(tmp_path), str(tmp_path))
    target, database = jobs._target(peer), ms.database.JSONDatabase(work_dir=str(tmp_path))
    rewritten = 0
    for task in ms.relax_integration.extract_tasks(jobs._fused(peer, target), target):
        context = ms.TuneContext(
            mod=task.mod, target=target, space_generator="post-order-apply", search_strategy="replay-trace",
            rand_state=5, num_threads=1,
        )  # fmt: skip
        spaces = context.generate_design_space()
        context.pre_tuning(8, 8, spaces, database, ms.cost_model.RandomModel(seed=1))
        drawn = context.generate_measure_candidates()
        candidate = next((c for c in drawn if "TransformLayout" in str(c.sch.trace)), drawn[0])
        rewritten += "layout_rewrite_preproc" in candidate.sch.mod.script()
        workload = database.commit_workload(task.mod)
        record = ms.database.TuningRecord(candidate.sch.trace, workload, [1.0], target, candidate.args_info)
        database.commit_tuning_record(record)
    assert rewritten
    built = jobs.build(peer)
    assert built == jobs.Tuned(6, 6, 6)
    draw = np.random.default_rng(1)
    inputs = [draw.normal(size=s).astype("float32") for s in ((1, 3, 16, 16), (1, 16, 8, 8))]
    for got, want in zip(outputs(peer.model.output, inputs), run_tvm(module, inputs), strict=True):
        assert range_error(got, want) < 1e-5


def test_neither_time_nor_a_database(tmp_path: Path) -> None:
    model, _ = write(tmp_path, two_in_three_out())
    with pytest.raises(LayoutSearchError, match="nothing is tuned yet; give --metaschedule-budget, such as 600s"):
        bench_model(model, str(tmp_path / "plan.json"), ["metaschedule"])


@pytest.mark.parametrize("text", ["[]", "{}", "no json", '{"budget_s": "much", "seconds": 1}'])
def test_a_folder_with_something_else(tmp_path: Path, text: str) -> None:
    (tmp_path / "peer.json").write_text(text)
    with pytest.raises(LayoutSearchError, match=r"peer\.json cannot be read; name another --metaschedule-db"):
        build_peer(job(tmp_path, two_in_three_out()), 2, MetaScheduleOptions(1.0, tmp_path), tmp_path)


def test_a_database_of_another_model(tmp_path: Path) -> None:
    about = {"model": "abc", "target": {}, "threads": 2, "tvm": tvm.__version__, "budget_s": 9.0, "seconds": 9.0}
    (tmp_path / "peer.json").write_text(json.dumps(about))
    with pytest.raises(LayoutSearchError, match="was tuned for model 'abc', this is '"):
        build_peer(job(tmp_path, two_in_three_out()), 2, MetaScheduleOptions(None, tmp_path), tmp_path)


def test_each_model_of_a_suite_has_a_folder_of_its_own(tmp_path: Path) -> None:
    assert MetaScheduleOptions(9.0, tmp_path).for_model("unet").database == tmp_path / "unet"
    assert MetaScheduleOptions(9.0).for_model("unet") == MetaScheduleOptions(9.0)
