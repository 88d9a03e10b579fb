"""Applying a plan: deterministic, without search or measurement, or an error that names what differs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from layoutsearch.errors import InfeasibleError, LayoutSearchError, MaterializeError, ModelError, PlanError
from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.rules import initial_assignment, why_illegal
from layoutsearch.materialize.codegen import run_codegen
from layoutsearch.materialize.convert import Materialized, materialize
from layoutsearch.materialize.lower import Lowered, lower
from layoutsearch.materialize.scopes import put_in_scopes
from layoutsearch.materialize.verify_scopes import verify_scopes
from layoutsearch.model.canonicalize import canonicalize
from layoutsearch.model.fingerprint import fingerprint
from layoutsearch.plan.border import border_of
from layoutsearch.plan.expected import Expectation, expect, joined
from layoutsearch.plan.opencl import gpu_passes
from layoutsearch.plan.pairs import Join, join_pairs
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.plan.prove import prove_final, prove_lowered, prove_scheduled
from layoutsearch.plan.sequence import sequence_kernels
from layoutsearch.plan.vm import vm_passes
from layoutsearch.schedule.audit import audit
from layoutsearch.schedule.dispatch import apply as apply_schedule
from layoutsearch.schedule.dispatch import default as default_schedule
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.value import Schedule, ScheduleError
from layoutsearch.targets import check_textures, has_feature

# A pass is called through C++, which gives back an exception of its own unless it knows the class.
for _error in (LayoutSearchError, ModelError, PlanError, MaterializeError, InfeasibleError, ScheduleError):
    tvm_ffi.register_error(_error.__name__, _error)


@dataclass(frozen=True)
class Applied:
    """What a plan makes of a module.

    Attributes:
        module: `main` in the plan's layouts, every kernel scheduled TIR.
        materialized: the Relax module in the plan's layouts, verified.
        lowered: its kernels before scheduling; those that were two are scheduled already.
        slow_loops: loop nests of scheduled kernels that are neither parallel nor vectorised, by kernel; empty is right.
        graph: of the canonical module.
        assignment: the plan's choices by bound variable of the canonical module.
        proven: what `module` does, call by call, checked against the plan; see `plan.prove`.
        joins: the kernels that were two.
    """

    module: tvm.IRModule
    materialized: Materialized
    lowered: Lowered
    slow_loops: Mapping[str, list[str]]
    graph: LayoutGraph
    assignment: Mapping[str, Candidate]
    proven: Expectation
    joins: tuple[Join, ...] = ()


def target_of(plan: LayoutPlan) -> tvm.target.Target:
    """The TVM target a plan was tuned for."""
    return tvm.target.Target(dict(plan.target))


def target_json(target: tvm.target.Target) -> dict[str, Any]:
    """A target as plain data, empty fields left out, as plans carry it."""
    data = json.loads(str(target)) if str(target).startswith("{") else {"kind": target.kind.name}
    return {k: v for k, v in data.items() if v not in ("", [], None)}


def check_target(plan: LayoutPlan, target: tvm.target.Target) -> None:
    """Raise PlanError unless `target` is the plan's."""
    have, want = target_json(target), target_json(target_of(plan))
    for key in sorted(set(have) | set(want)):
        if have.get(key) != want.get(key):
            raise PlanError(
                f"the plan was tuned for target {key}={want.get(key)!r}, this compile has {have.get(key)!r}; "
                "compile for the plan's target or tune for this one"
            )


