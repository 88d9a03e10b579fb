"""What is measured joined with what is predicted: a distribution over the costs of all candidates.

The log of a cost is predicted up to an error with four independent parts: one that all costs share (the whole device
is faster than the model thinks), one that the candidates of a workload share, one that the same layouts share across
workloads of a kind, and the candidate's own. That is a Gaussian process over the candidates, so that every measurement
also says something of those that are not measured, in closed form. The model gives the sizes of the errors; how they
split up, and whether they are larger than the model thinks, is what makes the run's own measurements most likely.

A cost is what a candidate reaches at the end of its schedule search: measured candidates may still get faster
(`cost.improvement`), never slower.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from layoutsearch.cost.improvement import FULL_TRIES, Improvement

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.intp]
BoolArray = npt.NDArray[np.bool_]

# Grids of empirical Bayes: errors in units of those the model states; the part of the error between workloads that all
# workloads share; the part within a workload that the same layouts share. The first has a log-normal prior of this
# width: some ten measurements overrule it.
_SCALES = (0.6, 0.8, 1.0, 1.25, 1.6, 2.0, 2.6)
_SCALE_PRIOR = 0.35
_SHARED = (0.05, 0.3, 0.6)
_FAMILY = (0.1, 0.35, 0.6)
# Repeatability of a measurement in log, so that no matrix is singular.
_NOISE = 0.01


@dataclass(frozen=True)
class Prior:
    """Predictions for a list of candidates (or transforms).

    Attributes:
        log_us: predicted log time.
        sigma: standard deviation of the error in log.
        between: part of the variance that the candidates of a workload share, 0 to 1.
        group: number of the workload.
        family: number of what is alike across workloads: the kind of kernel and the layouts.
        floor: times (us) that nothing can beat; 0 where there is no such bound.
    """

    log_us: FloatArray
    sigma: FloatArray
    between: float
    group: IntArray
    family: IntArray
    floor: FloatArray


@dataclass(frozen=True)
class Evidence:
    """What was measured of each entry of a prior.

    Attributes:
        best_us: the fastest so far; infinite where nothing ran.
        tries: schedules tried.
        closed: whether no more will be tried.
    """

    best_us: FloatArray
    tries: IntArray
    closed: BoolArray

    @cached_property
    def seen(self) -> BoolArray:
        """Entries that ran."""
        return np.isfinite(self.best_us)

    @cached_property
    def dead(self) -> BoolArray:
        """Entries of which nothing runs."""
        return self.closed & ~self.seen

    @cached_property
    def final(self) -> BoolArray:
        """Entries of which all is known."""
        return self.closed | (self.seen & (self.tries >= FULL_TRIES))


@dataclass(frozen=True)
class _Split:
    """Variances of the four parts, in units of the stated variance of each entry."""

    shared: float
    group: float
    family: float
    own: float

    @classmethod
    def of(cls, between: float, scale: float, shared: float, family: float) -> _Split:
        unit = scale * scale
        return cls(
            unit * between * shared,
            unit * between * (1 - shared),
            unit * (1 - between) * family,
            unit * (1 - between) * (1 - family),
        )


class Posterior:
    """Costs given a prior and evidence. Entries of which nothing runs cost `inf`."""

    def __init__(self, prior: Prior, evidence: Evidence, improvement: Improvement | None = None) -> None:
        self._prior, self._evidence = prior, evidence
        self._improvement = improvement or Improvement()
        self._seen = np.flatnonzero(evidence.seen)
        tries = np.where(evidence.final, FULL_TRIES, evidence.tries)[self._seen].astype(np.intp)
        self._tries = tries
        gain, variance, self._factor = self._improvement.moments(tries)
        self._log_best = np.log(evidence.best_us[self._seen])
        self._residual = self._log_best - gain - prior.log_us[self._seen]
        self._variance = variance + _NOISE**2
        self._parts = self._fitted()
        inner = self._covariance(self._seen, self._seen, self._parts) + np.diag(self._variance)
        cross = self._covariance(np.arange(len(prior.log_us)), self._seen, self._parts)
        # Weights of the measured residuals in the conditional mean; shape (entries, measured).
        self._weights = np.linalg.solve(inner, cross.T).T if len(self._seen) else cross
        total = prior.sigma**2 * (self._parts.shared + self._parts.group + self._parts.family + self._parts.own)
        self._sigma = np.sqrt(np.maximum(total - (self._weights * cross).sum(axis=1), 0.0))
        self._mu = prior.log_us + self._weights @ self._residual
        # No measured time is below what nothing can beat; if one is, the bound is wrong, and the time counts.
        self._floor = np.minimum(prior.floor, evidence.best_us)

    @property
    def log_us(self) -> FloatArray:
        """Conditional mean of the log of each cost, measured or not; says how well the model does where it is."""
        return self._mu

    @property
    def log_sigma(self) -> FloatArray:
        """Conditional standard deviation of the log of each cost; 0 where all is known."""
        sigma = self._sigma.copy()
        sigma[self._seen] = np.sqrt(np.maximum(self._variance - _NOISE**2, 0.0))
        return sigma

    def mean(self) -> FloatArray:
        """Expected costs in us, shape (entries,)."""
        found = np.exp(self._mu + self._sigma**2 / 2)
        found[self._seen] = self._evidence.best_us[self._seen] * self._factor
        return self._bounded(found)

    def optimistic(self, quantile: float) -> FloatArray:
        """The low quantile of each cost by itself, in us; shape (entries,)."""
        found = np.exp(self._mu + _normal_quantile(quantile) * self._sigma)
        found[self._seen] = np.exp(self._log_best - self._improvement.quantile(self._tries, quantile))
        return self._bounded(found)

    def strict(self) -> FloatArray:
        """What no cost is below, in us: times where all is known, else the floor; shape (entries,)."""
        known = np.where(self._evidence.final, self._evidence.best_us, self._floor)
        return np.where(self._evidence.dead, np.inf, known)

    def draw(self, rng: np.random.Generator, size: int = 1) -> FloatArray:
        """Costs in us, drawn together; shape (size, entries).

        Matheron's rule: an unconditional draw, corrected by what it gets wrong of the measured.
        """
        prior, parts = self._prior, self._parts
        n = len(prior.log_us)
        error = math.sqrt(parts.shared) * rng.standard_normal((size, 1))
        error = error + math.sqrt(parts.own) * rng.standard_normal((size, n))
        for variance, labels in ((parts.group, prior.group), (parts.family, prior.family)):
            each = rng.standard_normal((size, int(labels.max(initial=-1)) + 1))
            error += math.sqrt(variance) * each[:, labels]
        error *= prior.sigma
        final = self._log_best - self._improvement.draw(self._tries, rng, size)
        noise = _NOISE * rng.standard_normal(final.shape)
        wrong = final - prior.log_us[self._seen] - error[:, self._seen] - noise
        found = np.exp(prior.log_us + error + wrong @ self._weights.T)
        found[:, self._seen] = np.exp(final)
        return self._bounded(found)

    def _bounded(self, us: FloatArray) -> FloatArray:
        return np.where(self._evidence.dead, np.inf, np.maximum(us, self._floor))

    def _covariance(self, rows: IntArray, columns: IntArray, parts: _Split) -> FloatArray:
        prior = self._prior
        same = parts.shared + parts.group * (prior.group[rows][:, None] == prior.group[columns][None])
        same = same + parts.family * (prior.family[rows][:, None] == prior.family[columns][None])
        same = same + parts.own * (rows[:, None] == columns[None])
        return prior.sigma[rows][:, None] * same * prior.sigma[columns][None]

    def _fitted(self) -> _Split:
        """The split of the errors that makes the measurements most likely."""
        best, found = -math.inf, _Split.of(self._prior.between, 1.0, _SHARED[1], _FAMILY[1])
        if not len(self._seen):
            return found
        for shared, family in itertools.product(_SHARED, _FAMILY):
            unit = self._covariance(self._seen, self._seen, _Split.of(self._prior.between, 1.0, shared, family))
            for scale in _SCALES:
                factor = np.linalg.cholesky(scale**2 * unit + np.diag(self._variance))
                white = np.linalg.solve(factor, self._residual)
                likelihood = -0.5 * float(white @ white) - float(np.log(np.diag(factor)).sum())
                likelihood -= 0.5 * (math.log(scale) / _SCALE_PRIOR) ** 2
                if likelihood > best + 1e-9:
                    best, found = likelihood, _Split.of(self._prior.between, scale, shared, family)
        return found


def _normal_quantile(quantile: float) -> float:
    from scipy.special import ndtri

    return float(ndtri(quantile))
