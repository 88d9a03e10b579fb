"""What is believed of every cost of a skeleton: what was measured, and else what is predicted, with its spread."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import numpy as np

from layoutsearch.cost.bounds import Bounds
from layoutsearch.cost.conformal import Spread
from layoutsearch.cost.features import SCHEMA_VERSION
from layoutsearch.cost.improvement import Improvement
from layoutsearch.cost.machine import Machine
from layoutsearch.cost.mixture import Prior
from layoutsearch.cost.model import CostModel, Prediction
from layoutsearch.cost.posterior import Evidence, Posterior
from layoutsearch.cost.rows import KernelRow, TransformRow
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.transform import TransformKey
from layoutsearch.measure.results import Measurement, cost_us
from layoutsearch.search.cost_index import CostIndex, FloatArray, IntArray
from layoutsearch.search.known import Known, Lab

Refit = Callable[[Sequence[KernelRow], Sequence[TransformRow]], CostModel]

# Candidates that ran before the model is fitted anew; again each time that they have doubled.
_REFIT_FROM = 30
# Tries after which a search that is over says something about how searches go on.
_CURVE_TRIES = 3
# So many of the fastest schedules of a candidate are timed again before its time counts as certain: so that a runner-up
# that was unlucky is not lost.
REFINED = 2
# Samples of a first measurement; more say that it was timed again, with care.
_FIRST_SAMPLES = 7
# Scale in log of the error of a first measurement, and what a spread of its samples adds to that: between what was seen
# of 400 schedules on a quiet machine and of 430 on one that was not.
_NOISE, _NOISE_OF_SPREAD = 0.035, 0.4
# Scales of its own error that a time is above what its like say, from where it is doubted: one in thirty by itself.
_DOUBTFUL = 3.0
# Standard deviations above the prediction from where a layout change is.
_DOUBTFUL_MOVE = 2.0
# The name under which this run's rows join those of other models.
_THIS_RUN = "this run"

Costs = tuple[FloatArray, FloatArray]
# Numbers of the kind, the workload and the family of each entry, see `cost.mixture.Prior`.
_Labels = tuple[IntArray, IntArray, IntArray]


class Beliefs:
    """Posterior costs of all pairs and transforms of an index; `update` reads the lab again.

    Args:
        index: where each cost lies.
        lab: what is measured.
        model: predicts the rest.
        bounds: what nothing can beat; without them that is 0.
        refit: makes a model out of this run's rows; None keeps the first one.
    """

    def __init__(
        self, index: CostIndex, lab: Lab, model: CostModel, bounds: Bounds | None, refit: Refit | None
    ) -> None:
        self.index, self._lab, self._bounds, self._refit = index, lab, bounds, refit
        self._next_fit, self._refitted = _REFIT_FROM, False
        self._kernel_labels = _labels(index, model.machine)
        moves = index.transforms
        tensors = _numbered([k.workload for k in moves])
        turns = _numbered([(_order(k.source), _order(k.target)) for k in moves])
        self._transform_labels = turns, tensors, _numbered([k.candidate for k in moves])
        kernel_floor = [bounds.kernel_us(w.facts, c) for w, c in index.pairs] if bounds else [0.0] * len(index.pairs)
        transform_floor = [bounds.transform_us(k) for k in moves] if bounds else [0.0] * len(moves)
        self._floors = np.array(kernel_floor, dtype=np.float64), np.array(transform_floor, dtype=np.float64)
        self._model = model
        self._priors = self._predicted(model)
        # Pairs and schedules whose times will not get more certain: to time them again brought nothing.
        self._certain: dict[int, set[str]] = {}
        self._stamp: bytes = b""
        self.update()

    def update(self) -> bool:
        """Read the lab; whether anything changed."""
        kernels = [self._lab.of(w, c) for w, c in self.index.pairs]
        transforms = [self._lab.transform(k) for k in self.index.transforms]
        noise = [_noise(known, self._certain.get(k, set())) for k, known in enumerate(kernels)]
        seen, moved = _evidence(kernels, noise), _evidence(transforms)
        stamp = b"".join(a.tobytes() for e in (seen, moved) for a in (e.best_us, e.tries, e.closed, e.noise))
        if stamp == self._stamp:
            return False
        self._stamp, self.kernel_evidence, self.transform_evidence = stamp, seen, moved
        if self._refit is not None and int(seen.seen.sum()) >= self._next_fit:
            self._next_fit = 2 * int(seen.seen.sum())
            self._model, self._refitted = self._refit(*self._rows()), True
            self._priors = self._predicted(self._model)
        curves = [
            [cost_us(s, m) for s, m in known.tries.items()]
            for known, over in zip(kernels, seen.over, strict=True)
            if over and len(known.tries) >= _CURVE_TRIES
        ]
        self.improvement = Improvement.fit(curves)
        self.kernels = Posterior(self._priors[0], seen, self.improvement, independent=not self._refitted)
        self.transforms = Posterior(self._priors[1], moved, self.improvement, independent=not self._refitted)
        return True

    def hasty(self, pair: int) -> dict[str, Measurement]:
        """The fastest schedules of a candidate that were timed only once, of those that would be timed again."""
        known = self._lab.of(*self.index.pairs[pair])
        return {s: known.tries[s] for s in _hasty(known, self._certain.get(pair, set()))}

    def take_as_certain(self, pair: int, schedules: Iterable[str]) -> None:
        """The times of these schedules will not get more certain than they are."""
        self._certain.setdefault(pair, set()).update(schedules)

    def doubtful(self) -> tuple[list[int], list[TransformKey]]:
        """Pairs and layout changes that took far longer than their like and were timed at one time only: something may
        have disturbed them, and a search would never look at them again."""
        slow = np.flatnonzero(self.kernel_evidence.seen)[self.kernels.excess > _DOUBTFUL]
        pairs = [int(k) for k in slow if self.hasty(int(k))]
        evidence, prior = self.transform_evidence, self._priors[1]
        seen = np.flatnonzero(evidence.seen)
        # Layout changes are predicted well, and what disturbs one mostly disturbs all that are timed with it.
        far = np.log(evidence.best_us[seen]) - prior.log_us[seen]
        slow = seen[far > _DOUBTFUL_MOVE * np.hypot(prior.between[seen], prior.within[seen])]
        found = [(key, self._lab.transform(key)) for key in (self.index.transforms[k] for k in slow)]
        return pairs, [key for key, known in found if known.best is not None and known.best[0] not in known.again]

    @property
    def measured(self) -> np.ndarray:
        """Whether each pair was tried, shape (pairs,): ran, or is known not to."""
        return self.kernel_evidence.seen | self.kernel_evidence.dead

    @property
    def moved(self) -> np.ndarray:
        """Whether each transform was measured, shape (transforms,)."""
        return self.transform_evidence.seen | self.transform_evidence.dead

    @property
    def predicted_by(self) -> str:
        """What predicts the costs that are not measured, for people."""
        kernels, transforms = self._model.rows
        what = f"fitted to {kernels} kernels and {transforms} transforms" if kernels else "its base"
        return f"cost model of features {SCHEMA_VERSION}, {what}, corrected by what this run measured"

    def draw(self, rng: np.random.Generator, size: int) -> Costs:
        """Costs drawn together, shapes (size, pairs) and (size, transforms)."""
        return self.kernels.draw(rng, size), self.transforms.draw(rng, size)

    def mean(self) -> Costs:
        """Expected costs."""
        return self.kernels.mean(), self.transforms.mean()

    def optimistic(self, quantile: float) -> Costs:
        """The low quantile of each cost by itself."""
        return self.kernels.optimistic(quantile), self.transforms.optimistic(quantile)

    @property
    def refuted(self) -> int:
        """Kernels and transforms that were measured below what was said to bound them."""
        return self.kernels.refuted + self.transforms.refuted

    def strict(self) -> Costs:
        """What no cost is below. Where one bound is refuted, none of them counts."""
        trust = not self.refuted
        return self.kernels.strict(trust), self.transforms.strict(trust)

    def present(self) -> Costs:
        """The fastest measured so far, without its luck; else the expected cost, `inf` where nothing runs."""
        found = []
        for evidence, posterior in (
            (self.kernel_evidence, self.kernels),
            (self.transform_evidence, self.transforms),
        ):
            found.append(np.where(evidence.seen, evidence.typical_us, posterior.mean()))
        return found[0], found[1]

    def _predicted(self, model: CostModel) -> tuple[Prior, Prior]:
        pairs, moves = self.index.pairs, self.index.transforms
        none = Prediction(np.zeros(0), np.zeros(0))
        kernels = model.kernels([(w.facts, c) for w, c in pairs]) if pairs else none
        transforms = model.transforms(moves) if moves else none
        return (
            _prior(kernels, model.spread, self._kernel_labels, self._floors[0]),
            _prior(transforms, model.transform_spread, self._transform_labels, self._floors[1]),
        )

    def _rows(self) -> tuple[list[KernelRow], list[TransformRow]]:
        """What ran, as the rows of a model; times as they will be in the end."""
        seen, moved = self.kernel_evidence, self.transform_evidence
        kernels = [
            KernelRow(w.facts, c, float(seen.best_us[k]), w.key, _THIS_RUN, int(seen.tries[k]))
            for k, (w, c) in enumerate(self.index.pairs)
            if seen.seen[k]
        ]
        transforms = [
            TransformRow(key, float(moved.best_us[k]), _THIS_RUN)
            for k, key in enumerate(self.index.transforms)
            if moved.seen[k]
        ]
        return kernels, transforms


def _labels(index: CostIndex, machine: Machine) -> _Labels:
    """Of kernels. Another algorithm is another kernel: over six models left out in turn, the errors of direct and
    Winograd candidates of a workload correlate by -0.13, those of the same algorithm by 0.35. And what goes over more
    than the caches of its cores waits for another level than what does not: that large tensors take longer than
    predicted says nothing of small ones."""
    cached = machine.l2_bytes * machine.threads
    kinds = [(w.facts.kind, _way(c), w.facts.read_bytes + w.facts.written_bytes > cached) for w, c in index.pairs]
    groups = [(int(group), way) for group, (_, way, _) in zip(index.groups, kinds, strict=True)]
    families = [(kind, str(c)) for kind, (_, c) in zip(kinds, index.pairs, strict=True)]
    return _numbered(kinds), _numbered(groups), _numbered(families)


def _way(choice: Candidate | None) -> int:
    """How it is computed: directly, by Winograd's algorithms, by an external library."""
    return 0 if choice is None else 2 if choice.extern else int(bool(choice.winograd))


