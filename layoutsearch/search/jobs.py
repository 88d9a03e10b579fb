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
from layoutsearch.layout import kinds
from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.declare import is_external
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.scopes import GLOBAL
from layoutsearch.materialize.codegen import function_types, generated, inlined
from layoutsearch.materialize.convert import materialize
from layoutsearch.materialize.library import link_input
from layoutsearch.materialize.lower import lower
from layoutsearch.materialize.moves import move
from layoutsearch.materialize.scopes import kernel_in_scopes
from layoutsearch.materialize.writer import FunctionWriter
from layoutsearch.measure import vector_work
from layoutsearch.measure.marks import MARK
from layoutsearch.measure.records import canonical_json
from layoutsearch.model.load import LoadedModel, load
from layoutsearch.plan.apply import target_of
from layoutsearch.plan.compile import apply_to, build_executable, compile, load_for
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.plan.steps import PlanStep, plan_steps
from layoutsearch.schedule import BUILD_CONFIG, dispatch, opencl
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.value import Schedule
from layoutsearch.toolchain import export

KERNELS = "layoutsearch.search.jobs:build_kernels"
TRANSFORM = "layoutsearch.search.jobs:build_transform"
PLAN = "layoutsearch.search.jobs:build_plan"
MARKED = "layoutsearch.search.jobs:build_marked"
STEPS = "layoutsearch.search.jobs:build_steps"
REFERENCE = "layoutsearch.search.jobs:build_reference"
STOCK = "layoutsearch.search.jobs:build_stock"

ArgSpec = tuple[tuple[int, ...], str] | tuple[tuple[int, ...], str, str]
"""Shape, element type and, where it is no buffer, memory scope."""


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
    choice = Candidate.parse(job.candidate) if job.candidate else None
    if choice is not None:
        assignment = {f"t{i}": choice if i == 0 else choice.follower for i in range(job.members)}
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
                func = functions[kernel.function]
                if choice is not None and choice.has_textures:
                    return kernel_in_scopes(func, lowered, module, choice)
                return func
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
    external = external_function(job)
    if external is not None:
        return _build_external(job, external, target, info)
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
        extra = link_input(tvm.IRModule(functions), target)
        export(compiled(functions, target, info), job.output, target, extra)
    args = _arguments(func)
    return BuiltKernels(job.output, tuple(schedules), args, tuple(failed), not job.only and len(fresh) <= job.count)


def external_function(job: KernelJob) -> relax.Function | None:
    """The external function of a job in the candidate's layouts, if it is about one."""
    module = tvm.ir.load_json(job.module_json)
    graph = build_graph(module, dict(job.axes))
    if graph.ops[0].op != kinds.EXTERN_CALL:
        return None
    if job.candidate:
        module = materialize(module, graph, {"t0": Candidate.parse(job.candidate)}).module
    return next(f for _, f in module.functions_items() if is_external(f))


def _build_external(
    job: KernelJob, function: relax.Function, target: tvm.target.Target, info: TargetInfo
) -> BuiltKernels:
    """A library with the function as its code generator makes it."""
    schedule, name = _key(dispatch.LIBRARY), function_name(0)
    args = [(tuple(int(s) for s in ty.shape.values), str(ty.dtype)) for ty in function_types(function)]
    if schedule in job.known and not job.only:
        return BuiltKernels(job.output, (), tuple(args), (), True)
    with target:
        made = generated(function.with_attr("global_symbol", name))
    executable = compiled({}, target, info)
    for one in made:
        executable.mod.import_module(one)
    export(executable, job.output, target, link_input(tvm.IRModule({name: function}), target))
    return BuiltKernels(job.output, (schedule,), tuple(args), (), True)


def compiled(functions: dict[str, tirx.PrimFunc], target: tvm.target.Target, info: TargetInfo) -> Any:
    """A library of scheduled kernels by symbol, with the work that goes before each when it is timed."""
    with tvm.transform.PassContext(config=BUILD_CONFIG):
        if target.kind.name == "opencl":
            return tvm.compile(tvm.IRModule(functions), target, tir_pipeline=opencl.PIPELINE)
        return tvm.compile(tvm.IRModule({**functions, vector_work.SYMBOL: vector_work.build(info)}), target)


def _arguments(func: tirx.PrimFunc) -> tuple[ArgSpec, ...]:
    found: list[ArgSpec] = []
    for param in func.params:
        spec = tuple(int(s) for s in param.ty.shape), str(param.ty.dtype)
        scope = str(param.scope())
        found.append(spec if scope == GLOBAL else (*spec, scope))
    return tuple(found)


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
    export(compiled({name: scheduled}, target, info), job.output, target)
    args = _arguments(func)
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
        plain, marked: paths of the libraries; what was not wanted has none.
        steps: the kernels in order; None where they are not called in one sequence, and nothing was built.
    """

    plain: str
    marked: str
    steps: tuple[PlanStep, ...] | None


def build_marked(job: PlanJob) -> BuiltMarked:
    """Compile the model with the plan twice: as a production compile does, and with marks between kernels."""
    return _built_marked(job, job.output, f"{job.output}.marked.so")


def build_steps(job: PlanJob) -> BuiltMarked:
    """Compile the model with the plan and with marks between kernels, and not as a production compile does."""
    return _built_marked(job, "", job.output)


def _built_marked(job: PlanJob, plain: str, marked: str) -> BuiltMarked:
    plan = LayoutPlan.from_json(job.plan)
    applied = apply_to(load_for(loaded_for(job), plan), plan)
    built = BuiltMarked(plain, marked, plan_steps(applied))
    if built.steps is not None:
        target = target_of(plan)
        for path, marker in ((plain, ""), (marked, MARK)):
            if path:
                executable = build_executable(applied.module, target, marker, applied.proven)
                export(executable, path, target, link_input(applied.module, target))
    return built


def build_reference(job: PlanJob) -> str:
    """Build the untouched module with TVM's own operators and pipeline, to compare outputs with.

    Only loops are ours: parallel and vectorised in the order they are in, where TVM would leave them scalar, and a
    large model would take minutes.
    """
    loaded = loaded_for(job)
    target = tvm.target.Target(job.plan["target"])
    with target:
        legal = relax.transform.LegalizeOps()(inlined(loaded.module))
    info = TargetInfo.from_target(target, int(job.plan["device"]["threads"]))
    functions = {g: _plain_loops(f, info) if isinstance(f, tirx.PrimFunc) else f for g, f in legal.functions_items()}
    module = tvm.IRModule(functions, attrs=legal.attrs)
    executable = build_executable(module, target) if info.isa == "opencl" else tvm.compile(module, target)
    export(executable, job.output, target)
    return job.output


def build_stock(job: PlanJob) -> str:
    """Build the untouched module as `tvm.compile` does, with nothing of ours, to compare speed with."""
    loaded = loaded_for(job)
    target = tvm.target.Target(job.plan["target"])
    export(tvm.compile(loaded.module, target), job.output, target)
    return job.output


def _plain_loops(func: tirx.PrimFunc, info: TargetInfo) -> tirx.PrimFunc:
    """The function with its loops parallel and vectorised, or as it is where they have no such form.

    For GPUs, its loops on work items: without, it would not build.
    """
    if info.isa == "opencl":
        return dispatch.apply(func, dispatch.default(func, info), info)
    try:
        return dispatch.apply(func, dispatch.LOOPS, info)
    except LayoutSearchError:
        return func


def file_stamp(path: str) -> str:
    """Changes when the file does."""
    status = os.stat(path)
    return f"{status.st_mtime_ns}-{status.st_size}"
