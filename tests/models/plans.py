"""Plans made without measuring: candidates and schedules by a seeded draw, times invented."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm import relax

from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.candidates import enumerate_candidates
from layoutsearch.layout.graph import TensorInfo
from layoutsearch.layout.io_layouts import IoLayouts
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.rules import transforms_of
from layoutsearch.layout.space import load_space
from layoutsearch.materialize.convert import materialize
from layoutsearch.materialize.lower import lower
from layoutsearch.model.canonicalize import canonicalize
from layoutsearch.model.fingerprint import fingerprint
from layoutsearch.model.load import load
from layoutsearch.plan.apply import target_json, tensor_id
from layoutsearch.plan.border import border_entry
from layoutsearch.plan.plan import LayoutPlan, PlanOp, PlanTransform
from layoutsearch.schedule import dispatch
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.value import Schedule
from layoutsearch.search.workloads import KernelNode, kernel_nodes
from tests.models import nets

SPACE = Path(__file__).resolve().parents[2] / "search_spaces" / "x86_avx512.toml"


def two_in_three_out(*, stride: int = 2, out: int = 24, size: int = 16) -> tvm.IRModule:
    """Two inputs; the outputs differ in rank, shape and element type, so that a wrong order shows."""

    def body(n: nets.Net, x: relax.Expr, y: relax.Expr) -> relax.Expr:
        top = n.conv_relu(x, 16, stride=stride)
        joined = n.conv(n.emit(relax.op.add(top, y)), out, 1)
        pooled = n.emit(relax.op.nn.max_pool2d(joined, pool_size=2, strides=2))
        best = n.emit(relax.op.argmax(joined, axis=1))
        mean = n.emit(relax.op.mean(top, axis=[2, 3]))
        return relax.Tuple([best, pooled, mean])

    return nets.build((1, 3, size, size), (1, 16, size // stride, size // stride), body=body)


def make_plan(
    module: tvm.IRModule,
    target: tvm.target.Target,
    *,
    name: str = "model",
    threads: int = 2,
    seed: int = 0,
    space: Path = SPACE,
    choose: Callable[[KernelNode], Candidate | None] | None = None,
    io: Sequence[str] = (),
    drawn: bool = True,
) -> LayoutPlan:
    """A plan of `module`: any candidate of `space` for every kernel (or what `choose` says), any schedule of each.

    Without `drawn` schedules each has its default one. `io` is as `--io-layout` has it.
    """
    draw = random.Random(seed)
    loaded = load(module)
    canonical = canonicalize(loaded.module)
    graph = build_graph(canonical)
    assignment: dict[str, Candidate] = {}
    workloads: dict[str, tuple[str, str]] = {}
    chosen: dict[str, Candidate | None] = {}
    for node in kernel_nodes(canonical, graph, enumerate_candidates(graph, load_space(space))):
        # Equal kernels have equal schedules, so they get equal layouts here.
        if node.workload.key not in chosen:
            chosen[node.workload.key] = choose(node) if choose is not None else draw.choice(node.choices)
        choice = chosen[node.workload.key]
        assignment.update(node.assignment(choice))
        workloads.update(dict.fromkeys(node.members, (node.workload.key, node.root)))
    schedules: dict[str, Schedule] = {}
    names = [i.name for i in loaded.inputs], [o.name for o in loaded.outputs]
    border = IoLayouts.parse(io).rules(graph, *names).border(graph, assignment)
    outputs = [
        {"name": o.name, "shape": list(o.shape), "dtype": o.dtype, **_entry(io, out.info, border.of_output(i, out))}
        for i, (o, out) in enumerate(zip(loaded.outputs, graph.outputs, strict=True))
    ]
    lowered = lower(materialize(canonical, graph, assignment, border).module, target)
    functions = {g.name_hint: f for g, f in lowered.module.functions_items()}
    info = TargetInfo.from_target(target, threads)
    for kernel in lowered.kernels if drawn else ():
        picked = draw.choice(dispatch.candidates(functions[kernel.function], info)[:4])
        schedules.update({group[0]: picked for group in kernel.groups})
    ids = {op.name: op.id for op in graph.ops}

    def plan_op(op: Any) -> PlanOp:
        workload, root = workloads[op.name]
        is_root = root == op.name
        return PlanOp(
            id=op.id,
            kind=op.kind,
            workload=workload,
            choice=assignment.get(op.name),
            schedule=schedules.get(op.name),
            fused_into=None if is_root else ids[root],
            predicted_us=1.25 if is_root else None,
            measured_us=1.5 if is_root else None,
            uniform_us=2.0 if is_root else None,
            why="drawn" if is_root else "follows its kernel",
        )

    return LayoutPlan(
        tool={"layoutsearch": "0.1.0", "tvm": tvm.__version__, "created": "2025-01-01T00:00:00+00:00"},
        target=target_json(target),
        device={"key": "local", "cpu": "any", "features": ["avx2", "avx512f"], "threads": threads},
        model={
            "name": name,
            "fingerprint": fingerprint(canonical),
            "inputs": [
                {"name": i.name, "shape": list(i.shape), "dtype": i.dtype, **_entry(io, info, border.of_input(info))}
                for i, info in zip(loaded.inputs, graph.inputs, strict=True)
            ],
            **({"outputs": outputs} if io else {}),
        },
        ops=tuple(plan_op(op) for op in graph.ops if op.role is not Role.FROZEN or op.name in schedules),
        transforms=tuple(
            PlanTransform(tensor_id(t, ids), str(a), str(b), graph.tensors[t].bytes, 0.5, "drawn")
            for t, a, b in transforms_of(graph, assignment, border)
        ),
        objective={"predicted_us": 10.0, "lower_bound_us": 9.0, "gap": 0.1},
        validation={
            "baseline": "uniform NCHW",
            "baseline_us": {"median": 12.0, "spread": 0.02, "rounds": 40},
            "plan_us": {"median": 11.0, "spread": 0.01, "rounds": 40},
            "speedup": 1.09,
            "speedup_ci": [1.07, 1.11],
            "max_rel_error": 1e-7,
            "accepted": True,
        },
    )


def _entry(io: Sequence[str], info: TensorInfo, layout: Layout | None) -> dict[str, str]:
    """What plans say of a layout; nothing in those of before there was a choice."""
    return border_entry(info, layout) if io else {}
