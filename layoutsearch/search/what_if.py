"""What a plan would cost if some of its operators had other layouts: the exact problem, solved again with the pins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from layoutsearch.errors import SpaceError
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.desired import DEFAULT, Desired, most_specific, nearest_key
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.search.plan_costs import EARLY, INPUT, MEASURED, PREDICTED, Cost, CostNode, CostsError, PlanCosts
from layoutsearch.search.problem import NoAssignmentError, restricted
from layoutsearch.search.solve import solve

OPTION = "--pin"


@dataclass(frozen=True)
class KernelChange:
    """A kernel that would run as another candidate; times in microseconds."""

    id: str
    kind: str
    before: str
    after: str
    before_cost: Cost
    after_cost: Cost

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "id": self.id,
            "kind": self.kind,
            "from": self.before,
            "to": self.after,
            "before": _cost_json(self.before_cost),
            "after": _cost_json(self.after_cost),
        }


@dataclass(frozen=True)
class TransformChange:
    """A transform that would come or go."""

    tensor: str
    source: str
    target: str
    cost: Cost

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"tensor": self.tensor, "from": self.source, "to": self.target, **_cost_json(self.cost)}


@dataclass(frozen=True)
class WhatIf:
    """What pins would cost, in microseconds of predicted time.

    Attributes:
        pins: in words.
        assignment: candidate of every kernel with the pins, by id of its root.
        before_us: the plan.
        best_us: the best assignment without the pins; the plan may be another, since what won whole is exported.
        after_us: the best assignment with them.
        kernels: that differ from the plan.
        added: transforms that the plan does not have.
        removed: transforms that only the plan has.
        transforms: how many the plan has, and how many there would be.
        predicted_by: what predicts the times that are not measured.
    """

    pins: tuple[str, ...]
    assignment: dict[str, str]
    before_us: float
    best_us: float
    after_us: float
    kernels: tuple[KernelChange, ...]
    added: tuple[TransformChange, ...]
    removed: tuple[TransformChange, ...]
    transforms: tuple[int, int]
    predicted_by: str

    def count(self, basis: str) -> int:
        """How many of the times that differ have a basis, see `plan_costs.Cost`."""
        costs = [c for k in self.kernels for c in (k.before_cost, k.after_cost)]
        return sum(c.basis == basis for c in [*costs, *(t.cost for t in (*self.added, *self.removed))])

    def to_json(self) -> dict[str, Any]:
        """The object that `explain --pin --json` prints."""
        return {
            "pins": list(self.pins),
            "before_us": _round(self.before_us),
            "best_us": _round(self.best_us),
            "after_us": _round(self.after_us),
            "delta_us": _round(self.after_us - self.before_us),
            "kernels": [kernel.to_json() for kernel in self.kernels],
            "transforms_added": [t.to_json() for t in self.added],
            "transforms_removed": [t.to_json() for t in self.removed],
            "transforms": {"before": self.transforms[0], "after": self.transforms[1]},
            "basis": {basis: self.count(basis) for basis in (MEASURED, EARLY, PREDICTED)},
            "predicted_by": self.predicted_by,
        }


def what_if(plan: LayoutPlan, costs: PlanCosts, pins: Sequence[Desired]) -> WhatIf:
    """Solve the problem that a plan came from again, with `pins`.

    Raises:
        CostsError: the costs are of another plan.
        SpaceError: a pin names no operator, or one that has no such candidate that runs.
    """
    costs.check(plan)
    now = _solution(plan, costs)
    allowed = _allowed(costs, pins)
    problem = costs.problem
    try:
        after = solve(restricted(problem, allowed))
    except NoAssignmentError:
        raise SpaceError(f"{' and '.join(map(str, pins))}: no assignment of the model has these layouts") from None
    kernels = tuple(
        KernelChange(
            node.members[0].id, node.members[0].kind, node.choices[i], node.choices[j], node.costs[i], node.costs[j]
        )
        for node, i, j in zip(costs.nodes, now, after.assignment, strict=True)
        if i != j and not node.is_input
    )
    of_kernels = [(n, i) for n, i in zip(costs.nodes, after.assignment, strict=True) if not n.is_input]
    have, will = _transforms(costs, now), _transforms(costs, after.assignment)
    return WhatIf(
        pins=tuple(map(str, pins)),
        assignment={n.members[0].id: n.choices[i] for n, i in of_kernels},
        before_us=problem.evaluate(now).total,
        best_us=solve(problem).cost,
        after_us=after.cost,
        kernels=kernels,
        added=tuple(t for t in will if t not in have),
        removed=tuple(t for t in have if t not in will),
        transforms=(len(have), len(will)),
        predicted_by=costs.predicted_by,
    )


def _solution(plan: LayoutPlan, costs: PlanCosts) -> tuple[int, ...]:
    """The plan as a solution of the problem."""
    chosen = {op.id: str(op.choice) for op in plan.ops if op.choice is not None}
    chosen |= {f"{INPUT} {i['name']}": i.get("layout", i.get("axes", "")) for i in plan.model["inputs"]}
    found = []
    for node in costs.nodes:
        text = chosen.get(node.members[0].id, "")
        if text not in node.choices:
            raise CostsError(
                f"the costs are of another run than the plan: {node.members[0].id} had no candidate {text}; "
                "give --costs FILE of that run, or tune again"
            )
        found.append(node.choices.index(text))
    return tuple(found)


def _allowed(costs: PlanCosts, pins: Sequence[Desired]) -> dict[int, list[int]]:
    """Candidates of the kernels that pins are about."""
    used: set[Desired] = set()
    allowed: dict[int, list[int]] = {}
    for number, node in enumerate(costs.nodes):
        for position, member in enumerate(() if node.is_input else node.members):
            pin = most_specific(member, pins)
            if pin is None:
                continue
            used.update(p for p in pins if p.rank(member))
            fitting = [i for i, text in enumerate(node.choices) if text and _fits(pin, text, position)]
            fitting = [i for i in fitting if i in allowed.get(number, fitting)]
            if not any(math.isfinite(node.costs[i].us) for i in fitting):
                if pin.key == DEFAULT and node.choices == ("",):
                    continue
                raise SpaceError(f"{pin}: {_why_none(node, fitting, member.id)}")
            allowed[number] = fitting
    members = [member for node in costs.nodes if not node.is_input for member in node.members]
    for pin in pins:
        if pin not in used:
            near = nearest_key(pin.key, members)
            raise SpaceError(f"{pin}: the plan has no op {pin.key!r}" + (f"; the nearest is {near}" if near else ""))
    return allowed


def _fits(pin: Desired, text: str, position: int) -> bool:
    choice = Candidate.parse(text)
    # What follows a kernel's root runs in its out layout.
    return pin.admits(choice if position == 0 else Candidate.uniform(choice.out))


def _why_none(node: CostNode, fitting: Sequence[int], member: str) -> str:
    if fitting:
        return f"{member} did not run as {node.choices[fitting[0]]} when it was measured"
    runs = [text for text, cost in zip(node.choices, node.costs, strict=True) if text and math.isfinite(cost.us)]
    if not runs:
        return f"{member} has no layout to choose"
    had = "; ".join(runs)
    return f"{member} had no such candidate in the run of this plan, but {had}; tune with --desired-layout to try it"


def _transforms(costs: PlanCosts, solution: Sequence[int]) -> list[TransformChange]:
    found = []
    for paid in costs.problem.evaluate(solution).transforms:
        tensor = costs.tensors[paid.tensor]
        move = tensor.moves[paid.source, paid.wanted]
        found.append(TransformChange(tensor.id, tensor.layouts[paid.source], tensor.layouts[paid.wanted], move))
    return found


def _cost_json(cost: Cost) -> dict[str, Any]:
    between = {"between_us": [_round(x) for x in cost.between]} if cost.between else {}
    return {"us": _round(cost.us), "basis": cost.basis, **between}


def _round(us: float) -> float | None:
    return round(us, 3) if math.isfinite(us) else None
