"""Lazy exact search: solve under what is believed, measure what the optimum counts on, until it is settled.

The exact solver is cheap and measurements are not. So every batch of measurements is chosen with some hundred exact
optima under costs drawn from the posterior (Thompson sampling), and the same draws say how far the best assignment can
still be from the optimum. A search that stops when its gap is small has usually measured a small part of the space.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np

from layoutsearch.cost.bounds import Bounds
from layoutsearch.cost.improvement import FULL_TRIES
from layoutsearch.cost.model import CostModel
from layoutsearch.layout.transform import TransformKey
from layoutsearch.search import racing
from layoutsearch.search.batch import BatchSolver
from layoutsearch.search.beliefs import REFINED, Beliefs, Refit
from layoutsearch.search.budget import Budget
from layoutsearch.search.gap import Draws, SearchState, judge, solved_draws
from layoutsearch.search.known import Lab, Request
from layoutsearch.search.racing import FIRST_TRIES, REFINE_SAMPLES
from layoutsearch.search.reporter import Reporter, Silent
from layoutsearch.search.skeleton import Skeleton

# Draws behind a state: the 5 % quantile rests on a dozen of them, and solving them takes some hundredths of a second.
_DRAWS = 256
# The same where each instance is solved alone: some tenths of a second each.
_DRAWS_ALONE = 40
# More schedules than any candidate has.
_EVERY = 1_000_000
# Part of the drawn optima that have to use a candidate for it to be timed again at the end.
_CONTENDS = 0.05


class LazySearch:
    """Finds the best assignment of a skeleton with few measurements.

    Everything is a function of the seed and of what the lab knows, so that a search that was killed goes on as if it
    had not been.

    Args:
        skeleton: the layout problem.
        lab: measures, and remembers.
        model: predicts what is not measured; without one, the base of the cost model with its wide prior.
        bounds: what nothing can beat.
        seed: of all draws.
        gap: to stop at.
        batch: steps that are measured together; twice the number of build workers keeps them busy.
        refit: where there is no model: makes one, of no rows first and of this run's when there are enough. The
            default fits with the profile of `bounds`. A model of other runs is not fitted again: what this run says of
            its errors is in the posterior, and would not be if the model had seen it.
        reporter: hears of stages and steps.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        lab: Lab,
        model: CostModel | None = None,
        bounds: Bounds | None = None,
        *,
        seed: int = 0,
        gap: float = 0.01,
        batch: int = racing.BATCH,
        refit: Refit | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        self._lab, self._seed, self._wanted, self._batch = lab, seed, gap, batch
        self._reporter = reporter or Silent()
        profile = bounds.profile if bounds else None
        if model is None:
            refit = refit or (lambda kernels, transforms: CostModel.fit(kernels, transforms, profile))
            model = refit((), ())
        else:
            refit = None
        self.solver = BatchSolver(skeleton)
        self.index = self.solver.index
        self.beliefs = Beliefs(self.index, lab, model, bounds, refit)
        self._judged: tuple[SearchState, Draws] | None = None

    @property
    def digest(self) -> str:
        """Changes with what a search that came to its end has looked into: all candidates, and how far it goes."""
        pairs = [(w.key, str(c)) for w, c in self.index.pairs]
        moves = [(k.workload, k.candidate) for k in self.index.transforms]
        about = [pairs, moves, self._wanted, self._seed, _DRAWS, REFINED, REFINE_SAMPLES, FIRST_TRIES, FULL_TRIES]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]

    def propose(self, rng: np.random.Generator) -> tuple[int, ...]:
        """An assignment that is optimal under costs drawn from what is believed (Thompson sampling).

        Raises:
            NoAssignmentError: nothing that can be used is left of some kernel.
        """
        self._update()
        kernels, transforms = self.beliefs.draw(rng, 1)
        return self.solver.solve_one(kernels[0], transforms[0])[0]

    def requests(self, solution: Sequence[int], *, frozen: bool = False) -> tuple[list[Request], list[TransformKey]]:
        """What an assignment uses and is not measured yet, each once.

        Args:
            solution: candidate of every node.
            frozen: with kernels that have no choice.
        """
        self._update()
        measured, moved = self.beliefs.measured, self.beliefs.moved
        used = [k for k in dict.fromkeys(self.index.used(solution).tolist()) if not measured[k]]
        wanted = [k for k in used if frozen or self.index.free[k]]
        paid = self.index.pays(np.array([solution], dtype=np.intp))[0] > 0
        requests = []
        for k in wanted:
            workload, choice = self.index.pairs[k]
            requests.append(Request(workload, choice, FIRST_TRIES if self.index.free[k] else 1))
        return requests, [self.index.transforms[k] for k in np.flatnonzero(paid & ~moved)]

    def evaluate(self, solution: Sequence[int]) -> float:
        """Cost of an assignment in us: measured where it is measured, else expected; `inf` if it does not run."""
        self._update()
        return float(self.index.cost(solution, *self.beliefs.present()))

    def state(self) -> SearchState:
        """Where the search stands.

        Raises:
            NoAssignmentError: nothing that can be used is left of some kernel.
        """
        return self._judge()[0]

    def finished(self) -> bool:
        """Whether the gap is as wanted, and all of the solution is measured."""
        state = self.state()
        return state.gap <= self._wanted and not any(self.requests(state.solution, frozen=True))

    def next_batch(self, new: int | None = None) -> list[racing.Step]:
        """What to measure next, best first; empty if nothing can change the optimum any more.

        Args:
            new: at most so many candidates that were not tried yet, of kernels with a choice; any number if None.
        """
        found = racing.steps(self.index, self.beliefs, *self._judge())
        if new is not None:
            fresh = [s for s in found if s.pair is not None and self._is_new(s.pair)]
            late = {s.pair for s in fresh[new:]}
            found = [s for s in found if s.pair is None or s.pair not in late]
        return racing.batch(found, self._batch)

    def exhaust(self) -> SearchState:
        """Measure everything there is: then the solution is the optimum, and both bounds are its cost."""
        self._lab.measure([Request(workload, choice, _EVERY) for workload, choice in self.index.pairs])
        self._lab.measure_transforms(self.index.transforms)
        self._update()
        while self._again(range(len(self.index.pairs)), None, 0.0, _EVERY):
            pass
        return self.state()

    def _is_new(self, pair: int) -> bool:
        return bool(self.index.free[pair]) and not self.beliefs.measured[pair]

    def run(self, budget: Budget, reserve_s: float = 0.0) -> SearchState:
        """Search to the wanted gap, or until the budget is over but for `reserve_s` seconds.

        Ends with `finish`.
        """
        self._reporter.stage("kernels", self.state().candidates)
        while self._explore(budget, reserve_s):
            # What is timed again may turn out slower, and others be worth a look.
            if self.finish(budget, reserve_s).gap <= self._wanted:
                break
        return self.finish(budget, reserve_s)

    def _explore(self, budget: Budget, reserve_s: float) -> bool:
        """Measure until the gap is as wanted, or nothing that is left matters; whether anything was measured."""
        any_measured = False
        while not budget.over(reserve_s) and self.state().gap > self._wanted:
            found = self.next_batch()
            if not found or not self.measure(found, budget, reserve_s):
                break
            any_measured = True
            state = self.state()
            self._reporter.best(
                f"{state.cost_us / 1e3:.3f} ms, gap {state.gap:.1%}, {state.measured} of {state.candidates} candidates"
            )
        return any_measured

    def finish(self, budget: Budget, reserve_s: float = 0.0) -> SearchState:
        """Measure what the best assignment uses, and time the contenders again, as far as the budget goes."""
        while True:
            self._settle(budget, reserve_s)
            if self._doubt(budget, reserve_s):
                continue
            pairs = self._contenders()
            if budget.over(reserve_s) or not pairs:
                return self.state()
            self._reporter.stage("kernels, again", len(pairs))
            if not self._again(pairs, budget, reserve_s):
                return self.state()

    def measure(self, found: Sequence[racing.Step], budget: Budget | None = None, reserve_s: float = 0.0) -> bool:
        """Take steps; whether anything became known."""
        fresh = [s.what for s in found if isinstance(s.what, Request) and not s.again]
        self._lab.measure(fresh, reserve_s)
        self._lab.measure_transforms([s.what for s in found if isinstance(s.what, TransformKey)], reserve_s)
        return self._again([s.pair for s in found if s.again and s.pair is not None], budget, reserve_s)

    def _settle(self, budget: Budget, reserve_s: float) -> None:
        """Measure what the best assignment uses, until it uses measured costs only."""
        while not budget.over(reserve_s):
            requests, keys = self.requests(self.state().solution, frozen=True)
            if not requests and not keys:
                return
            self._lab.measure(requests, reserve_s)
            self._lab.measure_transforms(keys, reserve_s)
            if not self._update():
                return

    def _doubt(self, budget: Budget, reserve_s: float) -> bool:
        """Time again what may have been disturbed; whether anything became known."""
        if budget.over(reserve_s):
            return False
        pairs, keys = self.beliefs.doubtful()
        self._lab.measure_transforms_again(keys, reserve_s)
        return self._again(pairs, budget, reserve_s) if pairs else self._update()

    def _contenders(self) -> list[int]:
        """What may be in the optimum and was timed in haste: the fastest of many such times is the luckiest as well."""
        state, draws = self._judge()
        often = (draws.uses > 0).mean(axis=0)
        often[self.index.used(state.solution)] = 1.0
        found = np.flatnonzero((often >= _CONTENDS) & (self.beliefs.kernel_evidence.noise > 0))
        return [int(k) for k in found]

    def _again(self, pairs: Sequence[int], budget: Budget | None, reserve_s: float, schedules: int = REFINED) -> bool:
        """Time the fastest schedules of some pairs again; whether anything became known, by this or before it."""
        before = {k: self.beliefs.hasty(k) for k in pairs}
        requests = [Request(*self.index.pairs[k], schedules) for k in pairs]
        self._lab.refine(requests, REFINE_SAMPLES, reserve_s)
        if budget is None or not budget.over(reserve_s):
            # What is as it was had its samples; it will not become more certain than this.
            for k, hasty in before.items():
                now = self._lab.of(*self.index.pairs[k]).tries
                self.beliefs.take_as_certain(k, [s for s, measurement in hasty.items() if now[s] == measurement])
        return self._update()

    def _update(self) -> bool:
        changed = self.beliefs.update()
        if changed:
            self._judged = None
        return changed

    def _judge(self) -> tuple[SearchState, Draws]:
        self._update()
        if self._judged is None:
            size = _DRAWS if self.solver.width is not None else _DRAWS_ALONE
            # The same numbers each time: a state depends on what is known, not on how often it was asked for.
            draws = solved_draws(self.solver, self.beliefs, np.random.default_rng(self._seed), size)
            self._judged = judge(self.solver, self.beliefs, draws), draws
        return self._judged
