"""An Optuna sampler that proposes whole assignments: those of the exact solver under drawn costs."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from layoutsearch.search.parameters import AssignmentSpace
from layoutsearch.search.trials import RETRY

# Trials asked for and never told leave their proposals behind; those of so many are kept.
_KEPT_DRAWS = 256


class Proposer(Protocol):
    """Draws costs and solves: Thompson sampling over assignments."""

    def propose(self, rng: np.random.Generator) -> Sequence[int]:
        """A candidate index for every kernel."""


class SolverSampler(BaseSampler):
    """Proposes one whole assignment per trial, and samples any other parameter at random.

    A trial's proposal is drawn once, from a generator of its own made of the seed and the trial's number: equal seeds
    give equal studies, and workers that share a study and a seed still propose different assignments. Trials that were
    cut short and are run again do not count, so that a study that was killed goes on as if it had not been.

    Args:
        space: the parameters this sampler knows.
        proposer: what proposes; called by one thread at a time.
        seed: of the proposals; from the operating system if None.
    """

    def __init__(self, space: AssignmentSpace, proposer: Proposer, *, seed: int | None = None) -> None:
        self._space = space
        self._proposer = proposer
        self._entropy = secrets.randbits(64) if seed is None else seed
        self._random = RandomSampler(seed)
        self._draws: OrderedDict[int, dict[str, str]] = OrderedDict()
        self._lock = threading.Lock()

    def reseed_rng(self) -> None:
        """Go on with a fresh seed from the operating system."""
        self._entropy = secrets.randbits(64)
        self._random.reseed_rng()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The known parameters that the study's last trial had, as it had them.

        Claiming all of them from the start would make Optuna reject a study that uses a known name for something else.
        What is not claimed is asked of `sample_independent`, which answers from the same proposal.
        """
        last = next((t for t in reversed(study.get_trials(deepcopy=False)) if t.distributions), None)
        if last is None:
            return {}
        known = self._space.distributions
        return {name: known[name] for name, has in last.distributions.items() if known.get(name) == has}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """See BaseSampler."""
        return {name: self.sample_independent(study, trial, name, has) for name, has in search_space.items()}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """The trial's proposal for a known parameter, a random value for any other."""
        if self._space.distributions.get(param_name) == param_distribution:
            return self._proposal(study, trial)[param_name]
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """See BaseSampler."""
        with self._lock:
            self._draws.pop(trial._trial_id, None)

    def _proposal(self, study: Study, trial: FrozenTrial) -> dict[str, str]:
        with self._lock:
            if trial._trial_id not in self._draws:
                rng = np.random.default_rng([self._entropy, trial.number - _retried(study, trial)])
                self._draws[trial._trial_id] = self._space.params(self._proposer.propose(rng))
                while len(self._draws) > _KEPT_DRAWS:
                    self._draws.popitem(last=False)
            return self._draws[trial._trial_id]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_draws": OrderedDict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()


def _retried(study: Study, trial: FrozenTrial) -> int:
    """Earlier trials that are owed another go, which has a number of its own."""
    earlier = study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
    return sum(t.number < trial.number and bool(t.user_attrs.get(RETRY)) for t in earlier)
