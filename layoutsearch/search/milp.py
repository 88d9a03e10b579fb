"""The layout problem as a mixed-integer program for HiGHS (`scipy.optimize.milp`).

Variables: x(i, a) = 1 if node i takes candidate a; w(e, f, L) = 1 if edge e sees its tensor made as f and wanted as L
(the edge's transport polytope, which makes the linear relaxation integral on trees); z(t, f, L) >= w(e, f, L) for every
edge e of t, paid once. Only x has to be integral.

A tensor with many readers gets no w: z(t, f, L) <= [made as f] and, for every reader, sum_f z(t, f, L) >= [wants L].
That is a little weaker and much smaller; concats of concats solve several times faster so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_matrix

from layoutsearch.search.descent import Descent, descend
from layoutsearch.search.problem import LayoutProblem, NoAssignmentError, Tensor

# What no scale makes a number of: by so little no two assignments differ.
_NOTHING = 1e-200
# HiGHS stops at an absolute gap of 1e-6, which scipy cannot change: costs are scaled so that this is nothing.
_LARGEST_COEFFICIENT = 1e4
# Difference between cost and dual bound, relative to the cost, that counts as none: what HiGHS's tolerances leave.
_PROVEN_GAP = 1e-6
# Tensors with at least this many free readers take the smaller formulation.
_MANY_READERS = 4


@dataclass(frozen=True)
class Distance:
    """Ask for an assignment that differs from each of `others` at `changes` or more of the nodes in `counted`."""

    others: tuple[tuple[int, ...], ...]
    changes: int
    counted: tuple[int, ...]

    def holds(self, assignment: Sequence[int]) -> bool:
        """Whether an assignment is far enough from all the others."""
        return all(sum(assignment[i] != other[i] for i in self.counted) >= self.changes for other in self.others)


@dataclass(frozen=True)
class MilpResult:
    """The best assignment known, its cost, a valid lower bound, and whether the two meet."""

    assignment: tuple[int, ...]
    cost: float
    lower_bound: float
    proven: bool


@dataclass
class _Program:
    """Columns and rows as they are added."""

    objective: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    constant: float = 0.0
    rows: list[int] = field(default_factory=list)
    cols: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    row_low: list[float] = field(default_factory=list)
    row_high: list[float] = field(default_factory=list)

    def column(self, cost: float = 0.0) -> int:
        """A variable in [0, 1]; an infinite cost fixes it at 0."""
        self.objective.append(cost if math.isfinite(cost) else 0.0)
        self.upper.append(1.0 if math.isfinite(cost) else 0.0)
        return len(self.objective) - 1

    def add_cost(self, column: int, cost: float) -> None:
        if math.isfinite(cost):
            self.objective[column] += cost
        else:
            self.upper[column] = 0.0

    def row(self, plus: Sequence[int], minus: Sequence[int], low: float, high: float) -> None:
        """low <= sum of columns `plus` - sum of columns `minus` <= high."""
        k = len(self.row_low)
        self.rows += [k] * (len(plus) + len(minus))
        self.cols += [*plus, *minus]
        self.values += [1.0] * len(plus) + [-1.0] * len(minus)
        self.row_low.append(low)
        self.row_high.append(high)

    def run(self, n_integral: int, time_limit_s: float) -> tuple[OptimizeResult, float]:
        """HiGHS's answer and its lower bound in the unit of the costs; the first `n_integral` columns are integral."""
        if not math.isfinite(self.constant):
            return OptimizeResult(status=2, message="a fixed tensor cannot reach its fixed consumer", x=None), math.inf
        objective = np.array(self.objective)
        largest = float(objective.max(initial=0.0))
        scale = _LARGEST_COEFFICIENT / (largest if largest > _NOTHING else 1.0)
        integrality = np.zeros(len(objective))
        integrality[:n_integral] = 1
        shape = (len(self.row_low), len(objective))
        matrix = coo_matrix((self.values, (self.rows, self.cols)), shape=shape).tocsr()
        result = milp(
            objective * scale,
            integrality=integrality,
            bounds=Bounds(0.0, np.array(self.upper)),
            constraints=LinearConstraint(matrix, np.array(self.row_low), np.array(self.row_high)),
            options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
        )
        dual: float | None = getattr(result, "mip_dual_bound", None)
        known = 0.0 if dual is None or not math.isfinite(dual) else dual / scale
        return result, known + self.constant


