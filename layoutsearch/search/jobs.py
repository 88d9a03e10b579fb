"""What runs in build workers: everything that may crash, from lowering to linking.

Payloads and results are plain data, since they cross a process boundary.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import tvm
from tvm import relax, tirx

from layoutsearch.errors import LayoutSearchError
from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.layout import Layout
from layoutsearch.materialize.convert import materialize
from layoutsearch.materialize.lower import lower
from layoutsearch.materialize.moves import move
from layoutsearch.materialize.writer import FunctionWriter
from layoutsearch.measure import vector_work
from layoutsearch.measure.marks import MARK
from layoutsearch.measure.records import canonical_json
from layoutsearch.model.load import LoadedModel, load
from layoutsearch.plan.apply import target_of
from layoutsearch.plan.compile import apply_to, build_executable, compile, load_for
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.plan.steps import PlanStep, plan_steps
from layoutsearch.schedule import BUILD_CONFIG, dispatch
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.value import Schedule
from layoutsearch.toolchain import export

KERNELS = "layoutsearch.search.jobs:build_kernels"
TRANSFORM = "layoutsearch.search.jobs:build_transform"
PLAN = "layoutsearch.search.jobs:build_plan"
MARKED = "layoutsearch.search.jobs:build_marked"
REFERENCE = "layoutsearch.search.jobs:build_reference"
STOCK = "layoutsearch.search.jobs:build_stock"

ArgSpec = tuple[tuple[int, ...], str]


@dataclass(frozen=True)
class KernelJob:
    """Build schedules of one candidate of one workload into one library.

    Attributes:
        module_json: the workload alone.
        axes: axis names of its parameters.
        members: number of its operators.
        candidate: as text; empty for a frozen kernel.
        target: TVM target as plain data.
        threads: threads the kernel will run on.
        known: schedules (JSON) that need not be built.
        count: at most so many.
        only: build exactly these schedules again, instead of new ones.
        output: path of the library.
    """

    module_json: str
    axes: tuple[tuple[str, str], ...]
    members: int
    candidate: str
    target: dict[str, Any]
    threads: int
    known: tuple[str, ...]
    count: int
    output: str
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class TransformJob:
    """Build one layout transform."""

    shape: tuple[int, ...]
    axes: str
    dtype: str
    source: str
    wanted: str
    target: dict[str, Any]
    threads: int
    output: str


@dataclass(frozen=True)
class BuiltKernels:
    """A library of kernels: function i has schedule i (canonical JSON). All take the same arguments, output last.

    Attributes:
        failed: schedules that did not build, with one line each.
        exhausted: whether the template has no further schedule.
    """

    output: str
    schedules: tuple[str, ...]
    args: tuple[ArgSpec, ...]
    failed: tuple[tuple[str, str], ...]
    exhausted: bool


def function_name(index: int) -> str:
    """Symbol of schedule `index` in a library."""
    return f"kernel_{index}"


def lowered_kernel(job: KernelJob) -> tirx.PrimFunc:
    """The fused kernel of a job, unscheduled.

    Raises:
        LayoutSearchError: the workload is not one kernel in this candidate.
    """
    module = tvm.ir.load_json(job.module_json)
    graph = build_graph(module, dict(job.axes))
    if job.candidate:
        choice = Candidate.parse(job.candidate)
        assignment = {f"t{i}": choice if i == 0 else Candidate.uniform(choice.out) for i in range(job.members)}
        module = materialize(module, graph, assignment).module
    else:
        free = [op.name for op in graph.ops if op.role is not Role.FROZEN]
        if free:
            raise LayoutSearchError(f"kernel of {free} needs a candidate")
    lowered = lower(module, tvm.target.Target(job.target))
    functions = {g.name_hint: f for g, f in lowered.module.functions_items()}
    for kernel in lowered.kernels:
        for group in kernel.groups:
            if group[0] == "t0":
                if len(group) != job.members:
                    raise LayoutSearchError(f"the kernel fused {len(group)} operators, expected {job.members}")
                return functions[kernel.function]
    prims = [f for f in functions.values() if isinstance(f, tirx.PrimFunc)]
    if len(prims) == 1:
        return prims[0]
    raise LayoutSearchError("the kernel was lost in lowering")


def _key(schedule: Schedule) -> str:
    return canonical_json(schedule.to_json())


def build_kernels(job: KernelJob) -> BuiltKernels:
    """Lower a workload in a candidate's layouts and build the next schedules of it."""
    target = tvm.target.Target(job.target)
    info = TargetInfo.from_target(target, job.threads)
    func = lowered_kernel(job)
    if job.only:
        fresh = [Schedule.from_json(json.loads(text)) for text in job.only]
    else:
        fresh = [s for s in dispatch.candidates(func, info) if _key(s) not in set(job.known)]
    functions: dict[str, tirx.PrimFunc] = {}
    schedules: list[str] = []
    failed: list[tuple[str, str]] = []
    for schedule in fresh[: len(job.only) or job.count]:
        try:
            scheduled = dispatch.apply(func, schedule, info)
        except LayoutSearchError as error:
            failed.append((_key(schedule), str(error)))
            continue
        name = function_name(len(schedules))
        functions[name] = scheduled.with_attr("global_symbol", name)
        schedules.append(_key(schedule))
    if functions:
        export(_compiled(functions, target, info), job.output, target)
    args = tuple((tuple(int(s) for s in p.ty.shape), str(p.ty.dtype)) for p in func.params)
    return BuiltKernels(job.output, tuple(schedules), args, tuple(failed), not job.only and len(fresh) <= job.count)


