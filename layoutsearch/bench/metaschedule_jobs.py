"""MetaSchedule on a whole model, as a user of TVM runs it: what runs in build workers, since it may crash or hang.

The flow is that of Relax's own tuning pipeline for fixed shapes with prepacked weights: fuse, tune every kernel with
the gradient task scheduler, apply the database, fold the weights' new layouts. Only the end differs: TVM's scheduler
counts trials and looks at no clock, so the worker is killed when its time is over, and what was measured until then is
in the database. And TVM's own builder would spend most of that time on starting processes, which import TVM's tensor
intrinsics for ten seconds before each round: builds go to warm workers.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import relax
from tvm.driver import build as build_module
from tvm.ir.utils import derived_object
from tvm.relax.backend.cpu_generic import pipeline as cpu_pipeline
from tvm.relax.pipeline import zero_pipeline
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.analysis import estimate_tir_flops
from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

from layoutsearch.measure.builder import Builder
from layoutsearch.search.jobs import PlanJob, loaded_for
from layoutsearch.toolchain import export

LOAD = "layoutsearch.bench.metaschedule_jobs:load"
TUNE = "layoutsearch.bench.metaschedule_jobs:tune"
BUILD = "layoutsearch.bench.metaschedule_jobs:build"
_KERNEL = "layoutsearch.bench.metaschedule_jobs:build_kernel"

_TRIALS = 1 << 30
_AT_ONCE = (8, 64)
"""Trials of a task before another may have its turn; the larger is TVM's own default."""
_POPULATION = 8
"""Candidates that the search holds for each of those trials, as by TVM's defaults: 512, which take ten seconds."""
_KERNEL_S = 30.0
"""Limit of one build, TVM's own default."""


@dataclass(frozen=True)
class PeerJob:
    """One model and its tuning database.

    Attributes:
        model: what to tune and build; of its plan only the target is used.
        threads: of the kernels.
        folder: of the database.
        scratch: folder for what is built meanwhile.
        budget_s: time there is for tuning, to choose how many trials a task gets at once.
        strategy: of MetaSchedule's search, as TVM names it.
        seed: of the search.
    """

    model: PlanJob
    threads: int
    folder: str
    scratch: str
    budget_s: float = 0.0
    strategy: str = "evolutionary"
    seed: int = 0


@dataclass(frozen=True)
class Tuned:
    """What the database knows of a model.

    Attributes:
        tasks: different kernels.
        tuned: those that have a schedule.
        trials: schedules measured, failures included.
    """

    tasks: int
    tuned: int
    trials: int


def load(job: PeerJob) -> None:
    """Import the model and what MetaSchedule needs, so that the worker has them when the clock starts."""
    if job.budget_s:
        _import_intrinsics()
    loaded_for(job.model)


