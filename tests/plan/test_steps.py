"""What each kernel of a plan holds: every operator once, transforms as the plan lists them."""

from __future__ import annotations

import tvm
from tvm import relax

from layoutsearch.layout import kinds
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.transform import TransformKey
from layoutsearch.plan.apply import Applied, apply_plan, tensor_id
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.plan.steps import plan_steps
from tests.models import nets
from tests.models.plans import make_plan, two_in_three_out
from tests.models.running import native_target


def applied(module: tvm.IRModule, seed: int) -> tuple[LayoutPlan, Applied]:
    plan = make_plan(module, native_target(), seed=seed)
    return plan, apply_plan(module, plan)


def test_steps_hold_every_operator_and_transform_once() -> None:
    for make, seed in ((nets.residual, 1), (nets.mixed, 2), (two_in_three_out, 4)):
        plan, done = applied(make(), seed)
        steps = plan_steps(done)
        assert steps is not None
        ops = [op for step in steps for op in step.ops]
        assert len(ops) == len(set(ops))
        assert set(ops) >= {op.id for op in done.graph.ops if op.op in kinds.ANCHORS}
        moved = [(s.tensor, str(s.transform.source), str(s.transform.target)) for s in steps if s.transform]
        assert len(moved) == len(set(moved))
        listed = {(t.tensor, t.source, t.target) for t in plan.transforms}
        # Where the elements stay in order, a transform is a view.
        ids = {op.name: op.id for op in done.graph.ops}
        views = {
            (tensor_id(t.tensor, ids), str(t.source), str(t.target))
            for t in done.materialized.transforms
            if TransformKey.of(done.graph.tensors[t.tensor], t.source, t.target).keeps_order
        }
        assert listed - views <= set(moved) <= listed
        choices = {op.id: op.choice for op in plan.ops}
        free = {op.id for op in done.graph.ops if op.role is not Role.FROZEN}
        for step in steps:
            assert bool(step.ops) == (step.facts is not None)
            assert not (step.ops and step.transform)
            if step.ops and step.ops[0] in free:
                assert step.choice == choices[step.ops[0]]


def test_facts_are_of_the_call_and_not_of_the_kernel() -> None:
    """Equal kernels are one function; each call has its own operators."""
    _, done = applied(nets.build((1, 8, 6, 10), body=lambda n, x: n.conv_relu(n.conv_relu(x, 8), 8)), 0)
    steps = plan_steps(done)
    assert steps is not None
    convs = [step for step in steps if step.facts is not None and step.facts.conv is not None]
    assert len(convs) == 2
    assert convs[0].function == convs[1].function
    assert convs[0].ops != convs[1].ops
    assert convs[0].facts == convs[1].facts
    assert convs[0].facts is not None
    assert convs[0].facts.flops >= 2 * 8 * 8 * 9 * 6 * 10


def test_what_is_no_sequence_has_no_steps() -> None:
    _, done = applied(nets.build((1, 8, 6, 10), body=lambda n, x: relax.Tuple([n.conv_relu(x, 8), x])), 0)
    assert plan_steps(done) is None
