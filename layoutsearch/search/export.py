"""Making a plan out of a solution."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tvm

import layoutsearch
from layoutsearch.layout.border import Border
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.layout.io_layouts import KEEP_ALL, BorderRules
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.rules import transforms_of
from layoutsearch.layout.transform import TransformKey
from layoutsearch.measure.device import DeviceIdentity
from layoutsearch.model.load import LoadedModel
from layoutsearch.plan.apply import target_json, tensor_id
from layoutsearch.plan.border import border_entry
from layoutsearch.plan.plan import LayoutPlan, PlanOp, PlanTransform
from layoutsearch.schedule.value import Schedule
from layoutsearch.search.acceptance import Comparison, summarize
from layoutsearch.search.assemble import Program
from layoutsearch.search.known import Knows
from layoutsearch.search.numerics import Errors
from layoutsearch.search.workloads import KernelNode


@dataclass(frozen=True)
class PlanContext:
    """What all plans of a run have in common; `pins` says what pins an operator, by bound variable."""

    loaded: LoadedModel
    graph: LayoutGraph
    fingerprint: str
    target: tvm.target.Target
    device: DeviceIdentity
    errors: Errors = field(default_factory=dict, hash=False)
    pins: Mapping[str, str] = field(default_factory=dict, hash=False)
    rules: BorderRules = KEEP_ALL


@dataclass(frozen=True)
class Verdict:
    """What the whole-model timing said about a plan.

    Attributes:
        baseline: name of the best uniform layout.
        baseline_us: its samples.
        plan_us: the plan's samples of the same rounds.
        comparison: statistics of the two, None where the plan is the baseline.
        max_rel_error: of the plan, against the untouched module.
        accepted: whether the plan beat the baseline.
    """

    baseline: str
    baseline_us: tuple[float, ...]
    plan_us: tuple[float, ...]
    comparison: Comparison | None
    max_rel_error: float
    accepted: bool


@dataclass(frozen=True)
class Bound:
    """Below what no assignment can be.

    Attributes:
        lower_us: with probability `confidence`, as the cost model sees it.
        strict_us: whatever the model thinks, from measurements and the device's limits.
        confidence: of `lower_us`.
    """

    lower_us: float
    strict_us: float
    confidence: float


def _bounds(total: float, bound: Bound | None) -> dict[str, float | None]:
    if bound is None:
        return {"lower_bound_us": None, "gap": None, "strict_bound_us": None, "confidence": None}
    lower, strict = min(bound.lower_us, total), min(bound.strict_us, total)
    return {
        "lower_bound_us": _round(lower),
        "gap": round((total - lower) / total, 6) if total else 0.0,
        "strict_bound_us": _round(strict),
        "confidence": bound.confidence,
    }


def make_plan(
    context: PlanContext,
    program: Program,
    solution: Sequence[int],
    lab: Knows,
    *,
    uniform: Sequence[int] | None = None,
    uniform_name: str = "",
    bound: Bound | None = None,
) -> LayoutPlan:
    """The plan of a solution, not yet validated.

    Args:
        context: what all plans of the run have in common.
        program: the costs.
        solution: candidate of every kernel.
        lab: knows the schedules.
        uniform: another solution to explain it against.
        uniform_name: of that.
        bound: below what no assignment can be; without it the gap is left open.
    """
    ops = []
    of_kernels = program.skeleton.of_kernels(solution)
    for position, (node, index) in enumerate(zip(program.nodes, of_kernels, strict=True)):
        other = uniform[position] if uniform is not None else None
        ops += _plan_ops(context, node, index, other, uniform_name, lab, program, position)
    assignment = program.choices(solution)
    graph = context.graph
    border = context.rules.border(graph, assignment, program.skeleton.chosen_inputs(solution))
    total = program.problem.evaluate(solution).total
    return LayoutPlan(
        tool={
            "layoutsearch": layoutsearch.__version__,
            "tvm": tvm.__version__,
            "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        },
        target=target_json(context.target),
        device={
            "key": context.device.key,
            "cpu": context.device.cpu,
            "features": list(context.device.features),
            "threads": context.device.threads,
        },
        model={
            "name": context.loaded.name,
            "fingerprint": context.fingerprint,
            **_border(context, border),
        },
        ops=tuple(ops),
        transforms=tuple(_plan_transforms(graph, assignment, border, lab)),
        objective={
            "predicted_us": _round(total),
            **_bounds(total, bound),
        },
        validation={
            "baseline": "",
            "baseline_us": None,
            "plan_us": None,
            "speedup": None,
            "speedup_ci": None,
            "max_rel_error": None,
            "accepted": False,
        },
    )


def _border(context: PlanContext, border: Border) -> dict[str, list[dict[str, Any]]]:
    """Inputs and outputs with their layouts."""
    graph, loaded = context.graph, context.loaded
    inputs = [
        {"name": i.name, "shape": list(i.shape), "dtype": i.dtype, **border_entry(info, border.of_input(info))}
        for i, info in zip(loaded.inputs, graph.inputs, strict=True)
    ]
    outputs = [
        {"name": o.name, "shape": list(o.shape), "dtype": o.dtype, **border_entry(out.info, border.of_output(i, out))}
        for i, (o, out) in enumerate(zip(loaded.outputs, graph.outputs, strict=True))
    ]
    return {"inputs": inputs, "outputs": outputs}


def validated(plan: LayoutPlan, verdict: Verdict) -> LayoutPlan:
    """The plan with what the whole-model timing said."""
    comparison = verdict.comparison
    return replace(
        plan,
        validation={
            "baseline": verdict.baseline,
            "baseline_us": _summary(verdict.baseline_us),
            "plan_us": _summary(verdict.plan_us),
            "speedup": round(comparison.speedup, 4) if comparison else 1.0,
            "speedup_ci": [round(x, 4) for x in comparison.ci] if comparison else [1.0, 1.0],
            "max_rel_error": float(f"{verdict.max_rel_error:.3g}"),
            "accepted": verdict.accepted,
        },
    )


def _summary(samples: Sequence[float]) -> dict[str, Any] | None:
    if not samples:
        return None
    summary = summarize(samples)
    return {"median": _round(summary.median), "spread": round(summary.spread, 4), "rounds": summary.count}


def _round(us: float | None) -> float | None:
    return None if us is None or us == float("inf") else round(us, 3)


def _plan_ops(
    context: PlanContext,
    node: KernelNode,
    index: int,
    uniform: int | None,
    uniform_name: str,
    lab: Knows,
    program: Program,
    position: int,
) -> list[PlanOp]:
    graph = context.graph
    choice = node.choices[index]
    known = lab.of(node.workload, choice)
    schedule = Schedule.from_json(json.loads(known.best[0])) if known.best else None
    assignment = node.assignment(choice)
    costs = program.problem.nodes[position].costs
    uniform_us = costs[uniform] if uniform is not None else None
    why = _why(node, index, uniform, uniform_name, costs, context.pins.get(node.root, ""))
    found = []
    for name in node.members:
        op = graph.by_name[name]
        is_root = name == node.root
        if op.role is Role.FROZEN and not (is_root and schedule is not None):
            continue
        found.append(
            PlanOp(
                id=op.id,
                kind=op.kind,
                workload=node.workload.key,
                choice=assignment.get(name),
                schedule=schedule if is_root else None,
                fused_into=None if is_root else graph.by_name[node.root].id,
                predicted_us=_round(costs[index]) if is_root else None,
                measured_us=_round(known.best_us) if is_root else None,
                uniform_us=_round(uniform_us) if is_root else None,
                rel_error=_rel_error(context.errors, name, choice) if is_root else None,
                why=why if is_root else "follows its kernel",
            )
        )
    return found


def _rel_error(errors: Errors, name: str, choice: Candidate | None) -> float | None:
    error = errors.get((name, choice.algorithm)) if choice is not None else None
    return float(f"{error:.3g}") if error is not None else None


def _why(
    node: KernelNode, index: int, uniform: int | None, uniform_name: str, costs: Sequence[float], pinned: str
) -> str:
    pins = [f"pinned by {pinned}"] if pinned else []
    if len(node.choices) == 1:
        return "frozen: original layout" if node.choices[0] is None else next(iter(pins), "its only candidate")
    fastest = min(range(len(costs)), key=lambda i: costs[i])
    parts = pins
    if index == fastest:
        parts.append("fastest kernel of its candidates")
    else:
        parts.append(
            f"{node.choices[fastest]} is {costs[index] - costs[fastest]:.1f} us faster alone, not with transforms"
        )
    if uniform is not None:
        if uniform == index:
            parts.append(f"as in uniform {uniform_name}")
        elif costs[uniform] < float("inf"):
            parts.append(f"uniform {uniform_name} would take {costs[uniform]:.1f} us")
    return "; ".join(parts)


def _plan_transforms(
    graph: LayoutGraph, assignment: Mapping[str, Candidate], border: Border, lab: Knows
) -> list[PlanTransform]:
    ids = {op.name: op.id for op in graph.ops}
    readers: dict[str, list[str]] = {}
    for name, uses in graph.consumers.items():
        readers[name] = [op.id for op, _ in uses]
    found = []
    for tensor, source, target in transforms_of(graph, assignment, border):
        info = graph.tensors[tensor]
        us = lab.transform(TransformKey.of(info, source, target)).best_us
        consumers = ", ".join(readers.get(tensor, [])[:3]) or "the model's output"
        found.append(
            PlanTransform(
                tensor_id(tensor, ids), str(source), str(target), info.bytes, _round(us), f"read by {consumers}"
            )
        )
    return found
