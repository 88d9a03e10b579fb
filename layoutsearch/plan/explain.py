"""A plan for people: every kernel with its layouts, its time, what the uniform choice would cost, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from layoutsearch.plan.plan import LayoutPlan, PlanFusion, PlanOp


@dataclass(frozen=True)
class ExplainRow:
    """One kernel: its root, how many operators are fused into it, and with which other kernel it is one, if it is."""

    op: PlanOp
    fused: int
    transforms: tuple[str, ...]
    joined: str = ""


@dataclass(frozen=True)
class Explanation:
    """Rows in program order, and lines about the whole."""

    rows: tuple[ExplainRow, ...]
    summary: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The object that `explain --json` prints: every kernel, and lines about the whole."""
        kernels = [
            {**row.op.to_json(), "fused": row.fused, "transforms": list(row.transforms), "joined": row.joined or None}
            for row in self.rows
        ]
        return {"kernels": kernels, "summary": list(self.summary)}


def explain(plan: LayoutPlan) -> Explanation:
    """Everything `layoutsearch explain` shows."""
    fused: dict[str, int] = {}
    for op in plan.ops:
        if op.fused_into is not None:
            fused[op.fused_into] = fused.get(op.fused_into, 0) + 1
    after: dict[str, list[str]] = {}
    members = {op.id: op.fused_into or op.id for op in plan.ops}
    loose = []
    for t in plan.transforms:
        text = f"{t.source} to {t.target}" + (f" ({t.us:.1f} us)" if t.us is not None else "")
        owner = members.get(t.tensor, members.get(t.tensor.rpartition(".")[0]))
        if owner is None:
            loose.append(f"{t.tensor}: {text}")
        else:
            after.setdefault(owner, []).append(text)
    joined = {f.first: f"one kernel with {f.second}{_gain(f)}" for f in plan.fusions}
    joined |= {f.second: f"one kernel with {f.first}" for f in plan.fusions}
    rows = tuple(
        ExplainRow(op, fused.get(op.id, 0), tuple(after.get(op.id, ())), joined.get(op.id, ""))
        for op in plan.ops
        if op.fused_into is None
    )
    return Explanation(rows, tuple(_summary(plan, loose)))


def _gain(fusion: PlanFusion) -> str:
    if fusion.measured_us is None or fusion.apart_us is None:
        return ""
    return f": {fusion.measured_us:.1f} us, {fusion.apart_us:.1f} us apart"


def _summary(plan: LayoutPlan, loose: list[str]) -> list[str]:
    kernels = sum(op.predicted_us or 0.0 for op in plan.ops)
    transforms = sum(t.us or 0.0 for t in plan.transforms)
    if not plan.is_measured:
        return [
            f"{plan.model['name']} for target {plan.target['kind']}",
            f"{len(plan.transforms)} transforms",
            *(f"model input {text}" for text in loose),
            "nothing was measured or run: the first choices of the search space's rules, in default schedules",
        ]
    lines = [
        f"{plan.model['name']} for {plan.device['cpu']}, {plan.threads} threads",
        f"kernels {kernels:.0f} us, {len(plan.transforms)} transforms {transforms:.0f} us (each alone)",
    ]
    if plan.fusions:
        known = [f for f in plan.fusions if f.measured_us is not None and f.apart_us is not None]
        saved = sum((f.apart_us or 0.0) - (f.measured_us or 0.0) for f in known)
        gain = f", which saves {saved:.0f} us of that" if known else ""
        lines.append(f"{len(plan.fusions)} pairs of kernels are one kernel each{gain}")
    lines += [f"model input {text}" for text in loose]
    lines += [f"{what} of the compiled module is in {layout}" for what, layout in plan.io_layouts.items()]
    v = plan.validation
    if v["baseline_us"] and v["plan_us"]:
        low, high = v["speedup_ci"]
        lines.append(
            f"whole model {v['plan_us']['median']:.0f} us, {v['baseline']} {v['baseline_us']['median']:.0f} us: "
            f"{v['speedup']:.3f}x, 95 % interval {low:.3f} to {high:.3f}"
        )
        lines.append("accepted" if v["accepted"] else f"not accepted: nothing beat {v['baseline']}, which this plan is")
    else:
        lines.append("validated numerically, not compared with a baseline")
    if not plan.ops:
        lines.append("nothing to choose: the model has no layout-sensitive operator")
    return lines