def _compiled(functions: dict[str, tirx.PrimFunc], target: tvm.target.Target, info: TargetInfo) -> Any:
    with tvm.transform.PassContext(config=BUILD_CONFIG):
        return tvm.compile(tvm.IRModule({**functions, vector_work.SYMBOL: vector_work.build(info)}), target)


def build_transform(job: TransformJob) -> BuiltKernels:
    """Build a layout transform of one tensor, as the compiled model runs it."""
    target = tvm.target.Target(job.target)
    info = TargetInfo.from_target(target, job.threads)
    source, wanted = Layout(job.source), Layout(job.wanted)
    param = relax.Var("x", relax.TensorType(source.physical_shape(job.shape, job.axes), job.dtype))
    writer = FunctionWriter()
    result = writer.bind("moved", move(param, source, wanted))
    out = writer.bind("out", result, output=True)
    writer.end_block(dataflow=True)
    function = writer.function([param], out).with_attr("global_symbol", "main")
    lowered = lower(tvm.IRModule({tvm.ir.GlobalVar("main"): function}), target)
    func = next(f for _, f in lowered.module.functions_items() if isinstance(f, tirx.PrimFunc))
    schedule = dispatch.default(func, info)
    name = function_name(0)
    scheduled = dispatch.apply(func, schedule, info).with_attr("global_symbol", name)
    export(_compiled({name: scheduled}, target, info), job.output, target)
    args = tuple((tuple(int(s) for s in p.ty.shape), str(p.ty.dtype)) for p in func.params)
    return BuiltKernels(job.output, (_key(schedule),), args, (), True)


@dataclass(frozen=True)
class PlanJob:
    """Compile a model with a plan; `model` is a path or a module's JSON, `stamp` tells two contents apart."""

    model: str
    is_json: bool
    stamp: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    plan: dict[str, Any]
    output: str


@lru_cache(maxsize=1)
def _loaded(model: str, is_json: bool, stamp: str, shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> Any:
    if is_json:
        with open(model, encoding="utf-8") as file:
            return load(tvm.ir.load_json(file.read()))
    return load(model, dict(shapes) or None)


def loaded_for(job: PlanJob) -> LoadedModel:
    """The model of a job, as it was imported."""
    return _loaded(job.model, job.is_json, job.stamp, job.shapes)


def build_plan(job: PlanJob) -> str:
    """Compile the model with the plan, exactly as a production compile does."""
    plan = LayoutPlan.from_json(job.plan)
    loaded = load_for(loaded_for(job), plan)
    compile(loaded, plan, output=job.output)
    return job.output


@dataclass(frozen=True)
class BuiltMarked:
    """A plan built as it ships and with marks between its kernels.

    Attributes:
        plain, marked: paths of the libraries.
        steps: the kernels in order; None where they are not called in one sequence, and nothing was built.
    """

    plain: str
    marked: str
    steps: tuple[PlanStep, ...] | None


def build_marked(job: PlanJob) -> BuiltMarked:
    """Compile the model with the plan twice: as a production compile does, and with marks between kernels."""
    plan = LayoutPlan.from_json(job.plan)
    applied = apply_to(load_for(_loaded(job.model, job.is_json, job.stamp, job.shapes), plan), plan)
    built = BuiltMarked(job.output, f"{job.output}.marked.so", plan_steps(applied))
    if built.steps is not None:
        target = target_of(plan)
        for path, marker in ((built.plain, ""), (built.marked, MARK)):
            export(build_executable(applied.module, target, marker, applied.proven), path, target)
    return built


def build_reference(job: PlanJob) -> str:
    """Build the untouched module with TVM's own operators and pipeline, to compare outputs with.

    Only loops are ours: parallel and vectorised in the order they are in, where TVM would leave them scalar, and a
    large model would take minutes.
    """
    loaded = loaded_for(job)
    target = tvm.target.Target(job.plan["target"])
    with target:
        legal = relax.transform.LegalizeOps()(loaded.module)
    info = TargetInfo.from_target(target, int(job.plan["device"]["threads"]))
    functions = {g: _plain_loops(f, info) if isinstance(f, tirx.PrimFunc) else f for g, f in legal.functions_items()}
    executable = tvm.compile(tvm.IRModule(functions, attrs=legal.attrs), target)
    export(executable, job.output, target)
    return job.output


def build_stock(job: PlanJob) -> str:
    """Build the untouched module as `tvm.compile` does, with nothing of ours, to compare speed with."""
    loaded = loaded_for(job)
    target = tvm.target.Target(job.plan["target"])
    export(tvm.compile(loaded.module, target), job.output, target)
    return job.output


def _plain_loops(func: tirx.PrimFunc, info: TargetInfo) -> tirx.PrimFunc:
    """The function with its loops parallel and vectorised, or as it is where they have no such form."""
    try:
        return dispatch.apply(func, dispatch.LOOPS, info)
    except LayoutSearchError:
        return func


def file_stamp(path: str) -> str:
    """Changes when the file does."""
    status = os.stat(path)
    return f"{status.st_mtime_ns}-{status.st_size}"