class _Model:
    def __init__(self, problem: LayoutProblem) -> None:
        self.problem = problem
        self.program = _Program()
        self.x = [[self.program.column(c) for c in node.costs] for node in problem.nodes]
        self.n_integral = len(self.program.objective)
        for columns in self.x:
            self.program.row(columns, [], 1.0, 1.0)
        for tensor in problem.tensors:
            self._tensor(tensor)

    def _groups(self, node: int, table: Sequence[int]) -> dict[int, list[int]]:
        """Columns of a node's feasible candidates by the layout they make or want."""
        out: dict[int, list[int]] = {}
        for column, layout in zip(self.x[node], table, strict=True):
            if self.program.upper[column] > 0:
                out.setdefault(layout, []).append(column)
        return out

    def _tensor(self, tensor: Tensor) -> None:
        fixed = {use.wanted[0] for use in tensor.uses if use.node is None}
        uses = dict.fromkeys((use.node, use.wanted) for use in tensor.uses if use.node is not None)
        wanted = [self._groups(node, table) for node, table in uses]
        if tensor.producer is None:
            made = tensor.made[0]
            self.program.constant += sum(tensor.cost[made][w] for w in fixed)
            edges = [{(made, w): columns for w, columns in groups.items()} for groups in wanted]
        else:
            sources = self._groups(tensor.producer, tensor.made)
            for f, columns in sources.items():
                for column in columns:
                    self.program.add_cost(column, math.fsum(tensor.cost[f][w] for w in fixed))
            if len(wanted) >= _MANY_READERS:
                self._share(tensor, sources, wanted, fixed)
                return
            edges = [self._edge(tensor, sources, groups) for groups in wanted]
        self._pay(tensor, edges, fixed)

    def _share(
        self,
        tensor: Tensor,
        sources: dict[int, list[int]],
        wanted: list[dict[int, list[int]]],
        fixed: Collection[int],
    ) -> None:
        """Pay for a layout from where the tensor is made, as soon as one reader wants it."""
        for w in sorted({w for groups in wanted for w in groups} - set(fixed)):
            paid = []
            for f, made in sources.items():
                paid.append(self.program.column(tensor.cost[f][w]))
                self.program.row(made, [paid[-1]], 0.0, math.inf)
            for groups in wanted:
                if w in groups:
                    self.program.row(paid, groups[w], 0.0, math.inf)

    def _edge(
        self, tensor: Tensor, sources: dict[int, list[int]], wanted: dict[int, list[int]]
    ) -> dict[tuple[int, int], list[int]]:
        """Flow columns of one producer and consumer, tied to both their choices."""
        flow = {(f, w): [self.program.column(0.0)] for f in sources for w in wanted}
        for (f, w), columns in flow.items():
            if not math.isfinite(tensor.cost[f][w]):
                self.program.add_cost(columns[0], math.inf)
        for f, made in sources.items():
            self.program.row([flow[f, w][0] for w in wanted], made, 0.0, 0.0)
        for w, asked in wanted.items():
            self.program.row([flow[f, w][0] for f in sources], asked, 0.0, 0.0)
        return flow

    def _pay(self, tensor: Tensor, edges: list[dict[tuple[int, int], list[int]]], fixed: Collection[int]) -> None:
        """Charge each transform once, whichever edges need it; those of fixed consumers are charged already."""
        asking: dict[tuple[int, int], list[list[int]]] = {}
        for edge in edges:
            for transform, columns in edge.items():
                asking.setdefault(transform, []).append(columns)
        for (f, w), groups in asking.items():
            cost = tensor.cost[f][w]
            if w in fixed or cost == 0:
                continue
            if len(groups) == 1 or not math.isfinite(cost):
                for column in (c for group in groups for c in group):
                    self.program.add_cost(column, cost)
                continue
            paid = self.program.column(cost)
            for group in groups:
                self.program.row([paid], group, 0.0, math.inf)

    def keep_away(self, distance: Distance) -> None:
        """Rows for a minimum Hamming distance to given assignments."""
        for other in distance.others:
            same = [self.x[i][other[i]] for i in distance.counted]
            self.program.row(same, [], -math.inf, float(len(same) - distance.changes))


