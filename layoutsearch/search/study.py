"""The search as an Optuna study: one trial is one whole assignment, its value the additive cost in microseconds."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import optuna
from optuna.exceptions import StorageInternalError
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from layoutsearch.errors import LayoutSearchError
from layoutsearch.layout.transform import TransformKey
from layoutsearch.measure.results import one_line
from layoutsearch.search.budget import Budget
from layoutsearch.search.known import Lab, Request
from layoutsearch.search.parameters import AssignmentSpace
from layoutsearch.search.parts import Parts, parts_of, share_measured
from layoutsearch.search.reporter import Reporter, Silent
from layoutsearch.search.sampler import Proposer, SolverSampler
from layoutsearch.search.skeleton import Skeleton
from layoutsearch.search.storage import quiet, storage_errors
from layoutsearch.search.trials import RETRY, WHY, claim, recover, requeue

SAMPLERS = ("solver", "tpe", "random", "nsga2")
WHOLE_US = "whole_us"

# So many kernels are measured before their sum is compared with the best.
_CHUNK = 8
# So many proposals in a row that bring nothing new settle the search.
_REPEATS = 25

# Measures, or recalls, some parts; False to stop.
Take = Callable[[Parts, Sequence[Request], Sequence[TransformKey]], bool]


class Search(Proposer, Protocol):
    """What a study needs of a search: `LazySearch` is one."""

    def requests(self, solution: Sequence[int]) -> tuple[list[Request], list[TransformKey]]:
        """What a solution uses and is not measured yet."""

    def evaluate(self, solution: Sequence[int]) -> float:
        """Additive cost in microseconds by what is measured; infinite where something of it failed."""

    def finished(self) -> bool:
        """Whether nothing that could still be measured matters."""


def study_name(model: str, fingerprint: str, space: AssignmentSpace, **where: str) -> str:
    """Name of the study of a model in a place: equal if, and only if, its trials can be compared.

    Args:
        model: for people.
        fingerprint: of the canonical module.
        space: the parameters and their choices.
        where: target, device, threads, versions of templates: whatever else a time depends on.
    """
    text = json.dumps([fingerprint, space.digest, sorted(where.items())])
    return f"{model}-{hashlib.sha256(text.encode('utf-8')).hexdigest()[:12]}"


def make_sampler(name: str, space: AssignmentSpace, proposer: Proposer, seed: int | None = None) -> BaseSampler:
    """The sampler of a name: `solver` proposes by the exact solver, the others are Optuna's, for comparison.

    Raises:
        LayoutSearchError: no such sampler.
    """
    if name == "solver":
        return SolverSampler(space, proposer, seed=seed)
    if name == "tpe":
        return TPESampler(seed=seed)
    if name == "random":
        return RandomSampler(seed=seed)
    if name == "nsga2":
        return NSGAIISampler(seed=seed)
    raise LayoutSearchError(f"--sampler {name!r} is unknown; expected one of {', '.join(SAMPLERS)}")


def open_study(storage: BaseStorage, name: str, sampler: BaseSampler, attrs: Mapping[str, str] | None = None) -> Study:
    """Open a study, or begin it. `attrs` are told to people who look at it.

    Raises:
        StorageError: the storage does not answer.
    """
    with quiet(), storage_errors(storage):
        study = optuna.create_study(
            storage=storage, study_name=name, sampler=sampler, direction="minimize", load_if_exists=True
        )
        known = study.user_attrs
        for key, value in {"unit": "us", **(attrs or {})}.items():
            if known.get(key) != value:
                study.set_user_attr(key, value)
    return study


@dataclass(frozen=True)
class StudyOutcome:
    """What a loop over trials came to.

    Attributes:
        trials: told by this process.
        solution: the best assignment of the study, None if no trial of it is complete.
        cost_us: its additive cost as it was told.
        reason: `finished` (the search itself has no more to ask), `settled` (proposals repeat), `trials` (as many as
            were asked for), `budget` or `interrupted`.
    """

    trials: int
    solution: tuple[int, ...] | None
    cost_us: float
    reason: str


class StudySearch:
    """Asks for assignments, measures what they use, tells what they cost.

    Args:
        study: see `open_study`; its sampler proposes.
        storage: that of the study.
        space: parameters of the study.
        skeleton: of the model.
        lab: measures.
        search: tells what an assignment needs and costs.
        budget: when to stop.
        reporter: told of progress.
    """

    def __init__(
        self,
        study: Study,
        storage: BaseStorage,
        space: AssignmentSpace,
        skeleton: Skeleton,
        lab: Lab,
        search: Search,
        budget: Budget,
        reporter: Reporter | None = None,
    ) -> None:
        self._study, self._storage, self._space, self._skeleton = study, storage, space, skeleton
        self._lab, self._search, self._budget = lab, search, budget
        self._reporter = reporter or Silent()
        # Trials that were read, the assignments told by them, and the trials of those that are complete.
        self._read: set[int] = set()
        self._told: set[tuple[int, ...]] = set()
        # Whether the last trial had anything to measure, or to recall.
        self._asked = False
        self._complete: dict[tuple[int, ...], int] = {}
        self._best: tuple[float, tuple[int, ...] | None] = (math.inf, None)
        with storage_errors(storage):
            for note in recover(study, storage, space.distributions):
                self._reporter.note(note)

    def run(
        self,
        *,
        max_trials: int | None = None,
        repeats: int = _REPEATS,
        idle: int | None = None,
        reserve_s: float = 0.0,
    ) -> StudyOutcome:
        """Run trials until the search has finished or settled, or the budget is over but for `reserve_s` seconds.

        A trial in flight when the time is over is told as failed and is the first one of the next run.

        Args:
            max_trials: at most so many.
            repeats: so many assignments in a row that were known and left nothing to measure settle the search.
            idle: so many assignments in a row that left nothing to measure, known or not, do so as well.
            reserve_s: seconds of the budget to leave.
        """
        self._reporter.stage("trials", max_trials or 0)
        with storage_errors(self._storage):
            return self._run(max_trials, repeats, idle, reserve_s)

    def _run(self, max_trials: int | None, repeats: int, idle: int | None, reserve_s: float) -> StudyOutcome:
        count, (repeated, idled) = 0, self._know_again()
        while True:
            reason = self._why_stop(reserve_s)
            settled = repeated >= repeats or (idle is not None and idled >= idle)
            reason = reason or ("trials" if count == max_trials else "settled" if settled else "")
            if reason:
                self._catch_up()
                return StudyOutcome(count, self._best[1], self._best[0], reason)
            fresh = self._trial(reserve_s)
            count, idled = count + 1, 0 if self._asked else idled + 1
            repeated = 0 if fresh else repeated + 1

    def tell(self, solution: Sequence[int]) -> None:
        """Make sure that the study has a trial of an assignment."""
        with storage_errors(self._storage):
            self._catch_up()
            if tuple(solution) not in self._complete:
                self._study.enqueue_trial(self._space.params(solution))
                # What another run has left in the queue comes first.
                for _ in range(len(self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))):
                    self._trial(0.0)

    def note_whole(self, solution: Sequence[int], us: float) -> bool:
        """Remember what an assignment took as a whole model; False if no complete trial of the study has it.

        Optuna lets nothing be added to a finished trial, so it is an attribute of the study: `whole_us/<trial>`.
        """
        self._catch_up()
        number = self._complete.get(tuple(solution))
        if number is not None:
            self._study.set_user_attr(f"{WHOLE_US}/{number}", us)
        return number is not None

    def _why_stop(self, reserve_s: float) -> str:
        if self._budget.interrupted:
            return "interrupted"
        if self._budget.over(reserve_s):
            return "budget"
        return "finished" if self._search.finished() else ""

    def _trial(self, reserve_s: float) -> bool:
        """Run a trial; False if its assignment was known and nothing of it had to be measured."""
        trial = self._study.ask()
        claim(trial)
        with self._told_if_failing(trial):
            for name, distribution in self._space.distributions.items():
                trial.suggest_categorical(name, distribution.choices)
            solution = self._space.solution(trial.params)
            self._catch_up()
            known, before = solution in self._told, self._lab.measured
            parts = self._measure(trial, solution, reserve_s)
            trial.set_user_attr("transforms", len(self._skeleton.transforms(solution)))
            trial.set_user_attr("measured", self._lab.measured - before)
            trial.set_user_attr("share_measured", round(share_measured(self._skeleton, self._lab), 4))
            self._tell(trial, solution, parts, reserve_s)
        self._reporter.step(f"trial {trial.number}")
        return not known or self._lab.measured > before

    def _measure(self, trial: optuna.Trial, solution: tuple[int, ...], reserve_s: float) -> Parts:
        """Measure what a solution needs until its fate is certain or the time is over."""
        steps = itertools.count()
        self._asked = False

        def take(parts: Parts, kernels: Sequence[Request], transforms: Sequence[TransformKey]) -> bool:
            if self._budget.over(reserve_s):
                return False
            self._asked = True
            trial.report(parts.settled_us, next(steps))
            self._reporter.step(f"trial {trial.number}: {parts.open} to measure", 0)
            if kernels:
                self._lab.measure(kernels, reserve_s)
            else:
                self._lab.measure_transforms(transforms, reserve_s)
            return True

        parts = self._follow(solution, take)
        if parts.open:
            trial.report(parts.settled_us, next(steps))
        return parts

    def _follow(self, solution: tuple[int, ...], take: Take) -> Parts:
        """Take what a solution needs, a few kernels at a time, until its fate is certain or `take` says to stop.

        Transforms come last: those of an assignment that is given up need not be measured. The search is asked again
        only where that decides something, since it may have to learn from what was measured.
        """
        before: Parts | None = None
        while True:
            parts = parts_of(self._skeleton, self._lab, solution, *self._search.requests(solution))
            stuck = before is not None and (parts.kernels, parts.transforms) == (before.kernels, before.transforms)
            if stuck or parts.settled(self._best_us):
                return parts
            before = parts
            while not parts.settled(self._best_us):
                chunk, rest = parts.kernels[:_CHUNK], parts.kernels[_CHUNK:]
                if not take(parts, chunk, () if chunk else parts.transforms):
                    return parts
                parts = parts_of(self._skeleton, self._lab, solution, rest, parts.transforms if chunk else ())

    def _tell(self, trial: optuna.Trial, solution: tuple[int, ...], parts: Parts, reserve_s: float) -> None:
        if parts.failure:
            self._fail(trial, parts.failure)
        elif not parts.open:
            cost_us = self._search.evaluate(solution)
            if not math.isfinite(cost_us):
                self._fail(trial, "its cost is not finite: a layout change that it needs does not exist")
                return
            if cost_us < self._best_us:
                self._reporter.best(f"trial {trial.number}: {cost_us / 1e3:.3f} ms by its parts")
            self._study.tell(trial, cost_us)
        elif parts.settled_us > self._best_us:
            self._study.tell(trial, state=TrialState.PRUNED)
        elif self._budget.over(reserve_s):
            self._fail(trial, "the run was stopped", retry=True)
        else:
            self._fail(trial, f"{parts.open} of its parts were asked for and not measured")

    def _fail(self, trial: optuna.Trial, why: str, *, retry: bool = False) -> None:
        trial.set_user_attr(WHY, why)
        trial.set_user_attr(RETRY, retry)
        self._study.tell(trial, state=TrialState.FAIL)
        self._reporter.note(f"trial {trial.number}: {why}")
        if retry:
            requeue(self._study, self._space.distributions)

    @contextmanager
    def _told_if_failing(self, trial: optuna.Trial) -> Iterator[None]:
        """A trial in flight is told before an error, or Ctrl-C, goes on its way."""
        try:
            yield
        except StorageInternalError:
            raise
        except BaseException as error:
            self._fail(trial, f"{type(error).__name__}: {one_line(error)}", retry=True)
            raise

    @property
    def _best_us(self) -> float:
        return self._best[0]

    def _catch_up(self) -> None:
        """Read what this process and others have told since the last time."""
        for trial, solution in self._news():
            self._take(trial, solution)

    def _news(self) -> Iterator[tuple[FrozenTrial, tuple[int, ...]]]:
        """Trials with an end that were not read yet, with their assignments, in the order of their numbers."""
        finished = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        for trial in self._study.get_trials(deepcopy=False, states=finished):
            if trial.number not in self._read:
                self._read.add(trial.number)
                if not trial.user_attrs.get(RETRY) and trial.params.keys() >= self._space.distributions.keys():
                    yield trial, self._space.solution(trial.params)

    def _take(self, trial: FrozenTrial, solution: tuple[int, ...]) -> None:
        self._told.add(solution)
        if trial.state is TrialState.COMPLETE and trial.value is not None:
            self._complete[solution] = trial.number
            if trial.value < self._best_us:
                self._best = (trial.value, solution)

    def _know_again(self) -> tuple[int, int]:
        """Recall what the trials of a run that is resumed measured, one after the other as they did.

        Returns:
            How many of the last ones brought nothing new, and how many left nothing to measure.
        """
        repeated = idled = 0
        for trial, solution in self._news():
            known, recalled = solution in self._told, self._recall(solution)
            self._take(trial, solution)
            repeated = repeated + 1 if known and not recalled else 0
            idled = 0 if recalled else idled + 1
        return repeated, idled

    def _recall(self, solution: tuple[int, ...]) -> bool:
        """As `_measure` does, but from memory alone; whether there was anything."""
        found = False

        def take(parts: Parts, kernels: Sequence[Request], transforms: Sequence[TransformKey]) -> bool:
            nonlocal found
            recalled = self._lab.recall(kernels, transforms)
            found |= recalled
            return recalled

        self._follow(solution, take)
        return found