def _hasty(known: Known, certain: Set[str]) -> list[str]:
    fastest = [schedule for schedule, _ in known.ranked[:REFINED]]
    return [s for s in fastest if s not in certain and len(known.tries[s].samples_us) <= _FIRST_SAMPLES]


def _noise(known: Known, certain: Set[str]) -> float:
    """Scale of the error of a candidate's time; a runner-up counts as far as its error may make it the fastest."""
    times, found = dict(known.ranked[:REFINED]), 0.0
    for schedule in _hasty(known, certain):
        scale = math.hypot(_NOISE, _NOISE_OF_SPREAD * min(1.0, known.tries[schedule].spread))
        behind = math.log(times[schedule] / known.best_us)
        found = max(found, scale - behind / 2)
    return found


def _evidence(known: Sequence[Known], noise: Sequence[float] | None = None) -> Evidence:
    """Without `noise`: of transforms, which have one schedule, timed once."""
    return Evidence(
        np.array([k.best_us for k in known], dtype=np.float64),
        np.array([len(k.tries) for k in known], dtype=np.intp),
        np.array([k.closed or (noise is None and bool(k.tries)) for k in known], dtype=np.bool_),
        np.array(noise, dtype=np.float64) if noise is not None else np.zeros(len(known)),
    )


def _prior(
    prediction: Prediction, spread: Spread, labels: tuple[IntArray, IntArray, IntArray], floor: FloatArray
) -> Prior:
    # A floor above the prediction is right, and the prediction wrong.
    log_us = np.maximum(prediction.log_us, np.log(np.maximum(floor, 1e-9)))
    between = prediction.sigma * math.sqrt(spread.share)
    return Prior(log_us, between, np.sqrt(prediction.sigma**2 - between**2), *labels, floor)


def _order(layout: Layout) -> str:
    """The layout without its block sizes: layout changes between two such orders walk memory alike."""
    return "".join(axis.letter for axis in layout.axes)


def _numbered(keys: Sequence[Any]) -> IntArray:
    seen: dict[Any, int] = {}
    return np.array([seen.setdefault(k, len(seen)) for k in keys], dtype=np.intp)
