"""The PP-OCR detector with its depthwise, pointwise and first convolutions pinned apart, as `explain --pin` sees it.

Depthwise NCHW, pointwise NHWC, the stem from NCHW to NCHW16c: nothing uniform. All 62 convolutions come out as
requested, with as many transforms as were predicted, and the outputs are right.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from layoutsearch.cost.model import CostModel
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.desired import parse_desired
from layoutsearch.layout.kinds import CONV
from layoutsearch.layout.rules import transforms_of
from layoutsearch.layout.transform import TransformKey
from layoutsearch.materialize.convert import materialize
from layoutsearch.materialize.verify import find_mismatches
from layoutsearch.measure.device import DeviceIdentity
from layoutsearch.model.canonicalize import canonicalize
from layoutsearch.model.load import load
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.search.assemble import Program
from layoutsearch.search.export import PlanContext, make_plan
from layoutsearch.search.final_costs import final_costs
from layoutsearch.search.known import Known
from layoutsearch.search.lazy import LazySearch
from layoutsearch.search.plan_costs import PlanCosts
from layoutsearch.search.setup import ModelSetup, set_up
from layoutsearch.search.solve import solve
from layoutsearch.search.what_if import OPTION, what_if
from layoutsearch.search.workloads import Workload
from tests.materialize.cases import ERROR, assert_moves
from tests.models import zoo
from tests.models.inputs import tensor
from tests.models.interpreter import interpret
from tests.models.running import range_error

TARGET = {"kind": "llvm", "mcpu": "skylake-avx512"}
WANTED = [
    "nn.conv2d_depthwise=NCHW",
    "nn.conv2d_pointwise=NHWC",
    "conv2d_0=NCHW:OIHW16o:NCHW16c",
]


class Unmeasured:
    """A lab of which nothing is known: all costs are predicted."""

    measured = 0
    failures: dict[str, int] = {}  # noqa: RUF012

    def of(self, workload: Workload, choice: Candidate | None) -> Known:
        return Known()

    def transform(self, key: TransformKey) -> Known:
        return Known()


def predicted(setup: ModelSetup) -> tuple[LayoutPlan, PlanCosts]:
    """The optimum under the base of the cost model, as a plan with its costs."""
    lab = Unmeasured()
    target = TargetInfo.from_target(setup.target, 2)
    search = LazySearch(setup.skeleton, lab, CostModel.fit((), (), None, target=target))  # type: ignore[arg-type]
    identity = DeviceIdentity("local", "any", (), 2, 2)
    context = PlanContext(setup.loaded, setup.graph, setup.fingerprint, setup.target, identity)
    costs = final_costs(context, setup.skeleton, lab, search.beliefs)  # type: ignore[arg-type]
    solution = solve(costs.problem).assignment
    program = Program(setup.skeleton, costs.problem)
    return make_plan(context, program, solution, lab), costs  # type: ignore[arg-type]


@pytest.mark.slow
def test_detector_with_kinds_of_convolutions_pinned_apart(tmp_path: Path) -> None:
    # Its last sigmoid would squeeze all differences to nothing.
    model = load(zoo.logits(onnx.load(str(zoo.detector_path()))), {"x": (1, 3, 64, 64)})
    model = replace(model, name="detector")
    free = set_up(model, tmp_path, target=TARGET)
    plan, costs = predicted(free)
    found = what_if(plan, costs, parse_desired(WANTED, OPTION))
    assert found.before_us == pytest.approx(plan.objective["predicted_us"], rel=1e-4)
    assert found.transforms[0] == len(plan.transforms)
    assert found.after_us > found.before_us

    # The same by rules, as `tune` has them: the same optimum.
    pinned = set_up(model, tmp_path, target=TARGET, desired=parse_desired(WANTED))
    by_rules, _ = predicted(pinned)
    assert by_rules.objective["predicted_us"] == pytest.approx(found.after_us, rel=1e-4)
    assert len(by_rules.transforms) == found.transforms[1]

    ids = {op.name: op.id for op in free.graph.ops}
    assignment: dict[str, Candidate] = {}
    for node in free.skeleton.nodes:
        text = found.assignment[ids[node.root]]
        assignment.update(node.assignment(Candidate.parse(text) if text else None))
    convolutions = Counter(
        (op.kind, str(assignment[op.name])) for op in free.graph.ops if op.op == CONV and op.kind != "conv2d_pointwise"
    )
    assert sum(op.op == CONV for op in free.graph.ops) == 62
    assert convolutions["conv2d", "NCHW,OIHW16o,NCHW16c"] == 1
    assert convolutions["conv2d_depthwise", "NCHW,OIHW,NCHW"] == 14
    pointwise = [assignment[op.name] for op in free.graph.ops if op.kind == "conv2d_pointwise"]
    assert [(str(c.data), str(c.out)) for c in pointwise] == [("NHWC", "NHWC")] * 42

    canonical = canonicalize(model.module)
    result = materialize(canonical, free.graph, assignment)
    assert find_mismatches(result.module, free.graph, assignment) == []
    assert len(result.transforms) == len(transforms_of(free.graph, assignment)) == found.transforms[1]
    assert_moves(result.module, free.graph, found.transforms[1])
    x = [tensor((1, 3, 64, 64), "float32", 0)]
    for got, want in zip(interpret(result.module, x), interpret(canonical, x), strict=True):
        assert float(want.std()) > 1e-3
        assert range_error(got, want) < ERROR