def assignment_of(plan: LayoutPlan, canonical: tvm.IRModule, graph: LayoutGraph) -> dict[str, Candidate]:
    """The plan's choices by bound variable of this canonical module.

    Raises:
        PlanError: the plan belongs to another model; the message names the first operator that differs.
    """
    by_id = {op.id: op for op in graph.ops}
    if not plan.ops and not graph.anchors:
        return initial_assignment(graph)
    wanted = {op.id: op for op in plan.ops if op.choice is not None}
    free = {op.id for op in graph.ops if op.role is not Role.FROZEN}
    for op in graph.ops:
        if op.id in free and op.id not in wanted:
            raise PlanError(f"the model has op {op.id}, which the plan does not know: the model changed; tune again")
    for op_id in wanted:
        if op_id not in by_id:
            raise PlanError(f"the plan has op {op_id}, which the model does not: the model changed; tune again")
    found = {}
    for op_id, entry in wanted.items():
        node = by_id[op_id]
        assert entry.choice is not None
        reason = why_illegal(node, entry.choice)
        if reason is not None:
            raise PlanError(f"op {op_id} cannot be {entry.choice}: {reason}; restore the plan or tune again")
        found[node.name] = entry.choice
    have = fingerprint(canonical)
    if have != plan.fingerprint:
        raise PlanError(
            f"the plan is for model fingerprint {plan.fingerprint[:12]}, this model has {have[:12]}: "
            "same operators, connected or shaped differently; tune again"
        )
    return found


def apply_plan(module: tvm.IRModule, plan: LayoutPlan, target: tvm.target.Target | None = None) -> Applied:
    """Bring an imported (or canonical) Relax `module` into the plan's layouts and schedules.

    `main` takes its inputs and gives its outputs in the layouts that the plan has for them.

    Raises:
        PlanError: the plan belongs to another model or target.
        MaterializeError: the converted module is not what the plan says.
    """
    if target is None:
        target = target_of(plan)
    else:
        check_target(plan, target)
    canonical = canonicalize(module)
    graph = build_graph(canonical)
    assignment = assignment_of(plan, canonical, graph)
    border = border_of(plan, graph)
    materialized = materialize(canonical, graph, assignment, border)
    ids = {op.name: op.id for op in graph.ops}
    _check_transforms(plan, materialized, ids)
    info = TargetInfo.from_target(target, plan.threads)
    lowered = lower(materialized.module, target)
    check_textures("the plan", assignment.values(), target)
    if has_feature(target, "texture"):
        lowered = put_in_scopes(lowered, materialized.module, graph, assignment, target)
        verify_scopes(lowered, graph, assignment)
    expectation = expect(materialized, lowered.kernels, graph, assignment, border)
    prove_lowered(lowered.module, expectation)
    if plan.fusions and info.isa == "opencl":
        raise PlanError(f"the plan joins op {plan.fusions[0].first} with another, which only CPUs do; tune again")
    lowered, joins = join_pairs(lowered, plan.fusions, graph, info)
    expectation = joined(expectation, joins)
    schedules = {by.name: op.schedule for op in plan.ops if op.schedule for by in graph.ops if by.id == op.id}
    scheduled, slow = schedule_kernels(lowered, schedules, info, ids)
    proven = prove_scheduled(scheduled, expectation)
    return Applied(scheduled, materialized, lowered, slow, graph, assignment, proven, joins)


def _check_transforms(plan: LayoutPlan, materialized: Materialized, ids: Mapping[str, str]) -> None:
    """Raise MaterializeError unless the transforms are those that the plan lists."""
    listed = Counter((t.tensor, t.source, t.target) for t in plan.transforms)
    needed = Counter((tensor_id(t.tensor, ids), str(t.source), str(t.target)) for t in materialized.transforms)
    for key, count in (needed - listed).items():
        lists = "lists fewer" if listed[key] else "lists none"
        times = "" if count == 1 else f"{count} times "
        raise MaterializeError(f"a transform of {key[0]} from {key[1]} to {key[2]} is {times}needed, the plan {lists}")
    for key in listed - needed:
        raise MaterializeError(f"the plan lists a transform of {key[0]} from {key[1]} to {key[2]}, which nothing needs")


def tensor_id(tensor: str, ids: Mapping[str, str]) -> str:
    """A tensor's name in plans: the id of its operator (with the field of a tuple), or the model input."""
    name, _, index = tensor.rpartition(".")
    if tensor in ids:
        return ids[tensor]
    return f"{ids[name]}.{index}" if name in ids else tensor


