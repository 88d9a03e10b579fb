"""The costs that a run ended with, beside its plan: what a change would cost can then be asked without a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from layoutsearch.errors import LayoutSearchError
from layoutsearch.layout.kinds import Role
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.search.problem import LayoutProblem, Node, Tensor, Use

MEASURED, EARLY, PREDICTED = "measured", "measured early", "predicted"
INPUT = "input"
"""Kind of what stands for a model input whose layout is a choice of its own, at no cost."""


class CostsError(LayoutSearchError):
    """The file of costs is missing, damaged, or of another plan."""


@dataclass(frozen=True)
class CostOp:
    """An operator of a kernel, as rules name it."""

    id: str
    name: str
    op: str
    kind: str
    role: Role


@dataclass(frozen=True)
class Cost:
    """A time.

    Attributes:
        us: microseconds, infinite for what does not run.
        basis: `measured`; `measured early`, where not all schedules that may be faster were tried; or `predicted`.
        between: of what is predicted, lowest and highest microseconds at 80 %.
    """

    us: float
    basis: str
    between: tuple[float, float] | None = None


@dataclass(frozen=True)
class CostNode:
    """A kernel: its operators, root first, its candidates as text (empty where it has no choice), and their times.

    Or a model input in any of several layouts, `input NAME` of kind `INPUT`.
    """

    members: tuple[CostOp, ...]
    choices: tuple[str, ...]
    costs: tuple[Cost, ...]

    @property
    def is_input(self) -> bool:
        """Whether it is a model input, and no kernel."""
        return self.members[0].kind == INPUT


@dataclass(frozen=True)
class CostTensor:
    """A tensor between kernels.

    Attributes:
        id: of the operator that makes it, or the model input.
        layouts: those it may have; the tables below are indices into it, see `search.problem.Tensor`.
        producer: index of the kernel that makes it, None for a model input.
        made: layout made by each candidate of the producer.
        uses: kernel (None for a model output) and the layout that each of its candidates wants.
        moves: time of each transform, by (from, to).
    """

    id: str
    layouts: tuple[str, ...]
    producer: int | None
    made: tuple[int, ...]
    uses: tuple[tuple[int | None, tuple[int, ...]], ...]
    moves: Mapping[tuple[int, int], Cost]


@dataclass(frozen=True)
class PlanCosts:
    """All costs of a run.

    Attributes:
        fingerprint: of the model.
        target: what the kernels are built for.
        device: key, cpu and threads of the device.
        predicted_by: what predicts the times that are not measured, for people.
        nodes: the kernels.
        tensors: between them.
    """

    fingerprint: str
    target: Mapping[str, Any]
    device: Mapping[str, Any]
    predicted_by: str
    nodes: tuple[CostNode, ...]
    tensors: tuple[CostTensor, ...]

    @cached_property
    def problem(self) -> LayoutProblem:
        """The exact problem under these costs."""
        nodes = tuple(Node(n.members[0].id, tuple(c.us for c in n.costs)) for n in self.nodes)
        return LayoutProblem(nodes, tuple(_tensor(t) for t in self.tensors))

    def check(self, plan: LayoutPlan) -> None:
        """Raise CostsError unless the costs are of the plan's model, target and device."""
        device = {key: plan.device[key] for key in ("key", "cpu", "threads")}
        for what, have, wanted in (
            ("model", self.fingerprint, plan.fingerprint),
            ("target", dict(self.target), dict(plan.target)),
            ("device", dict(self.device), device),
        ):
            if have != wanted:
                raise CostsError(f"the costs are of another {what} than the plan; give --costs FILE of its run")


def _tensor(tensor: CostTensor) -> Tensor:
    side = len(tensor.layouts)
    matrix = [[0.0 if i == j else math.inf for j in range(side)] for i in range(side)]
    for (source, target), cost in tensor.moves.items():
        matrix[source][target] = cost.us
    uses = tuple(Use(node, wanted) for node, wanted in tensor.uses)
    return Tensor(tensor.id, tensor.producer, tensor.made, uses, tuple(map(tuple, matrix)))
