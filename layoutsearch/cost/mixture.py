"""How large the parts of a prediction's error are, as a run's own measurements tell: empirical Bayes.

Each part is a stated variance times a factor, and the factors are those that make the measurements most likely, next to
a log-normal prior. The candidates' own errors are Student's t as a scale mixture of normals: each measured candidate
has a `spread`, and variational expectation maximisation finds it (after Lange, Little, Taylor: "Robust statistical
modeling using the t distribution", JASA 1989), so that a few that are far out do not widen what is expected of all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_solve, cholesky, lapack, solve_triangular
from scipy.special import stdtrit

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.intp]

# Degrees of freedom of a candidate's own error: over six models left out in turn, the error within a workload has its
# 25, 10, 5 and 1 % quantiles where t of 2 to 3 has them. Draws end where its moments would be decided by one in 1,000.
FREEDOM, FARTHEST = 3.0, 8.0
# Log times a factor e apart: kernels of a kind that take 5 us and 500 us are limited by other things, and err apart.
KNOT_SPACING = 1.0
# Mean of exp(scale * t) of such draws by scale, for interpolation.
_SCALES = np.linspace(0.0, 2.0, 41)
_AT = np.clip(stdtrit(FREEDOM, (np.arange(4000) + 0.5) / 4000), -FARTHEST, FARTHEST)
_MEAN_FACTORS = np.exp(np.outer(_SCALES, _AT)).mean(axis=1)
# Factors to try; `Parts` has the medians of their priors. Stated spreads hold four errors in five whatever their tails,
# so the scale of a t is smaller. They are those of convolutions, of which training has most; other kinds of kernels
# were seen to be off by a half altogether. What is measured first is what the model thinks fast, where it knows most:
# so a candidate's own error is never taken for much smaller than stated.
_FACTORS = {
    "shared": (0.02, 0.06, 0.2, 0.6, 2.0, 6.0),
    "kind": (0.1, 0.3, 1.0, 3.0),
    "size": (0.1, 0.3, 1.0, 3.0),
    "group": (0.1, 0.25, 0.6, 1.5, 4.0),
    "family": (0.02, 0.08, 0.25, 0.8, 2.5),
    "own": (0.3, 0.5, 0.8, 1.6, 4.0),
}
# Width of the prior in log variance: some ten measurements overrule it.
_WIDTH = 1.0
_SWEEPS, _STEPS = 2, 4


@dataclass(frozen=True)
class Prior:
    """Predictions for a list of candidates (or transforms).

    Attributes:
        log_us: predicted log time.
        between: standard deviation in log of the part of the error that the candidates of a workload share.
        within: the same of the rest.
        kind: number of the kind of kernel.
        group: number of the workload.
        family: number of what is alike across workloads: the kind of kernel and the layouts.
        floor: times (us) that nothing can beat; 0 where there is no such bound.
    """

    log_us: FloatArray
    between: FloatArray
    within: FloatArray
    kind: IntArray
    group: IntArray
    family: IntArray
    floor: FloatArray

    @cached_property
    def sizes(self) -> Sizes:
        """How long each entry is predicted to take, among those of its kind: between which knots of a grid."""
        at = self.log_us / KNOT_SPACING
        below = np.floor(at)
        part = at - below
        length = np.hypot(part, 1.0 - part)
        knots = below.astype(np.intp) - (int(below.min()) if len(below) else 0)
        of_kind = self.kind * (int(knots.max(initial=0)) + 2)
        return Sizes(of_kind + knots, (1.0 - part) / length, part / length)


@dataclass(frozen=True)
class Sizes:
    """Errors that change with the size of a kernel: independent at the knots of a grid, interpolated between them.

    Attributes:
        knot: number of the knot below, no two kinds have one in common.
        lower: weight of that knot.
        upper: weight of the next one; the squares of both add up to one.
    """

    knot: IntArray
    lower: FloatArray
    upper: FloatArray

    def alike(self, rows: IntArray, columns: IntArray) -> FloatArray:
        """Correlation of errors, shape (rows, columns)."""
        return self._weights(rows) @ self._weights(columns).T

    def draw(self, rng: np.random.Generator, size: int) -> FloatArray:
        """Of unit variance, shape (size, entries)."""
        each = rng.standard_normal((size, int(self.knot.max(initial=-1)) + 2))
        return self.lower * each[:, self.knot] + self.upper * each[:, self.knot + 1]

    def _weights(self, entries: IntArray) -> FloatArray:
        """Of all knots, shape (entries, knots)."""
        found = np.zeros((len(entries), int(self.knot.max(initial=-1)) + 2))
        at = np.arange(len(entries))
        found[at, self.knot[entries]] = self.lower[entries]
        found[at, self.knot[entries] + 1] = self.upper[entries]
        return found


@dataclass(frozen=True)
class Parts:
    """Variances of the parts of the error; the first four in units of `between`, the others in units of `within`."""

    shared: float = 0.2
    kind: float = 0.4
    size: float = 1.0
    group: float = 0.5
    family: float = 0.25
    own: float = 0.5


@dataclass(frozen=True)
class Mixture:
    """A fit.

    Attributes:
        parts: sizes of the parts.
        spread: how much larger than `own` the variance of each measured candidate's own error is.
    """

    parts: Parts
    spread: FloatArray


def mean_factor(scale: FloatArray) -> FloatArray:
    """Mean of exp(own error), for the scales of its t; shape of `scale`."""
    return np.exp(np.interp(scale, _SCALES, np.log(_MEAN_FACTORS)))


def covariance(prior: Prior, rows: IntArray, columns: IntArray, parts: Parts) -> FloatArray:
    """Of the log costs of different candidates: without their own errors. Shape (rows, columns)."""

    def same(labels: IntArray) -> FloatArray:
        return (labels[rows][:, None] == labels[columns][None]).astype(np.float64)

    between = parts.shared + parts.kind * same(prior.kind) + parts.group * same(prior.group)
    between += parts.size * prior.sizes.alike(rows, columns)
    found = np.outer(prior.between[rows], prior.between[columns]) * between
    return found + np.outer(prior.within[rows], prior.within[columns]) * (parts.family * same(prior.family))


def fit_mixture(prior: Prior, seen: IntArray, residual: FloatArray, variance: FloatArray) -> Mixture:
    """The parts that make residuals most likely, by coordinate search.

    Args:
        prior: predictions.
        seen: entries that are measured.
        residual: measured less predicted, in log; shape (measured,).
        variance: of each measurement in log; shape (measured,).
    """
    parts = Parts()
    if not len(seen):
        return Mixture(parts, np.zeros(0))
    best, spread = _likelihood(prior, seen, residual, variance, parts)
    for _ in range(_SWEEPS):
        before = parts
        for name, factors in _FACTORS.items():
            for factor in factors:
                trial = replace(parts, **{name: factor})
                if trial != parts:
                    value, found = _likelihood(prior, seen, residual, variance, trial)
                    if value > best + 1e-9:
                        best, spread, parts = value, found, trial
        if parts == before:
            break
    return Mixture(parts, spread)


def _likelihood(
    prior: Prior, seen: IntArray, residual: FloatArray, variance: FloatArray, parts: Parts
) -> tuple[float, FloatArray]:
    """Log posterior density of the parts up to a constant, as a variational bound, and the spreads behind it."""
    shared = covariance(prior, seen, seen, parts)
    own = parts.own * prior.within[seen] ** 2
    spread = np.ones(len(seen))
    for _ in range(_STEPS):
        factor = cholesky(shared + np.diag(own * spread + variance), lower=True)
        # The own errors given the residuals: their mean, and what is unsure of it.
        mean = own * spread * cho_solve((factor, True), residual)
        inverse = lapack.dtrtri(factor, lower=1)[0]
        unsure = own * spread - (own * spread) ** 2 * (inverse**2).sum(axis=0)
        spread = (FREEDOM + (mean**2 + np.maximum(unsure, 0.0)) / own) / (FREEDOM + 1.0)
    factor = cholesky(shared + np.diag(own * spread + variance), lower=True)
    white = solve_triangular(factor, residual, lower=True)
    value = -0.5 * float(white @ white) - float(np.log(np.diag(factor)).sum())
    # What the spreads' inverse gamma distributions differ from those that a t is a mixture of (Kullback-Leibler).
    rate = spread * (FREEDOM + 1) / 2
    value -= FREEDOM / 2 * float((np.log(rate) + (FREEDOM + 1) / 2 / rate).sum())
    medians = Parts()
    for name in _FACTORS:
        value -= 0.5 * (math.log(getattr(parts, name) / getattr(medians, name)) / _WIDTH) ** 2
    return value, spread
