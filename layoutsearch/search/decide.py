"""From measured kernels to the plan: time the most promising assignments whole, compare with the best uniform."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from layoutsearch.cost.correction import Correction, WholeRow
from layoutsearch.cost.machine import Machine
from layoutsearch.cost.whole import relative_to_best
from layoutsearch.errors import PlanError
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.search.acceptance import FINAL_ROUNDS, FINAL_STARTS, ROUNDS_PER_START, compare
from layoutsearch.search.assemble import Program
from layoutsearch.search.budget import Budget
from layoutsearch.search.export import Verdict, validated
from layoutsearch.search.finals import Samples, WholeTimes, decisions, plan_digest
from layoutsearch.search.known import Lab
from layoutsearch.search.pool import Entrant, Pool
from layoutsearch.search.refine import Refinement
from layoutsearch.search.reporter import Reporter
from layoutsearch.search.residuals import CorrectedResiduals, shape_of
from layoutsearch.search.runfile import RunFile
from layoutsearch.search.variants import Variant
from layoutsearch.search.whole import Built, Whole

# Assignments built and timed side by side with the best so far.
_BATCH = 3
# What the last comparison takes, over ten process starts, until it is known what one takes; and at least.
_FINAL_S, _LEAST_FINAL_S = 25.0, 10.0
_SIEVE_ROUNDS = 12
# Loading takes as long for half of the rounds.
_OF_A_SIEVE = 0.75


class Improvement(Protocol):
    """Makes finalists faster by what can only be told within the whole model."""

    @property
    def about(self) -> str:
        """Equal for runs that try the same; empty where there is nothing to try."""

    @property
    def wanted_s(self) -> float:
        """Seconds to keep for it."""

    @property
    def is_complete(self) -> bool:
        """Whether there was time for all of it, in what was improved so far."""

    def improve(
        self, plans: Mapping[str, LayoutPlan], built: Mapping[str, Built], seed: int, reserve_s: float
    ) -> dict[str, Variant]:
        """The finalists that are faster so, by label; `reserve_s` seconds are kept for what comes after."""


class Decision:
    """What is done with the measured kernels of a run. `folder` gets plan.json and the uniform plans.

    Afterwards `timed` has the assignments that were timed whole with their microseconds, `wholes` the same as rows to
    learn from, and `is_uncontested` says that there was no time for anything but uniform ones.

    Args:
        pool: makes the assignments, and plans of them.
        lab: knows kernels and transforms.
        whole: builds and times whole models.
        times: keeps whole timings.
        correction: what is known of how far whole models are from the sum of their parts.
        machine: the device.
        folder: of the run.
        budget: when to stop.
        reporter: told of progress.
        improvements: of the finalists, one after the other; where time is short the first ones have it.
    """

    def __init__(
        self,
        pool: Pool,
        lab: Lab,
        whole: Whole,
        times: WholeTimes,
        correction: Correction,
        machine: Machine,
        folder: Path,
        budget: Budget,
        reporter: Reporter,
        improvements: Sequence[Improvement] = (),
    ) -> None:
        self._improvements = improvements
        self._pool, self._lab, self._whole, self._times = pool, lab, whole, times
        self._correction, self._machine = correction, machine
        self._folder, self._budget, self._reporter = folder, budget, reporter
        self._sieved: dict[str, tuple[float, ...]] = {}
        self.wholes: list[WholeRow] = []
        self.timed: list[tuple[tuple[int, ...], float]] = []
        self.is_uncontested = False
        self._start_s: float | None = None

    @property
    def path(self) -> Path:
        """Where the best validated plan lies."""
        return self._folder / "plan.json"

    @property
    def _final_s(self) -> float:
        """Seconds that the last comparison takes: two models in each of its starts, for half of a sieve's rounds."""
        if self._start_s is None:
            return _FINAL_S
        return max(_LEAST_FINAL_S, _OF_A_SIEVE * 2 * FINAL_STARTS * self._start_s)

    @property
    def improving_s(self) -> float:
        """Seconds that improving the finalists takes."""
        return sum(step.wanted_s for step in self._improvements)

    def incumbent(self, max_rel_error: float) -> LayoutPlan | None:
        """The plan of an earlier run for the same model, target and device, if one lies there and can still be used.

        Not one that is off by more than is allowed now, nor one that the rules of this run do not allow, nor one with
        inputs or outputs in other layouts.
        """
        try:
            plan = LayoutPlan.load(self.path)
        except PlanError:
            return None
        empty = self._pool.empty_plan()
        same = all(getattr(plan, part) == getattr(empty, part) for part in ("target", "device", "fingerprint"))
        exact = (plan.validation["max_rel_error"] or 0.0) <= max_rel_error
        allowed = self._pool.allows(plan) and self._pool.admits(plan)
        return plan if same and exact and plan.ops and allowed else None

    def first_plan(self) -> LayoutPlan | None:
        """A validated uniform plan on disk early, so that a run that is stopped leaves something to use.

        None if a kernel has not been measured in any layout yet, or if the plan does not build.
        """
        program = self._pool.program()
        uniforms = self._pool.uniforms(program)
        if not uniforms:
            return None
        first = uniforms[0]
        self._reporter.stage("first plan", 2)
        label = f"uniform {first.name}"
        plan = self._pool.plan(program, first.solution, first)
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
        plan = self._pool.empty_plan()
        built = self._whole.build({"original": plan})
        if not built:
            return None
        plan = validated(plan, Verdict("original", (), (), None, built["original"].max_rel_error, False))
        plan.save(self.path)
        return plan

    def decide(self, trials: int, seed: int, incumbent: LayoutPlan | None, run_file: RunFile) -> LayoutPlan | None:
        """The winner, validated and saved; None if nothing could be built, or the user stopped the run.

        Up to `trials` assignments are timed whole beside the uniform ones; see `search.refine`. An `incumbent`, the
        plan of an earlier run, competes with them. Where all that compete are those of that run, and the weights too,
        its verdict stands and nothing is timed again.

        Raises:
            LayoutSearchError: a kernel could not be measured in any layout.
        """
        program, entrants = self._pool.entrants(trials)
        finalists = self._digest(entrants, trials, seed)
        if incumbent is not None and run_file.is_settled("finalists", finalists):
            self._reporter.best("that of the last run, which had the same finalists")
            return incumbent
        winner = self._contest(program, entrants, incumbent, trials, seed)
        is_complete = all(step.is_complete for step in self._improvements)
        if winner is not None and is_complete and not self._budget.over():
            run_file.settle("finalists", finalists)
        return winner

    def _digest(self, entrants: Sequence[Entrant], trials: int, seed: int) -> str:
        parts = [seed, trials, self._whole.weights, *sorted(entrant.digest for entrant in entrants)]
        # A run of before there were these has not tried them.
        parts += [step.about for step in self._improvements if step.about]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def _contest(
        self, program: Program, entrants: list[Entrant], incumbent: LayoutPlan | None, trials: int, seed: int
    ) -> LayoutPlan | None:
        shapes = relative_to_best([shape_of(program, e.solution, self._lab, self._machine) for e in entrants])
        residuals = CorrectedResiduals(self._correction, shapes, self._pool.context.fingerprint)
        refinement = Refinement([shape.additive_us for shape in shapes], residuals)
        built = self._refine(refinement, entrants, trials, seed)
        if built is None:
            return None
        self.wholes = residuals.rows(refinement.observed)
        self.timed = [(entrants[i].solution, refinement.measured_us(i)) for i in refinement.timed]
        timed = [i for i in refinement.timed if entrants[i].label in built]
        uniform = [i for i in timed if entrants[i].is_uniform]
        if not uniform:
            return None
        baseline = entrants[min(uniform, key=refinement.measured_us)]
        others = [i for i in timed if not entrants[i].is_uniform]
        self.is_uncontested = not others and self._budget.over() and len(entrants) > len(uniform)
        challenger = entrants[min(others, key=refinement.measured_us)] if others else None
        plans = {e.label: e.plan for e in (baseline, challenger) if e is not None}
        self._improve(plans, built, seed)
        previous = self._previous(incumbent, [*(e.plan for e in entrants), *plans.values()])
        if previous is not None:
            built.update(self._whole.build({"previous plan": previous}))
            plans["previous plan"] = previous
        return self._final(baseline.label, {label: p for label, p in plans.items() if label in built}, built, seed)

    def _refine(
        self, refinement: Refinement, entrants: Sequence[Entrant], trials: int, seed: int
    ) -> dict[str, Built] | None:
        """Time whole what is worth it; what was built, None if the user stopped the run."""
        position = {entrant.digest: i for i, entrant in enumerate(entrants)}
        for run in self._times.runs("sieve"):
            known = {position[digest]: samples for digest, samples in run.items() if digest in position}
            refinement.observe(known)
            self._sieved.update({entrants[i].label: samples for i, samples in known.items()})
        self._reporter.stage("whole models", trials + _SIEVE_ROUNDS)
        built: dict[str, Built] = {}
        uniforms = [i for i, entrant in enumerate(entrants) if entrant.is_uniform]
        left = trials - sum(i not in uniforms for i in refinement.timed)
        while True:
            before = self._budget.elapsed_s
            fresh = [i for i in uniforms if i not in refinement.timed and not refinement.is_excluded(i)]
            wanted = [*fresh, *(i for i in refinement.next(max(0, min(_BATCH, left))).indices if i not in uniforms)]
            best = refinement.best
            anchor = [] if best is None else [best]
            if not self._build([*wanted, *anchor], entrants, built):
                return None
            for index in wanted:
                if entrants[index].label not in built:
                    refinement.exclude(index)
            wanted = [i for i in wanted if entrants[i].label in built]
            if not wanted:
                break
            self._sieve(refinement, [*wanted, *anchor], entrants, built, seed)
            left -= sum(i not in uniforms for i in wanted)
            # What is best is of no use without the time to show it.
            if self._budget.over(self._final_s + self.improving_s + self._budget.elapsed_s - before):
                break
        # The finalists may be known from records, and not built yet.
        best_of = [
            min(
                (i for i in refinement.timed if entrants[i].is_uniform == kind),
                key=refinement.measured_us,
                default=None,
            )
            for kind in (True, False)
        ]
        return built if self._build([i for i in best_of if i is not None], entrants, built) else None

    def _sieve(
        self,
        refinement: Refinement,
        indices: Sequence[int],
        entrants: Sequence[Entrant],
        built: Mapping[str, Built],
        seed: int,
    ) -> None:
        before = self._budget.elapsed_s
        samples = self._whole.time({entrants[i].label: built[entrants[i].label] for i in indices}, _SIEVE_ROUNDS, seed)
        self._start_s = (self._budget.elapsed_s - before) / len(indices)
        self._sieved.update(samples)
        by_digest = {entrants[i].digest: samples[entrants[i].label] for i in indices if entrants[i].label in samples}
        self._times.add("sieve", by_digest)
        refinement.observe({i: samples[entrants[i].label] for i in indices if entrants[i].label in samples})
        for index in indices:
            if entrants[index].label not in samples:
                refinement.exclude(index)
        best = refinement.best
        if best is not None:
            self._reporter.best(f"{entrants[best].label}: {refinement.measured_us(best) / 1e3:.3f} ms whole")

    def _build(self, indices: Sequence[int], entrants: Sequence[Entrant], built: dict[str, Built]) -> bool:
        """Build what is not built yet; False if the user stopped the run."""
        todo = {entrants[i].label: entrants[i].plan for i in indices if entrants[i].label not in built}
        fresh = self._whole.build(todo) if todo else {}
        if self._budget.interrupted:
            return False
        built.update(fresh)
        for label, found in fresh.items():
            self._save_uniform(label, todo[label], found)
        return True

    def _improve(self, plans: dict[str, LayoutPlan], built: dict[str, Built], seed: int) -> None:
        """Put what is faster than a finalist in its place."""
        for step in self._improvements:
            finalists = {label: plan for label, plan in plans.items() if label in built}
            for label, found in step.improve(finalists, built, seed, self._final_s).items():
                plans[label], built[label] = found.plan, found.built
                self._sieved[label] = found.samples
                self._save_uniform(label, found.plan, found.built)

    def _save_uniform(self, label: str, plan: LayoutPlan, built: Built) -> None:
        if label.startswith("uniform"):
            plan = validated(plan, Verdict(label, (), (), None, built.max_rel_error, False))
            plan.save(self._folder / "uniform" / f"{label.split()[-1]}.json")

    def _previous(self, incumbent: LayoutPlan | None, plans: Sequence[LayoutPlan]) -> LayoutPlan | None:
        known = incumbent is None or any(decisions(incumbent) == decisions(plan) for plan in plans)
        return None if known else incumbent

    def _final(
        self, baseline: str, plans: Mapping[str, LayoutPlan], built: Mapping[str, Built], seed: int
    ) -> LayoutPlan:
        """Fresh rounds of the baseline and what may replace it: the samples that chose a challenger flatter it."""
        winner, comparison = baseline, None
        samples: Samples = self._sieved
        if len(plans) > 1:
            samples = self._final_samples(plans, built, seed)
            # Where two challenge the baseline, each has half of the chance to win by luck.
            confidence = 1 - 0.05 / (len(samples) - 1) if len(samples) > 1 else 0.95
            for label in (name for name in samples if name != baseline and baseline in samples):
                found = compare(
                    samples[baseline], samples[label], per_start=ROUNDS_PER_START, confidence=confidence, seed=seed
                )
                if found.accepted and (comparison is None or found.speedup > comparison.speedup):
                    winner, comparison = label, found
        verdict = Verdict(
            baseline,
            samples.get(baseline, ()),
            samples.get(winner, ()),
            comparison,
            built[winner].max_rel_error,
            comparison is not None,
        )
        plan = validated(plans[winner], verdict)
        plan.save(self.path)
        return plan

    def _final_samples(self, plans: Mapping[str, LayoutPlan], built: Mapping[str, Built], seed: int) -> Samples:
        digests = {plan_digest(plan): label for label, plan in plans.items()}
        for run in self._times.runs("final"):
            if run.keys() == digests.keys():
                return {digests[digest]: values for digest, values in run.items()}
        # A comparison that is cut short accepts nothing, and all that was found would be lost.
        finalists = {label: built[label] for label in plans}
        samples = self._whole.time(finalists, FINAL_ROUNDS, seed + 1, FINAL_STARTS, finish=True)
        if len(samples) == len(plans) and not self._budget.interrupted:
            self._times.add("final", {plan_digest(plans[label]): values for label, values in samples.items()})
        return samples