def _within_reach(problem: LayoutProblem, room: float) -> LayoutProblem:
    """The problem with its cheapest kernels at 0, without what costs more than `room` above them.

    No assignment that is as good as the incumbent uses any of that. Besides fewer columns, no huge coefficient is left
    beside which HiGHS's absolute tolerances would hide the costs that matter.
    """

    def cut(cost: float) -> float:
        return cost if cost <= room else math.inf

    nodes = tuple(replace(n, costs=tuple(cut(c - min(n.costs)) for c in n.costs)) for n in problem.nodes)
    tensors = tuple(replace(t, cost=tuple(tuple(cut(c) for c in row) for row in t.cost)) for t in problem.tensors)
    return LayoutProblem(nodes, tensors)


def trivial_bound(problem: LayoutProblem) -> float:
    """Sum of the cheapest kernels: what every assignment costs at least, since transforms cost at least 0."""
    return math.fsum(min(node.costs) for node in problem.nodes)


def solve_milp(
    problem: LayoutProblem,
    *,
    time_limit_s: float = 60.0,
    distance: Distance | None = None,
    incumbent: Sequence[int] | None = None,
) -> MilpResult:
    """The best assignment HiGHS finds in the time given, with a lower bound.

    There is an answer whenever `incumbent` or coordinate descent has one, however short the time.

    Args:
        problem: what to solve.
        time_limit_s: seconds for HiGHS; with the limit reached, `proven` is False.
        distance: solutions to stay away from.
        incumbent: an assignment known to satisfy `distance`; made by coordinate descent where it is None.

    Raises:
        NoAssignmentError: every assignment costs `inf` or is too close to the others, or none was found in time.
    """
    started = time.monotonic()
    floor = trivial_bound(problem)
    if not math.isfinite(floor):
        raise NoAssignmentError("no assignment has a finite cost: a node has no feasible candidate")
    allowed = None if distance is None else distance.holds
    best: tuple[float, tuple[int, ...]] | None = None

    def offer(assignment: tuple[int, ...]) -> None:
        nonlocal best
        cost = problem.evaluate(assignment).total
        if math.isfinite(cost) and (allowed is None or allowed(assignment)) and (best is None or cost < best[0]):
            best = (cost, assignment)

    offer(descend(problem) if incumbent is None else tuple(incumbent))
    if best and best[0] <= floor:
        return MilpResult(best[1], best[0], best[0], True)
    room = (best[0] - floor) * (1 + 1e-6) + 1e-12 * abs(floor) if best else math.inf
    model = _Model(_within_reach(problem, room))
    if distance:
        model.keep_away(distance)
    remaining = time_limit_s - (time.monotonic() - started)
    result, dual = model.program.run(model.n_integral, max(0.01, remaining))
    if result.status == 2 and best is None:
        raise NoAssignmentError(
            "no assignment has a finite cost: every choice meets an infeasible candidate or transform"
            if distance is None
            else "no further assignment of finite cost differs from the others at enough nodes"
        )
    if result.status not in (0, 1):
        raise RuntimeError(f"HiGHS stopped with status {result.status}: {result.message}")
    if result.x is not None:
        # Rounding is exact up to HiGHS's tolerances; the cost is ours, computed from the assignment.
        found = tuple(int(np.argmax(result.x[columns])) for columns in model.x)
        offer(found)
        offer(Descent(problem).improve(found, allowed=allowed))
    if best is None:
        raise NoAssignmentError(f"no assignment of finite cost was found in {time_limit_s:g} s; allow more time")
    cost, assignment = best
    bound = floor + max(0.0, dual)
    parts = problem.evaluate(assignment)
    tolerance = _PROVEN_GAP * math.fsum([*map(abs, parts.kernels), *(x.cost for x in parts.transforms)])
    if bound - cost > tolerance:
        raise RuntimeError(f"HiGHS proves a lower bound of {bound!r}, but there is an assignment that costs {cost!r}")
    return MilpResult(assignment, cost, min(cost, bound), result.status == 0 and cost - bound <= tolerance)
