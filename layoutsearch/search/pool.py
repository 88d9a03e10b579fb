"""The assignments that may be timed whole: uniform ones, and the best of the additive program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layoutsearch.errors import LayoutSearchError, PlanError
from layoutsearch.layout.layout import Layout
from layoutsearch.plan.border import border_of
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.search.assemble import Program, build_program
from layoutsearch.search.budget import Budget
from layoutsearch.search.diverse import best_assignments
from layoutsearch.search.export import Bound, PlanContext, make_plan
from layoutsearch.search.finals import plan_digest
from layoutsearch.search.known import Lab
from layoutsearch.search.problem import NoAssignmentError
from layoutsearch.search.reporter import Reporter
from layoutsearch.search.skeleton import Skeleton, uniform_solution
from layoutsearch.search.solve import solve

_TRANSFORM_ROUNDS = 12
_DIVERSE_ROUNDS = 3
_SOLVE_S = 20.0
_MIN_CHANGES = 3
# Assignments that compete for each that is timed whole.
_SIZE = 3


@dataclass(frozen=True)
class Uniform:
    """A uniform assignment: every kernel in the candidate nearest to one layout."""

    name: str
    solution: tuple[int, ...]
    predicted_us: float


@dataclass(frozen=True)
class Entrant:
    """A whole assignment that may be timed.

    Attributes:
        label: for people.
        plan: not validated.
        solution: in the present program.
    """

    label: str
    plan: LayoutPlan
    solution: tuple[int, ...]

    @property
    def is_uniform(self) -> bool:
        """Whether it is a baseline."""
        return self.label.startswith("uniform")

    @property
    def digest(self) -> str:
        """Of what is compiled."""
        return plan_digest(self.plan)


class Pool:
    """Makes assignments of a run, and plans of them.

    Args:
        context: what all plans of the run have in common.
        skeleton: the layout problem.
        layouts: uniform layouts of the search space.
        lab: knows kernels, and measures transforms.
        budget: when to stop measuring.
        reporter: told of progress.
    """

    def __init__(
        self,
        context: PlanContext,
        skeleton: Skeleton,
        layouts: Sequence[Layout],
        lab: Lab,
        budget: Budget,
        reporter: Reporter,
    ) -> None:
        self.context, self._skeleton, self._layouts, self._lab = context, skeleton, tuple(layouts), lab
        self._budget, self._reporter = budget, reporter
        self.bound: Bound | None = None

    def program(self) -> Program:
        """The exact program of what is measured now."""
        return build_program(self._skeleton, self._lab)

    def entrants(self, trials: int) -> tuple[Program, list[Entrant]]:
        """Uniform assignments and several times `trials` others, best first; the transforms of all are measured.

        Raises:
            LayoutSearchError: a kernel could not be measured in any layout.
        """
        try:
            program, solutions = self._solve(trials)
        except NoAssignmentError:
            raise LayoutSearchError(self._why_none(self.program())) from None
        uniforms = self.uniforms(program)
        if not uniforms:
            raise LayoutSearchError(self._why_none(program))
        # NCHW is what most users have today, so it is always built as well.
        kept = [*uniforms[:2], *(u for u in uniforms[2:] if u.name == "NCHW")]
        found = [Entrant(f"uniform {u.name}", self.plan(program, u.solution, u), u.solution) for u in kept]
        known = {u.solution for u in kept}
        for solution in solutions:
            if solution not in known:
                label = f"assignment {len(found) - len(kept) + 1}"
                found.append(Entrant(label, self.plan(program, solution, uniforms[0]), solution))
        return program, found

    def plan(self, program: Program, solution: Sequence[int], uniform: Uniform) -> LayoutPlan:
        """The plan of a solution, explained against a uniform one."""
        return make_plan(
            self.context,
            program,
            solution,
            self._lab,
            uniform=uniform.solution,
            uniform_name=uniform.name,
            bound=self.bound,
        )

    def allows(self, plan: LayoutPlan) -> bool:
        """Whether a plan of this model uses candidates of the run only."""
        ids = {op.name: op.id for op in self.context.graph.ops}
        chosen = {op.id: op.choice for op in plan.ops}
        # A frozen kernel may have no entry.
        return all(chosen.get(ids[node.root]) in node.choices for node in self._skeleton.nodes)

    def empty_plan(self) -> LayoutPlan:
        """The plan of a model without a layout to choose."""
        return make_plan(self.context, build_program(Skeleton((), ()), self._lab), (), self._lab)

    def admits(self, plan: LayoutPlan) -> bool:
        """Whether a plan of this model has its inputs and outputs as they are wanted now."""
        try:
            border = border_of(plan, self.context.graph)
        except PlanError:
            return False
        return self.context.rules.admits(self.context.graph, border)

    def uniforms(self, program: Program) -> list[Uniform]:
        """Uniform assignments of measured kernels, by predicted time."""
        found: dict[tuple[int, ...], Uniform] = {}
        # Where little is measured the assignments nearest to two layouts may be one: it has the name of the nearer.
        solutions = [(lay, uniform_solution(program.nodes, program.problem, lay)) for lay in self._layouts]
        known = [(_foreign(program, s, lay), i, lay, s) for i, (lay, s) in enumerate(solutions) if s is not None]
        for _, _, layout, solution in sorted(known, key=lambda entry: entry[:2]):
            total = program.problem.evaluate(solution).total
            if total < float("inf"):
                found.setdefault(solution, Uniform(str(layout), solution, total))
        return sorted(found.values(), key=lambda uniform: uniform.predicted_us)

    @property
    def _limit_s(self) -> float:
        """Seconds for one solution: a small part of what is left, or building the finalists has no time."""
        return min(_SOLVE_S, max(1.0, self._budget.left_s / 60))

    def _solve(self, trials: int) -> tuple[Program, list[tuple[int, ...]]]:
        """The best assignments, measuring the transforms they use until they use measured ones only."""
        self._reporter.stage("transforms", _TRANSFORM_ROUNDS + _DIVERSE_ROUNDS)
        for _ in range(_TRANSFORM_ROUNDS):
            program = self.program()
            best = solve(program.problem, time_limit_s=self._limit_s)
            if not self._measure_used(program, [best.assignment, *(u.solution for u in self.uniforms(program)[:2])]):
                break
        anchors = {op.name for op in self.context.graph.anchors}
        changing = [i for i, node in enumerate(program.nodes) if node.root in anchors]
        found = [best.assignment]
        for _ in range(_DIVERSE_ROUNDS if trials > 1 else 0):
            program = self.program()
            best = solve(program.problem, time_limit_s=self._limit_s)
            others = best_assignments(
                program.problem, _SIZE * trials, min_changes=_MIN_CHANGES, changing=changing, time_limit_s=self._limit_s
            )
            found = list(dict.fromkeys([best.assignment, *(s.assignment for s in others)]))[: _SIZE * trials]
            if not self._measure_used(program, found):
                break
        return program, found

    def _measure_used(self, program: Program, solutions: Sequence[Sequence[int]]) -> bool:
        """Measure the transforms of some solutions; False if there was nothing to measure or no time for it."""
        used = [key for solution in solutions for key in program.transforms(solution)]
        unknown = [k for k in used if not (self._lab.transform(k).tries or self._lab.transform(k).closed)]
        self._reporter.step(f"{len(set(unknown))} transforms to measure")
        if unknown and not self._budget.interrupted:
            self._lab.measure_transforms(unknown)
            return True
        return False

    def _why_none(self, program: Program) -> str:
        for node, costs in zip(program.nodes, program.problem.nodes, strict=False):
            if min(costs.costs) == float("inf"):
                known = [self._lab.of(node.workload, choice) for choice in node.choices]
                reasons = [k.reason for k in known] + [m.error for k in known for m in k.tries.values()]
                why = next(filter(None, reasons), "there was no time; give a longer --time-budget")
                return f"no candidate of {node.workload.summary} could be measured: {why}"
        return "no uniform assignment could be measured; give a longer --time-budget"


def _foreign(program: Program, solution: Sequence[int], layout: Layout) -> int:
    """How many kernels of a solution make another layout."""
    of_kernels = program.skeleton.of_kernels(solution)
    chosen = (node.choices[index] for node, index in zip(program.nodes, of_kernels, strict=True))
    return sum(c is not None and c.out != layout for c in chosen)
