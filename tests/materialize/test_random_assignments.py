"""Random assignments: achieved as requested with outputs that are right, or refused before anything is converted."""

from __future__ import annotations

import random
from functools import cache

import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layoutsearch.errors import InfeasibleError
from layoutsearch.layout import kinds
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.graph import OpNode
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.rules import check_assignment
from layoutsearch.materialize import convert
from layoutsearch.materialize.convert import materialize
from tests.materialize.cases import Case, check, check_built
from tests.models import nets, random_nets

DATA = (
    "NCHW",
    "NHWC",
    "NCHW4c",
    "NCHW8c",
    "NCHW16c",
    "NCHW3c",
    "NCHW32c",
    "CNHW",
    "NHWC4c",
    "NCHW2h",
    "NC4cHW",
    "ABCD",
)
KERNELS = ("OIHW", "HWIO", "IHWO", "OIHW8o", "OIHW4i8o", "OIHW16i16o", "OIHW8i4o", "OIHW16o", "IOHW4i", "OIHW2h")
UNCHECKED = settings(deadline=None, suppress_health_check=list(HealthCheck))


@cache
def residual_net() -> Case:
    """Depthwise, concat, split, pools, pad, clip, resize around a residual sum; batch 2; blocks 4, 8 and 16."""
    return Case.of(nets.mixed((2, 16, 6, 10)))


@pytest.mark.slow
@given(st.randoms(use_true_random=False))
@settings(UNCHECKED, max_examples=300)
def test_random_assignments_of_a_residual_net(rng: random.Random) -> None:
    case = residual_net()
    check(case, case.random(rng))


@pytest.mark.slow
@given(st.randoms(use_true_random=False))
@settings(UNCHECKED, max_examples=20)
def test_random_assignments_built_by_tvm(rng: random.Random) -> None:
    case = residual_net()
    check_built(case, check(case, case.random(rng)))


@pytest.mark.slow
@given(random_nets.nets(), st.randoms(use_true_random=False))
@settings(UNCHECKED, max_examples=45)
def test_random_nets(module: tvm.IRModule, rng: random.Random) -> None:
    case = Case.of(module)
    for _ in range(2):
        result = check(case, case.random(rng))
    if rng.random() < 0.2:
        check_built(case, result)


@st.composite
def choices(draw: st.DrawFn, op: OpNode) -> Candidate:
    """Any candidate that can be written down, legal or not."""
    kernel = draw(st.sampled_from(KERNELS)) if op.op in kinds.CONVOLUTIONS or draw(st.integers(0, 30)) == 0 else None
    data = draw(st.sampled_from(DATA))
    out = draw(st.sampled_from(DATA)) if op.op in kinds.CONVOLUTIONS else data
    return Candidate.of(data, kernel, out)


@given(st.data(), st.randoms(use_true_random=False))
@settings(UNCHECKED, max_examples=150)
def test_anything_that_can_be_asked_for(data: st.DataObject, rng: random.Random) -> None:
    """A legal assignment with some choices replaced by arbitrary ones: refused with a reason, or done right."""
    case = residual_net()
    assignment = case.random(rng)
    for op in data.draw(st.lists(st.sampled_from(list(case.spaces)), min_size=1, max_size=3, unique=True)):
        assignment[op] = data.draw(choices(case.graph.by_name[op]))
    problems = check_assignment(case.graph, assignment)
    if not problems:
        check(case, assignment)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "prepare", lambda *_: pytest.fail("it was converted"))
        with pytest.raises(InfeasibleError) as error:
            materialize(case.module, case.graph, assignment)
    name, reason = problems[0]
    assert str(error.value).startswith(f"{name}: {reason}")
    assert reason


@pytest.mark.slow
@given(st.data(), st.randoms(use_true_random=False))
@settings(UNCHECKED, max_examples=20)
def test_unusual_layouts_that_are_allowed_can_be_built(data: st.DataObject, rng: random.Random) -> None:
    """What the rules let through is not only converted: every kernel lowers, compiles and is right."""
    case = residual_net()
    assignment = case.random(rng)
    for op in data.draw(st.lists(st.sampled_from(list(case.spaces)), min_size=3, max_size=8, unique=True)):
        assignment[op] = data.draw(choices(case.graph.by_name[op]).filter(lambda c: _is_legal(case, op, c)))  # noqa: B023
    check_built(case, check(case, assignment))


def _is_legal(case: Case, op: str, choice: Candidate) -> bool:
    return not [p for p in check_assignment(case.graph, {op: choice}) if p[0] == op]


def test_unknown_and_missing_operators_are_refused() -> None:
    case = residual_net()
    assignment = case.random(random.Random(0))
    missing = dict(list(assignment.items())[1:])
    with pytest.raises(InfeasibleError, match="conv2d_0: the assignment has no choice for it"):
        materialize(case.module, case.graph, missing)
    with pytest.raises(InfeasibleError, match="conv2d_99: there is no such operator"):
        materialize(case.module, case.graph, {**assignment, "conv2d_99": assignment["conv2d_0"]})


def test_a_frozen_operator_has_one_layout() -> None:
    case = Case.of(nets.classifier())
    assignment = case.random(random.Random(0))
    (reshape,) = [op.name for op in case.graph.ops if op.op == "relax.reshape"]
    with pytest.raises(InfeasibleError, match=r"reshape_0: relax.reshape is frozen: it has no layout inference"):
        materialize(case.module, case.graph, {**assignment, reshape: Candidate.uniform(Layout("NHWC"))})


@pytest.mark.parametrize(
    ("op", "choice", "reason"),
    [
        ("conv2d_0", "NCHW16c,OIHW16i16o,NCHW64c", "block 64 does not divide C=32"),
        (
            "conv2d_0",
            "NCHW16c,OIHW8i16o,NCHW16c",
            "the kernel's blocks 8i16o are not the data's 16 and the result's 16",
        ),
        ("conv2d_0", "NCHW16c,NCHW16c", "needs a kernel layout"),
        ("conv2d_0", "NCHW2h,OIHW,NCHW", "blocks another axis than C"),
        ("conv2d_depthwise_0", "NCHW16c,OIHW16i16o,NCHW16c", "block 16 does not divide I=1"),
        ("conv2d_depthwise_0", "NCHW16c,OIHW16o,NCHW8c", "a depthwise convolution has one block"),
        ("max_pool2d_0", "NCHW8c,NHWC", "has one layout"),
        ("resize2d_0", "CNHW,CNHW", "TVM cannot resize in CNHW"),
        ("concat_0", "NCHW32h,NCHW32h", "blocks another axis than C"),
        ("add_0", "NCHW,OIHW,NCHW", "has one layout"),
    ],
)
def test_reasons(op: str, choice: str, reason: str) -> None:
    case = residual_net()
    with pytest.raises(InfeasibleError, match=f"^{op}: .*{reason}"):
        materialize(case.module, case.graph, {**case.random(random.Random(0)), op: Candidate.parse(choice)})