def tune(job: PeerJob) -> None:
    """Tune until nothing is left to try, or until killed. What is in the database already is started from."""
    # For TVM's runner: a child of this process.
    os.environ["TVM_NUM_THREADS"] = str(job.threads)
    target = _target(job)
    # Most operations first: the time may be over before the scheduler has been through all tasks once.
    tasks = sorted(
        ms.relax_integration.extract_tasks(_fused(job, target), target),
        key=lambda task: -float(estimate_tir_flops(task.mod)) * int(task.weight),
    )
    # At about a second each, the first round over all tasks is to fit the time where it can.
    at_once = min(_AT_ONCE[1], max(_AT_ONCE[0], int(job.budget_s / max(1, len(tasks)))))
    strategy = job.strategy
    if strategy == "evolutionary":
        size = _POPULATION * at_once
        strategy = ms.search_strategy.EvolutionarySearch(population_size=size, init_min_unmeasured=size // 10)
    contexts, weights = ms.relax_integration.extracted_tasks_to_tune_contexts(
        tasks, job.folder, strategy=strategy, seed=job.seed, num_threads=job.threads
    )
    scheduler = ms.task_scheduler.GradientBased(seed=job.seed)
    with Builder(workers=job.threads, timeout_s=_KERNEL_S, preload=(__name__,)) as builder:
        ms.tune.tune_tasks(
            tasks=contexts,
            task_weights=weights,
            work_dir=job.folder,
            max_trials_global=_TRIALS,
            num_trials_per_iter=at_once,
            builder=_WarmBuilder(builder, job.scratch),
            runner=_KeepingRunner(scheduler),
            cost_model=ms.cost_model.XGBModel(num_tuning_cores=job.threads),
            measure_callbacks=[ms.measure_callback.RemoveBuildArtifact(), ms.measure_callback.UpdateCostModel()],
            task_scheduler=scheduler,
        )


@dataclass(frozen=True)
class _KernelJob:
    module_json: str
    target_json: str
    scratch: str


def build_kernel(job: _KernelJob) -> str:
    """Build one scheduled kernel as TVM's builder does; path of the library, alone in its folder."""
    target = tvm.target.Target(job.target_json)
    module = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(tvm.ir.load_json(job.module_json))
    path = str(Path(tempfile.mkdtemp(dir=job.scratch), "kernel.so"))
    export(build_module(module, target=target), path, target)
    return path


def build(job: PeerJob) -> Tuned:
    """Build the model with the fastest schedules of the database; kernels without one are as TVM leaves them."""
    target = _target(job)
    module = _fused(job, target)
    database = ms.database.JSONDatabase(work_dir=job.folder)
    if any(i.kind.name == "Tensorize" for record in database.get_all_tuning_records() for i in record.trace.insts):
        _import_intrinsics()
    tasks = ms.relax_integration.extract_tasks(module, target)
    tuned = sum(_has_schedule(database, task.mod) for task in tasks)
    with target, database:
        passes = [
            relax.transform.MetaScheduleApplyDatabase(),
            relax.transform.SplitLayoutRewritePreproc(),
            relax.transform.FoldConstant(),
            # Not TVM's default pipeline as a whole: it would fuse what is scheduled once more.
            *cpu_pipeline.dataflow_lower_passes(target),
            *cpu_pipeline.finalize_passes(target),
        ]
        executable = tvm.compile(module, target, relax_pipeline=tvm.transform.Sequential(passes))
    export(executable, job.model.output, target)
    return Tuned(len(tasks), tuned, len(database))


def _import_intrinsics() -> None:
    """Registers what traces of quantised kernels use; ten seconds of parsing."""
    import tvm.s_tir.tensor_intrin  # noqa: F401


def repair(folder: Path) -> None:
    """Take off a last line that was half written when the worker was killed: TVM would not read the files again."""
    for name in ("database_workload.json", "database_tuning_record.json"):
        path = folder / name
        if path.is_file():
            whole, end, torn = path.read_bytes().rpartition(b"\n")
            if torn:
                path.write_bytes(whole + end)


def _target(job: PeerJob) -> tvm.target.Target:
    """MetaSchedule cuts parallel loops for the cores that the target names."""
    return tvm.target.Target({**job.model.plan["target"], "num-cores": job.threads})


def _fused(job: PeerJob, target: tvm.target.Target) -> tvm.IRModule:
    """The untouched model as fused kernels, the layouts of its weights free."""
    passes = [
        *cpu_pipeline.library_dispatch_passes(target),
        relax.transform.DecomposeOpsForInference(),
        relax.transform.CanonicalizeBindings(),
        zero_pipeline(),
        relax.transform.AttachAttrLayoutFreeBuffers(),
    ]
    with target:
        return tvm.transform.Sequential(passes)(loaded_for(job.model).module)


def _has_schedule(database: Any, module: tvm.IRModule) -> bool:
    return database.has_workload(module) and bool(len(database.get_top_k(database.commit_workload(module), 1)))


@derived_object
class _WarmBuilder(ms.builder.PyBuilder):
    """TVM's builder, in workers that stay."""

    def __init__(self, builder: Builder, scratch: str) -> None:
        super().__init__()
        self._builder, self._scratch = builder, scratch

    def build(self, build_inputs: Sequence[Any]) -> Sequence[Any]:
        """A path or an error for each."""
        jobs = [_KernelJob(tvm.ir.save_json(i.mod), str(i.target), self._scratch) for i in build_inputs]
        results = [future.result() for future in [self._builder.submit(_KERNEL, job) for job in jobs]]
        return [ms.builder.BuilderResult(r.value, None if r.ok else f"{r.status.value}: {r.error}") for r in results]


@derived_object
class _KeepingRunner(ms.runner.PyRunner):
    """TVM's local runner; every result is in the database at once, where TVM would keep a round of them in memory."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._inner = ms.runner.LocalRunner()
        self._keep = ms.measure_callback.AddToDatabase()

    def run(self, runner_inputs: Sequence[Any]) -> Sequence[Any]:
        """Futures that are done, for what was built of the task at hand."""
        number, task = next(
            (i, t)
            for i, t in enumerate(self._scheduler.tasks_)
            if t.builder_results is not None and t.runner_futures is None
        )
        inputs, futures = iter(runner_inputs), []
        for candidate, built in zip(task.measure_candidates, task.builder_results, strict=True):
            result = ms.runner.RunnerResult(None, built.error_msg)
            if built.error_msg is None:
                futures += self._inner.run([next(inputs)])
                result = futures[-1].result()
            self._keep.apply(self._scheduler, number, [candidate], [built], [result])
        return futures
