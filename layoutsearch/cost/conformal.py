"""Spreads that hold: the errors a model made on rows it had not seen, turned into the width of its intervals.

Split conformal prediction with locally scaled scores (Lei, G'Sell, Rinaldo, Tibshirani, Wasserman: "Distribution-free
predictive inference for regression", JASA 2018, section 5.2), on out-of-fold residuals as in cross-conformal prediction
(Vovk, Annals of Mathematics and AI 2015). Folds keep groups together (a workload, or a whole model), since the
candidates of one workload err alike: rows are exchangeable between groups only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

COVERAGE = 0.8
_Z = NormalDist().inv_cdf(0.5 + COVERAGE / 2)


@dataclass(frozen=True)
class Spread:
    """Standard deviations of the error of log-times.

    Attributes:
        between: of the part that all candidates of one workload share; it cancels when they are compared.
        within: of the rest.
    """

    between: float
    within: float

    @property
    def total(self) -> float:
        """Of the whole error."""
        return math.hypot(self.between, self.within)

    @property
    def share(self) -> float:
        """Part of the variance that is shared."""
        return self.between**2 / self.total**2 if self.total > 0 else 0.0


def conformal_sigma(errors: np.ndarray, scales: np.ndarray | None = None, groups: Sequence[str] | None = None) -> float:
    """Factor that turns `scales` (ones by default) into standard deviations whose 80 % intervals hold.

    The standard deviation is that of a normal distribution with the same 80 % interval: what a caller computes from it
    at this coverage is the conformal interval itself. All groups count alike, however many rows they have: what is
    asked next is of another group, as likely to be like one of them as like any other (Lee, Barber, Willett,
    "Distribution-free inference with hierarchical data", 2023).

    Args:
        errors: out-of-fold residuals, shape (n,).
        scales: expected size of each, shape (n,).
        groups: what rows belong together; each row is a group of its own by default.
    """
    scores = np.abs(errors) / (scales if scales is not None else 1.0)
    _, codes, counts = np.unique(
        np.arange(len(scores)) if groups is None else np.asarray(groups), return_inverse=True, return_counts=True
    )
    order = np.argsort(scores)
    mass = np.cumsum(1.0 / (len(counts) * counts[codes[order]]))
    # Of single rows the rank of split conformal prediction; of a few groups what there is, without infinite intervals.
    wanted = COVERAGE * (1 + 1 / len(scores))
    rank = min(len(scores) - 1, int(np.searchsorted(mass, wanted - 1e-9)))
    return float(scores[order[rank]]) / _Z


def shared_part(errors: np.ndarray, groups: Sequence[str]) -> float:
    """Part of the variance of `errors` that members of a group share: one-way random effects, by moments.

    Errors are winsorized at three robust deviations first: one outlier is not a property of its group.
    """
    deviation = 1.4826 * float(np.median(np.abs(errors - np.median(errors)))) or 1e-9
    errors = np.clip(errors - np.median(errors), -3 * deviation, 3 * deviation)
    names, codes = np.unique(np.asarray(groups), return_inverse=True)
    counts = np.bincount(codes)
    if len(names) < 2 or counts.max() < 2:
        return 0.0
    means = np.bincount(codes, errors) / counts
    inside = float(((errors - means[codes]) ** 2).sum() / max(1, len(errors) - len(names)))
    among = float((counts * (means - errors.mean()) ** 2).sum() / (len(names) - 1))
    size = (len(errors) - (counts**2).sum() / len(errors)) / (len(names) - 1)
    between = max(0.0, (among - inside) / size)
    return between / (between + inside) if between + inside > 0 else 0.0


def coverage(errors: np.ndarray, sigma: np.ndarray, level: float = COVERAGE) -> float:
    """Share of `errors` inside the central `level` interval of `sigma`."""
    return float(np.mean(np.abs(errors) <= NormalDist().inv_cdf(0.5 + level / 2) * sigma))