def schedule_kernels(
    lowered: Lowered, schedules: Mapping[str, Schedule], target: TargetInfo, ids: Mapping[str, str] | None = None
) -> tuple[tvm.IRModule, dict[str, list[str]]]:
    """Schedule every kernel that is not yet: as `schedules` say for the bound variable of its root, else by default.

    Raises:
        PlanError: equal kernels with different schedules.
        ScheduleError: a schedule does not fit its kernel; the message names the operator as `ids` do.
    """
    chosen: dict[str, Schedule] = {}
    for kernel in lowered.kernels:
        found = {schedules[group[0]] for group in kernel.groups if group[0] in schedules}
        if len(found) > 1:
            raise PlanError(f"ops of the same kernel {kernel.function} have different schedules; tune again")
        if found:
            chosen[kernel.function] = found.pop()
    functions, slow = {}, {}
    roots = {kernel.function: kernel.groups[0][0] for kernel in lowered.kernels}
    for gv, function in lowered.module.functions_items():
        if isinstance(function, tirx.PrimFunc):
            root = roots.get(gv.name_hint, gv.name_hint)
            try:
                if gv.name_hint not in lowered.scheduled:
                    schedule = chosen.get(gv.name_hint) or default_schedule(function, target)
                    function = apply_schedule(function, schedule, target)
            except ScheduleError as error:
                raise ScheduleError(f"op {(ids or {}).get(root, root)}: {error}") from None
            reports = [] if target.isa == "opencl" else audit(function)
            if reports:
                slow[gv.name_hint] = reports
        functions[gv] = function
    module = lowered.module
    return tvm.IRModule(functions, attrs=module.attrs, global_infos=dict(module.global_infos)), slow


def _proof(proven: Expectation) -> tvm.transform.Pass:
    @tvm.transform.module_pass(opt_level=0, name="layoutsearch.ProveLayouts")
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        prove_final(module, proven)
        return module

    return run


def _sequence(marker: str) -> tvm.transform.Pass:
    @tvm.transform.module_pass(opt_level=0, name="layoutsearch.SequenceKernels")
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return sequence_kernels(module, marker)

    return run


def _codegen() -> tvm.transform.Pass:
    @tvm.transform.module_pass(opt_level=0, name="layoutsearch.RunCodegen")
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return run_codegen(module)

    return run


def _passes_for(
    target: tvm.target.Target | None, marker: str = "", proven: Expectation | None = None
) -> list[tvm.transform.Pass]:
    """What is left to do for scheduled kernels, and the proof at the very end."""
    is_gpu = target is not None and target.kind.name == "opencl"
    passes = gpu_passes() if is_gpu else [_codegen(), _sequence(marker), *vm_passes()]
    return passes if proven is None else [*passes, _proof(proven)]


def ApplyPlan(plan: LayoutPlan) -> tvm.transform.Pass:
    """A TVM module pass: the imported Relax module in, scheduled kernels in the plan's layouts out.

    The target is the current `tvm.target.Target` if there is one (it must be the plan's), else the plan's.
    """

    @tvm.transform.module_pass(opt_level=0, name="layoutsearch.ApplyPlan")
    def apply(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return apply_plan(module, plan, tvm.target.Target.current(allow_none=True)).module

    return apply


def vm_pipeline(
    marker: str = "", target: tvm.target.Target | None = None, proven: Expectation | None = None
) -> tvm.transform.Pass:
    """The rest of the compilation, for a module that is already scheduled; see `sequence_kernels` for `marker`.

    `target` is a CPU where it is None. With what is `proven` of the module, that is still so at the end, or
    MaterializeError is raised.
    """

    @tvm.transform.module_pass(opt_level=0, name="layoutsearch.vm_pipeline")
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return tvm.transform.Sequential(_passes_for(target, marker, proven))(module)

    return run


def pipeline(plan: LayoutPlan) -> tvm.transform.Pass:
    """A `relax_pipeline`, as in `tvm.compile(module, target, relax_pipeline=layoutsearch.pipeline(plan))`.

    For an OpenCL target give `tir_pipeline="layoutsearch.opencl"` as well.
    """

    @tvm.transform.module_pass(opt_level=0, name="layoutsearch.pipeline")
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        applied = apply_plan(module, plan, tvm.target.Target.current(allow_none=True))
        return tvm.transform.Sequential(_passes_for(target_of(plan), proven=applied.proven))(applied.module)

    return run
