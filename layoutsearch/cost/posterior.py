"""What is measured joined with what is predicted: a distribution over the costs of all candidates.

The log of a cost is predicted up to an error with six independent parts: one that all costs share (the whole device is
faster than the model thinks), one that all kernels of a kind share, one that those of a kind share that are predicted
to take about as long, one that the candidates of a workload share, one that the same layouts share across workloads of
a kind, and the candidate's own. The last is Student's t, the others are normal: most candidates are predicted well, a
few are not at all, and these must not tell of the others. Given how far out each measured candidate is, that is a
Gaussian process, so every measurement also says something of what is not measured, in closed form. The model gives the
sizes of the errors, `cost.mixture` finds what this run's own measurements say of them.

A cost is what a candidate reaches at the end of its schedule search, timed with care: measured candidates may still
get faster (`cost.improvement`), and a first short measurement may have been lucky.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri, stdtrit

from layoutsearch.cost.improvement import FULL_TRIES, Improvement
from layoutsearch.cost.mixture import FARTHEST, FREEDOM, Mixture, Parts, Prior, covariance, fit_mixture, mean_factor

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.intp]
BoolArray = npt.NDArray[np.bool_]

# Least variance of a measurement in log, so that no matrix is singular.
_JITTER = 1e-4
# The fastest of a few noisy times is lucky by this part of the noise: between the 0.56 of two normal draws and the 0 of
# one schedule far ahead of the rest; 0.5 was seen over 850 schedules that were timed again.
_LUCK = 0.5
# Variance of such a t, of scale 1, without its few farthest.
_SPREAD = 2.0


@dataclass(frozen=True)
class Evidence:
    """What was measured of each entry of a prior.

    Attributes:
        best_us: the fastest so far; infinite where nothing ran.
        tries: schedules tried.
        closed: whether no more will be tried.
        noise: scale in log of the error of the fastest time, Student's t like that of a prediction.
    """

    best_us: FloatArray
    tries: IntArray
    closed: BoolArray
    noise: FloatArray

    @cached_property
    def seen(self) -> BoolArray:
        """Entries that ran."""
        return np.isfinite(self.best_us)

    @cached_property
    def dead(self) -> BoolArray:
        """Entries of which nothing runs."""
        return self.closed & ~self.seen

    @cached_property
    def over(self) -> BoolArray:
        """Entries whose schedule search is over."""
        return self.closed | (self.seen & (self.tries >= FULL_TRIES))

    @cached_property
    def final(self) -> BoolArray:
        """Entries of which all is known."""
        return self.over & (self.dead | (self.noise == 0))

    @cached_property
    def typical_us(self) -> FloatArray:
        """The fastest so far without its luck."""
        return self.best_us * np.exp(_LUCK * self.noise)


class Posterior:
    """Costs given a prior and evidence. Entries of which nothing runs cost `inf`.

    Args:
        prior: what is predicted.
        evidence: what was measured.
        improvement: how searches of schedules go on.
        independent: whether the model has not seen the evidence. Else the residuals say nothing of its errors, and
            their sizes stay as the model states them.
    """

    def __init__(
        self, prior: Prior, evidence: Evidence, improvement: Improvement | None = None, independent: bool = True
    ) -> None:
        self._prior, self._evidence = prior, evidence
        self._improvement = improvement or Improvement()
        self._seen = np.flatnonzero(evidence.seen)
        tries = np.where(evidence.over, FULL_TRIES, evidence.tries)[self._seen].astype(np.intp)
        self._tries, self._noise = tries, evidence.noise[self._seen]
        gain, variance, factor = self._improvement.moments(tries)
        self._log_now = np.log(evidence.typical_us[self._seen])
        self._expected = np.exp(self._log_now) * mean_factor(self._noise) * factor
        self._residual = self._log_now - gain - prior.log_us[self._seen]
        self._variance = variance + _SPREAD * self._noise**2 + _JITTER
        fit = Mixture(Parts(), np.ones(len(self._seen)))
        if independent:
            fit = fit_mixture(prior, self._seen, self._residual, self._variance)
        self._parts = fit.parts
        own = fit.parts.own * prior.within[self._seen] ** 2 * fit.spread
        inner = covariance(prior, self._seen, self._seen, fit.parts) + np.diag(self._variance)
        inner += np.diag(own)
        cross = covariance(prior, np.arange(len(prior.log_us)), self._seen, fit.parts)
        self._far = own * np.linalg.solve(inner, self._residual) if len(self._seen) else np.zeros(0)
        # Weights of the measured residuals in the conditional mean of the shared parts; shape (entries, measured).
        self._weights = np.linalg.solve(inner, cross.T).T if len(self._seen) else cross
        between = fit.parts.shared + fit.parts.kind + fit.parts.size + fit.parts.group
        total = between * prior.between**2 + fit.parts.family * prior.within**2
        self._own = np.sqrt(fit.parts.own) * prior.within
        self._sigma = np.sqrt(np.maximum(total - (self._weights * cross).sum(axis=1), 0.0))
        self._mu = prior.log_us + self._weights @ self._residual
        # How the measured entries' own errors are drawn before they are corrected: as far out as they are.
        self._own_seen = self._own[self._seen] * np.sqrt(fit.spread)
        # No measured time is below what nothing can beat; if one is, the bound is wrong, and the time counts.
        self._floor = np.minimum(prior.floor, np.exp(-3 * evidence.noise) * evidence.best_us)

    @property
    def parts(self) -> Parts:
        """What this run's measurements say of the errors."""
        return self._parts

    def mean(self) -> FloatArray:
        """Expected costs in us, shape (entries,).

        Of the parts of the error that many costs share the median counts: it compares alternatives whose errors go
        together, and how wide those parts are stated is the least certain of all.
        """
        found = np.exp(self._mu) * mean_factor(self._own)
        found[self._seen] = self._expected
        return self._bounded(found)

    def optimistic(self, quantile: float) -> FloatArray:
        """The low quantile of each cost by itself, in us; shape (entries,)."""
        z, t = float(ndtri(quantile)), float(stdtrit(FREEDOM, quantile))
        found = np.exp(self._mu - np.hypot(z * self._sigma, t * self._own))
        gain = self._improvement.quantile(self._tries, quantile)
        found[self._seen] = np.exp(self._log_now - np.hypot(gain, t * self._noise))
        return self._bounded(found)

    @property
    def excess(self) -> FloatArray:
        """How far each measured entry is above what its like say, in scales of its own error; shape (measured,)."""
        return self._far / np.maximum(self._own[self._seen], 1e-9)

    @property
    def refuted(self) -> int:
        """How many entries were measured below their floor, beyond their noise: the device does more than its profile
        says."""
        return int((self._evidence.best_us * np.exp(3 * self._evidence.noise) < self._prior.floor).sum())

    def strict(self, trust: bool = True) -> FloatArray:
        """What no cost is below, in us: times where the search of schedules is over, else the floor; shape (entries,).

        A time that was measured in haste counts less three times its noise. Without `trust`, no floor counts.
        """
        floor = self._floor if trust else np.zeros_like(self._floor)
        timed = np.maximum(self._evidence.best_us * np.exp(-3 * self._evidence.noise), floor)
        return np.where(self._evidence.dead, np.inf, np.where(self._evidence.over, timed, floor))

    def draw(self, rng: np.random.Generator, size: int = 1) -> FloatArray:
        """Costs in us, drawn together; shape (size, entries).

        Matheron's rule: an unconditional draw, corrected by what it gets wrong of the measured.
        """
        prior, parts = self._prior, self._parts
        n = len(prior.log_us)
        error = math.sqrt(parts.shared) * prior.between * rng.standard_normal((size, 1))
        for scale, labels in (
            (math.sqrt(parts.kind) * prior.between, prior.kind),
            (math.sqrt(parts.group) * prior.between, prior.group),
            (math.sqrt(parts.family) * prior.within, prior.family),
        ):
            each = rng.standard_normal((size, int(labels.max(initial=-1)) + 1))
            error = error + scale * each[:, labels]
        error = error + math.sqrt(parts.size) * prior.between * prior.sizes.draw(rng, size)
        own = self._own * _student(rng, (size, n))
        final = self._log_now - self._improvement.draw(self._tries, rng, size)
        final += self._noise * _student(rng, final.shape)
        jitter = math.sqrt(_JITTER) * rng.standard_normal(final.shape)
        apart = self._own_seen * rng.standard_normal(final.shape)
        wrong = final - prior.log_us[self._seen] - error[:, self._seen] - apart - jitter
        found = np.exp(prior.log_us + error + own + wrong @ self._weights.T)
        found[:, self._seen] = np.exp(final)
        return self._bounded(found)

    def _bounded(self, us: FloatArray) -> FloatArray:
        return np.where(self._evidence.dead, np.inf, np.maximum(us, self._floor))


def _student(rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
    return np.clip(rng.standard_t(FREEDOM, shape), -FARTHEST, FARTHEST)
