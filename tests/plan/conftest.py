"""One small model with two inputs and three outputs, and a plan of it."""

from __future__ import annotations

import pytest
import tvm

from layoutsearch.plan.plan import LayoutPlan
from tests.models.plans import make_plan, two_in_three_out
from tests.models.running import native_target


@pytest.fixture(scope="session")
def module() -> tvm.IRModule:
    return two_in_three_out()


@pytest.fixture(scope="session")
def plan(module: tvm.IRModule) -> LayoutPlan:
    plan = make_plan(module, native_target(), seed=4)
    assert plan.transforms
    assert {str(op.choice) for op in plan.ops if op.choice} > {"NCHW8c,NCHW8c"}
    return plan
