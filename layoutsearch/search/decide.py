"""From measured kernels to the plan: solve, build the best few whole, compare with the best uniform layout."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from layoutsearch.errors import LayoutSearchError, PlanError
from layoutsearch.layout.layout import Layout
from layoutsearch.measure.records import ModelRecord, RecordContext, RecordStore
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.search.acceptance import compare
from layoutsearch.search.assemble import Program, build_program
from layoutsearch.search.budget import Budget
from layoutsearch.search.diverse import best_assignments
from layoutsearch.search.export import PlanContext, Verdict, make_plan, validated
from layoutsearch.search.known import Lab
from layoutsearch.search.problem import NoAssignmentError
from layoutsearch.search.reporter import Reporter
from layoutsearch.search.runfile import RunFile
from layoutsearch.search.skeleton import Skeleton, build_skeleton, uniform_solution
from layoutsearch.search.solve import solve
from layoutsearch.search.whole import Built, Whole
from layoutsearch.search.workloads import KernelNode

_TRANSFORM_ROUNDS = 12
_DIVERSE_ROUNDS = 3
_SOLVE_S = 20.0
_MIN_CHANGES = 3
_SIEVE_ROUNDS = 12
_FINAL_ROUNDS = 40
_FINAL_STARTS = 4


@dataclass(frozen=True)
class Uniform:
    """A uniform assignment: every kernel in the candidate nearest to one layout."""

    name: str
    solution: tuple[int, ...]
    predicted_us: float


def _decisions(plan: LayoutPlan) -> list[object]:
    """What of a plan changes the compiled model."""
    return [(op.id, op.choice, op.schedule) for op in plan.ops]


class Decision:
    """What is done with the measured kernels of a run. `folder` gets plan.json and the uniform plans."""

    def __init__(
        self,
        context: PlanContext,
        nodes: Sequence[KernelNode],
        layouts: Sequence[Layout],
        lab: Lab,
        whole: Whole,
        store: RecordStore,
        record_context: RecordContext,
        folder: Path,
        budget: Budget,
        reporter: Reporter,
    ) -> None:
        self._context, self._nodes, self._layouts = context, tuple(nodes), tuple(layouts)
        self._skeleton = build_skeleton(context.graph, nodes)
        self._lab, self._whole = lab, whole
        self._store, self._record_context = store, record_context
        self._folder, self._budget, self._reporter = folder, budget, reporter

    @property
    def path(self) -> Path:
        """Where the best validated plan lies."""
        return self._folder / "plan.json"

    def incumbent(self) -> LayoutPlan | None:
        """The plan of an earlier run for the same model, target and device, if one lies there and can still be used."""
        try:
            plan = LayoutPlan.load(self.path)
        except PlanError:
            return None
        empty = self._plan_of_nothing()
        same = all(getattr(plan, part) == getattr(empty, part) for part in ("target", "device", "fingerprint"))
        return plan if same and plan.ops else None

    def first_plan(self) -> LayoutPlan | None:
        """A validated uniform plan on disk early, so that a run that is stopped leaves something to use.

        None if a kernel has not been measured in any layout yet, or if the plan does not build.
        """
        program = self._program()
        uniforms = self._uniforms(program)
        if not uniforms:
            return None
        first = uniforms[0]
        self._reporter.stage("first plan", 2)
        label = f"uniform {first.name}"
        plan = self._plan(program, first.solution, first)
        built = self._whole.build({label: plan})
        if not built:
            return None
        Path(built[label].path).unlink(missing_ok=True)
        plan = validated(plan, Verdict(label, (), (), None, built[label].max_rel_error, False))
        plan.save(self.path)
        self._reporter.best(f"{label} validated")
        return plan

    def empty_plan(self) -> LayoutPlan | None:
        """The plan of a model without a layout to choose."""
        plan = self._plan_of_nothing()
        built = self._whole.build({"original": plan})
        if not built:
            return None
        plan = validated(plan, Verdict("original", (), (), None, built["original"].max_rel_error, False))
        plan.save(self.path)
        return plan

    def _plan_of_nothing(self) -> LayoutPlan:
        program = build_program(Skeleton((), ()), self._lab)
        return make_plan(self._context, program, (), self._lab)

    def decide(self, trials: int, seed: int, incumbent: LayoutPlan | None, run_file: RunFile) -> LayoutPlan | None:
        """The winner, validated and saved; None if nothing could be built, or the user stopped the run.

        An `incumbent`, the plan of an earlier run, competes with the assignments. Where the finalists are those of that
        run, and the weights too, its verdict stands and nothing is timed again.

        Raises:
            LayoutSearchError: a kernel could not be measured in any layout.
        """
        try:
            program, bound, solutions = self._solve(trials)
        except NoAssignmentError:
            raise LayoutSearchError(self._why_none(self._program())) from None
        uniforms = self._uniforms(program)
        if not uniforms:
            raise LayoutSearchError(self._why_none(program))
        reference = uniforms[0]
        # NCHW is what most users have today, so it is always built as well.
        kept = uniforms[:2] + [u for u in uniforms[2:] if u.name == "NCHW"]
        plans = {f"uniform {u.name}": self._plan(program, u.solution, u) for u in kept}
        known = {u.solution for u in kept}
        for number, solution in enumerate(s for s in solutions if s not in known):
            plans[f"assignment {number + 1}"] = self._plan(program, solution, reference, bound)
        finalists = self._digest(plans, seed)
        if incumbent is not None and run_file.is_settled("finalists", finalists):
            self._reporter.best("that of the last run, which had the same finalists")
            return incumbent
        if incumbent is not None and all(_decisions(incumbent) != _decisions(plan) for plan in plans.values()):
            plans["previous plan"] = incumbent
        self._reporter.stage("whole models", len(plans) + _SIEVE_ROUNDS + _FINAL_ROUNDS)
        built = self._whole.build(plans)
        if self._budget.interrupted:
            return None
        for label in built:
            if label.startswith("uniform"):
                verdict = Verdict(label, (), (), None, built[label].max_rel_error, False)
                validated(plans[label], verdict).save(self._folder / "uniform" / f"{label.split()[-1]}.json")
        winner = self._compare(plans, built, seed)
        if winner is not None and not self._budget.over():
            run_file.settle("finalists", finalists)
        return winner

    def _digest(self, plans: Mapping[str, LayoutPlan], seed: int) -> str:
        parts = [seed, self._whole.weights, *sorted(repr(_decisions(plan)) for plan in plans.values())]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def _compare(self, plans: Mapping[str, LayoutPlan], built: Mapping[str, Built], seed: int) -> LayoutPlan | None:
        if not any(label.startswith("uniform") for label in built):
            return None
        sieve = self._time(built, _SIEVE_ROUNDS, seed)
        uniforms = [label for label in sieve if label.startswith("uniform")]
        contenders = [label for label in sieve if not label.startswith("uniform")]
        if not uniforms:
            return None
        baseline = min(uniforms, key=lambda label: float(np.median(sieve[label])))
        verdict = Verdict(baseline, sieve[baseline], sieve[baseline], None, built[baseline].max_rel_error, False)
        winner = baseline
        if contenders:
            challenger = min(contenders, key=lambda label: float(np.median(sieve[label])))
            self._reporter.best(f"{challenger}: {np.median(sieve[challenger]) / 1e3:.3f} ms, against {baseline}")
            # Fresh rounds: the samples that chose the challenger would flatter it.
            final = self._time(
                {label: built[label] for label in (baseline, challenger)}, _FINAL_ROUNDS, seed + 1, _FINAL_STARTS
            )
            if len(final) == 2:
                comparison = compare(final[baseline], final[challenger], seed=seed)
                winner = challenger if comparison.accepted else baseline
                verdict = Verdict(
                    baseline,
                    final[baseline],
                    final[winner],
                    comparison if comparison.accepted else None,
                    built[winner].max_rel_error,
                    comparison.accepted,
                )
        plan = validated(plans[winner], verdict)
        plan.save(self.path)
        return plan

    def _time(
        self, built: Mapping[str, Built], rounds: int, seed: int, starts: int = 1
    ) -> dict[str, tuple[float, ...]]:
        samples = self._whole.time(built, rounds, seed, starts)
        self._store.add_models(ModelRecord(self._record_context, self._context.fingerprint, samples))
        return samples

    def _program(self) -> Program:
        return build_program(self._skeleton, self._lab)

    def _plan(
        self, program: Program, solution: Sequence[int], uniform: Uniform, bound: float | None = None
    ) -> LayoutPlan:
        return make_plan(
            self._context,
            program,
            solution,
            self._lab,
            uniform=uniform.solution,
            uniform_name=uniform.name,
            lower_bound_us=bound,
        )

    def _uniforms(self, program: Program) -> list[Uniform]:
        """Uniform assignments of measured kernels, by predicted time."""
        found: dict[tuple[int, ...], Uniform] = {}
        for layout in self._layouts:
            solution = uniform_solution(self._nodes, program.problem, layout)
            if solution is None:
                continue
            total = program.problem.evaluate(solution).total
            if total < float("inf"):
                found.setdefault(solution, Uniform(str(layout), solution, total))
        return sorted(found.values(), key=lambda uniform: uniform.predicted_us)

    def _solve(self, trials: int) -> tuple[Program, float, list[tuple[int, ...]]]:
        """The best assignments, measuring the transforms they use until they use measured ones only."""
        self._reporter.stage("transforms", _TRANSFORM_ROUNDS + _DIVERSE_ROUNDS)
        for _ in range(_TRANSFORM_ROUNDS):
            program = self._program()
            best = solve(program.problem, time_limit_s=_SOLVE_S)
            if not self._measure_used(program, [best.assignment, *(u.solution for u in self._uniforms(program)[:2])]):
                break
        graph = self._context.graph
        changing = [i for i, node in enumerate(self._nodes) if graph.by_name[node.root] in graph.anchors]
        found = [best.assignment]
        for _ in range(_DIVERSE_ROUNDS if trials > 1 else 0):
            program = self._program()
            best = solve(program.problem, time_limit_s=_SOLVE_S)
            others = best_assignments(
                program.problem, trials, min_changes=_MIN_CHANGES, changing=changing, time_limit_s=_SOLVE_S
            )
            found = list(dict.fromkeys([best.assignment, *(s.assignment for s in others)]))[:trials]
            if not self._measure_used(program, found):
                break
        return program, best.lower_bound, found

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
        for node, costs in zip(self._nodes, program.problem.nodes, strict=True):
            if min(costs.costs) == float("inf"):
                known = [self._lab.of(node.workload, choice) for choice in node.choices]
                reasons = [k.reason for k in known] + [m.error for k in known for m in k.tries.values()]
                why = next(filter(None, reasons), "there was no time; give a longer --time-budget")
                return f"no candidate of {node.workload.summary} could be measured: {why}"
        return "no uniform assignment could be measured; give a longer --time-budget"
