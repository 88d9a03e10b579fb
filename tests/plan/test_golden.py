"""Plans of every released format load for ever, and still make of their model what they made of it.

`golden/NAME.json` is a plan of the model NAME in MODELS; `golden/NAME.lowered` is the structural hash of the module
that the plan makes of it, weights left out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tvm
import tvm_ffi

from layoutsearch.plan.apply import apply_plan
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.plan.schema import SCHEMA_ID
from tests.models import nets
from tests.models.plans import make_plan, two_in_three_out

GOLDEN = Path(__file__).with_name("golden")
# Fixed, so that the same code is made on every machine; nothing here runs it.
AVX512 = {"kind": "llvm", "mcpu": "skylake-avx512", "mtriple": "x86_64-unknown-linux-gnu"}
AVX2 = {"kind": "llvm", "mcpu": "haswell", "mtriple": "x86_64-unknown-linux-gnu"}

MODELS: dict[str, tuple[Callable[[], tvm.IRModule], dict[str, str], int]] = {
    "v1_outputs": (two_in_three_out, AVX512, 3),
    "v1_mixed": (nets.mixed, AVX2, 7),
    "v1_transposed": (nets.transposed, AVX512, 1),
}

ADVICE = """
The plan golden/{name}.json makes another module than it did when it was recorded. Plans that are in use now compile to
something else. If that is an accident (a template, the fusion or the canonical form changed under the same name), undo
it. If it is meant (the same decisions, better code), record the new hash with

    pytest tests/plan/test_golden.py --update-golden

and if the decisions in the plan no longer mean the same, raise the version of the template instead.
"""


@pytest.fixture(scope="session")
def update(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


@pytest.mark.parametrize("name", MODELS)
def test_golden_plan(name: str, update: bool) -> None:
    build, target, seed = MODELS[name]
    module = build()
    path, recorded = GOLDEN / f"{name}.json", GOLDEN / f"{name}.lowered"
    if update and not path.exists():
        make_plan(module, tvm.target.Target(target), name=name, seed=seed).save(path)
    assert path.exists(), f"{path} is missing: restore it from git, or make it with --update-golden if it is new"
    plan = LayoutPlan.load(path)
    found = f"{tvm_ffi.structural_hash(apply_plan(module, plan).module, skip_tensor_content=True):#018x}\n"
    if update:
        recorded.write_text(found)
    assert recorded.read_text() == found, ADVICE.format(name=name)


def test_every_golden_plan_has_a_model() -> None:
    assert {p.stem for p in GOLDEN.glob("*.json")} == set(MODELS)


def test_the_present_schema_has_a_golden_plan() -> None:
    """A new schema needs plans of its own here; those of older schemas stay."""
    version = SCHEMA_ID.rpartition("/")[2]
    assert any(name.startswith(f"v{version}_") for name in MODELS), f"record plans of {SCHEMA_ID} under v{version}_*"


def test_a_golden_plan_holds_what_plans_hold() -> None:
    """So that the files cover the format: blocks, transforms, fused operators, tuned schedules with parameters."""
    plans = [LayoutPlan.load(p) for p in GOLDEN.glob("*.json")]
    ops = [op for plan in plans for op in plan.ops]
    assert any(op.choice and op.choice.data != op.choice.out for op in ops)
    assert any(op.fused_into for op in ops)
    assert {op.schedule.template for op in ops if op.schedule} >= {"channels", "flat", "loops"}
    assert any(plan.transforms for plan in plans)
