"""A plan without a device: the first choices of the search space's rules, and nothing measured."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.desired import DesiredLayouts, parse_desired
from layoutsearch.layout.io_layouts import IoLayouts
from layoutsearch.layout.transform import TransformKey
from layoutsearch.measure.device import DeviceIdentity
from layoutsearch.plan.apply import apply_plan
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.search.assemble import Program
from layoutsearch.search.export import PlanContext, make_plan
from layoutsearch.search.known import Known
from layoutsearch.search.setup import ModelSetup, set_up
from layoutsearch.search.solve import solve
from layoutsearch.search.workloads import Workload
from layoutsearch.targets import default_threads

NOT_MEASURED = "not measured"


def first_plan(
    model: Any,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    target: Any = None,
    threads: int | None = None,
    space: str | os.PathLike[str] | None = None,
    desired_layouts: DesiredLayouts | None = None,
    io_layout: str | Sequence[str] | Mapping[str, str] | None = None,
) -> LayoutPlan:
    """The plan whose layout-sensitive operators have the earliest candidates of their rules that fit together.

    Everything else runs in what makes transforms move the least. Kernels have default schedules. The plan says that
    nothing was measured (`objective.measured` is false), and was applied once, so that it compiles.

    Args:
        model: path of an ONNX or Relax file, `onnx.ModelProto`, `tvm.IRModule` or a loaded model.
        shapes: shapes of dynamic inputs, by name.
        target: TVM target; this machine's CPU if None.
        threads: threads of a kernel; all cores this process may use if None.
        space: search-space file; the one shipped for the target if None.
        desired_layouts: layouts that operators must have, see `layoutsearch.tune`.
        io_layout: layouts of inputs and outputs, see `layoutsearch.tune`.

    Raises:
        LayoutSearchError: anything the user can mend; see its subclasses.
    """
    with tempfile.TemporaryDirectory(prefix="layoutsearch-") as folder:
        setup = set_up(
            model,
            Path(folder),
            shapes,
            target,
            space,
            desired=parse_desired(desired_layouts),
            io_layouts=IoLayouts.parse(io_layout),
        )
    program = _by_order(setup)
    solution = solve(program.problem).assignment
    device = DeviceIdentity("", NOT_MEASURED, (), 0, threads or default_threads())
    context = PlanContext(
        setup.loaded, setup.graph, setup.fingerprint, setup.target, device, setup.errors, rules=setup.rules
    )
    plan = make_plan(context, program, solution, _Nothing())
    of_kernels = program.skeleton.of_kernels(solution)
    roots = {node.root: (index + 1, len(node.choices)) for node, index in zip(program.nodes, of_kernels, strict=True)}
    ids = {op.id: op.name for op in setup.graph.ops}
    ops = []
    for op in plan.ops:
        why = op.why
        if op.fused_into is None and op.choice is not None:
            number, count = roots[ids[op.id]]
            why = f"choice {number} of {count} in the order of its rule; {NOT_MEASURED}"
        ops.append(replace(op, predicted_us=None, why=why))
    objective = dict.fromkeys(plan.objective) | {"measured": False}
    plan = replace(plan, ops=tuple(ops), objective=objective)
    apply_plan(setup.loaded.module, plan)
    return plan


def _by_order(setup: ModelSetup) -> Program:
    """The layout problem with a candidate's place in its rule as its cost, and bytes that move to settle the rest."""
    skeleton = setup.skeleton
    free = {skeleton.nodes[i].workload.key for i in setup.anchors}
    total = 1.0 + sum(key.bytes for key in skeleton.keys.values())
    places = {key: {c: i for i, c in enumerate(node.choices)} for key, (node, _) in skeleton.workloads.items()}

    def kernel(workload: Workload, choice: Candidate | None) -> float:
        return float(places[workload.key][choice]) if workload.key in free else 0.0

    return Program(skeleton, skeleton.problem(kernel, lambda key: key.bytes / total))


class _Nothing:
    """Knows no time."""

    def of(self, workload: Workload, choice: Candidate | None) -> Known:
        """See Knows."""
        return Known()

    def transform(self, key: TransformKey) -> Known:
        """See Knows."""
        return Known()
