"""The next schedules of a kernel by MetaSchedule's evolutionary search: what runs in build workers, as it may crash.

A job carries all that was measured of the kernel, so the search starts from there whoever made it and when: a run that
was killed goes on as if it had not been.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import tvm
from tvm import tirx
from tvm.s_tir import meta_schedule as ms

from layoutsearch.errors import LayoutSearchError
from layoutsearch.measure.records import canonical_json
from layoutsearch.schedule import metaschedule
from layoutsearch.schedule.value import Schedule
from layoutsearch.search.jobs import KernelJob, lowered_kernel

PROPOSE = "layoutsearch.search.proposals:propose"

# Twenty times smaller than TVM's, which asks for 64 schedules at once and takes half a minute of search for them.
_POPULATION, _GENERATIONS = 64, 3
# Fewer measured schedules than this teach a cost model nothing.
_LEARN_FROM = 8
_FAILED_S = 1e10


@dataclass(frozen=True)
class ProposalJob:
    """Find further schedules of one candidate of one workload.

    Attributes:
        kernel: what it is; `known` is not tried again.
        measured: schedules (JSON) of MetaSchedule with their times in us, infinite for what failed.
        count: at most so many.
        seed: of the search.
    """

    kernel: KernelJob
    measured: tuple[tuple[str, float], ...]
    count: int
    seed: int = 0


def propose(job: ProposalJob) -> tuple[str, ...]:
    """Schedules (canonical JSON) that were not measured; fewer than asked for where the search finds no more."""
    func = lowered_kernel(job.kernel)
    target = tvm.target.Target({**job.kernel.target, "num-cores": job.kernel.threads})
    # A seed of its own for each job, so that it draws others than the one before.
    context = _context(metaschedule.as_module(func), target, job.seed * 1000 + len(job.measured) + 1)
    spaces = context.generate_design_space()
    measured = [_measured(func, text, us) for text, us in job.measured]
    # The search may come upon what was measured before.
    wanted = job.count + len(measured) + 1
    context.pre_tuning(wanted, wanted, spaces, _database(context, measured), _cost_model(context, measured, job.seed))
    found: dict[str, None] = {}
    for candidate in context.generate_measure_candidates() or ():
        try:
            found.setdefault(canonical_json(metaschedule.from_trace(candidate.sch.trace).to_json()))
        except LayoutSearchError:
            continue
    known = {text for text, _ in job.measured}
    return tuple(text for text in found if text not in known)[: job.count]


def _context(module: tvm.IRModule, target: tvm.target.Target, seed: int) -> Any:
    rules = ms.space_generator.PostOrderApply(sch_rules="llvm", postprocs="llvm", mutator_probs="llvm")
    strategy = ms.search_strategy.EvolutionarySearch(
        population_size=_POPULATION, init_min_unmeasured=_POPULATION // 10, genetic_num_iters=_GENERATIONS
    )
    with _no_tensor_intrinsics():
        return ms.TuneContext(
            mod=module, target=target, space_generator=rules, search_strategy=strategy, rand_state=seed, num_threads=1
        )


@contextmanager
def _no_tensor_intrinsics() -> Iterator[None]:
    """Keeps TVM from importing its tensor intrinsics: parsing them takes ten seconds, and the rules here use none."""
    name = "tvm.s_tir.tensor_intrin"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        del sys.modules[name]


def _measured(func: tirx.PrimFunc, text: str, us: float) -> tuple[Any, float]:
    """TVM's state of a schedule that was measured, and seconds."""
    return metaschedule.replay(func, Schedule.from_json(json.loads(text))), us * 1e-6 if np.isfinite(us) else _FAILED_S


def _arguments(context: Any) -> Any:
    return ms.arg_info.ArgInfo.from_entry_func(context.mod)


def _database(context: Any, measured: Sequence[tuple[Any, float]]) -> Any:
    database = ms.database.MemoryDatabase()
    workload = database.commit_workload(context.mod)
    for state, seconds in measured:
        database.commit_tuning_record(
            ms.database.TuningRecord(state.trace, workload, [seconds], context.target, _arguments(context))
        )
    return database


def _cost_model(context: Any, measured: Sequence[tuple[Any, float]], seed: int) -> Any:
    ran = [(state, seconds) for state, seconds in measured if seconds < _FAILED_S]
    if len(ran) < _LEARN_FROM:
        return ms.cost_model.RandomModel(seed=seed)
    model = ms.cost_model.XGBModel(num_warmup_samples=_LEARN_FROM, num_tuning_cores=1)
    model.update(
        context,
        [ms.search_strategy.MeasureCandidate(state, _arguments(context)) for state, _ in ran],
        [ms.runner.RunnerResult([seconds], None) for _, seconds in ran],
    )
    return model
