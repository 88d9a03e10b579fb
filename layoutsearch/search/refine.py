"""Which whole assignments to build and time next, and when it is not worth timing another.

The additive prediction leaves something out (what one kernel leaves in the caches for the next, what the virtual
machine does between them). Assignments are timed whole in small batches; every batch is interleaved with the best one
so far, so that only ratios of one run are used. What the additive prediction misses is learned from them, and the
next batch is what may still improve on the best. It ends when the expected improvement is smaller than the noise of a
comparison (Jones, Schonlau and Welch: Efficient global optimization of expensive black-box functions, 1998).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from scipy.stats import norm

Vector = npt.NDArray[np.float64]


class ResidualModel(Protocol):
    """Predicts log(time whole / additive time) of assignments, by index."""

    def residuals(self, observed: Mapping[int, float]) -> tuple[Vector, Vector]:
        """Mean and standard deviation for every assignment, given the ones `observed`."""


class SharedOffset:
    """Assignments of one model miss by a common factor, each by a little more or less.

    The normal model with known variances; `offset` is what is believed before anything was timed.
    """

    def __init__(self, count: int, offset: float = 0.0, offset_sd: float = 0.1, own_sd: float = 0.02) -> None:
        self._count, self._offset = count, offset
        self._offset_var, self._own_var = offset_sd**2, own_sd**2

    def residuals(self, observed: Mapping[int, float]) -> tuple[Vector, Vector]:
        """See ResidualModel."""
        precision = 1 / self._offset_var + len(observed) / self._own_var
        mean = (self._offset / self._offset_var + sum(observed.values()) / self._own_var) / precision
        means = np.full(self._count, mean)
        deviations = np.full(self._count, math.sqrt(1 / precision + self._own_var))
        for index, value in observed.items():
            means[index], deviations[index] = value, 0.0
        return means, deviations


@dataclass(frozen=True)
class Next:
    """What to time next: indices, most promising first, and what the first of them is expected to improve.

    Attributes:
        indices: empty where no improvement beyond the noise is expected.
        improvement: expected relative improvement on the best so far; infinite where nothing has been timed.
    """

    indices: tuple[int, ...]
    improvement: float


class Refinement:
    """Assignments with their additive times, and what timing some of them whole has shown.

    Args:
        additive_us: predicted time of each assignment.
        residuals: how the prediction misses.
    """

    def __init__(self, additive_us: Sequence[float], residuals: ResidualModel) -> None:
        if not additive_us or not all(math.isfinite(us) and us > 0 for us in additive_us):
            raise ValueError("additive times have to be finite and above 0, and there has to be one")
        self._additive = np.log(np.asarray(additive_us, dtype=np.float64))
        self._model = residuals
        self._log_us: dict[int, float] = {}
        self._excluded: set[int] = set()
        self._noise = 0.0

    @property
    def timed(self) -> tuple[int, ...]:
        """Assignments that were timed."""
        return tuple(self._log_us)

    @property
    def best(self) -> int | None:
        """The fastest one that was timed."""
        return min(self._log_us, key=lambda i: self._log_us[i], default=None)

    @property
    def noise(self) -> float:
        """Relative standard error of one comparison of two medians in the last batch."""
        return self._noise

    def observe(self, samples_us: Mapping[int, Sequence[float]]) -> None:
        """Take in one interleaved run.

        With an earlier run, the assignments they have in common carry the time scale of the first over.
        """
        medians = {index: math.log(float(np.median(values))) for index, values in samples_us.items()}
        common = [index for index in medians if index in self._log_us]
        shift = float(np.mean([self._log_us[i] - medians[i] for i in common])) if common else 0.0
        for index, value in medians.items():
            self._log_us.setdefault(index, value + shift)
        errors = [_relative_error_of_median(values) for values in samples_us.values()]
        self._noise = math.sqrt(2) * float(np.median(errors)) if errors else 0.0

    def exclude(self, index: int) -> None:
        """Never ask for an assignment: it does not build, or its outputs are wrong."""
        self._excluded.add(index)

    def is_excluded(self, index: int) -> bool:
        """Whether an assignment is never asked for."""
        return index in self._excluded

    @property
    def observed(self) -> dict[int, float]:
        """log(measured / additive) of what was timed."""
        return {i: us - float(self._additive[i]) for i, us in self._log_us.items()}

    def measured_us(self, index: int) -> float:
        """Median of one that was timed, in the time scale of the first run."""
        return math.exp(self._log_us[index])

    def predicted_us(self) -> Vector:
        """Time of every assignment: as measured, else additive with the expected residual."""
        means, _ = self._residuals()
        return np.exp(self._additive + means)

    def next(self, count: int) -> Next:
        """Up to `count` assignments whose expected improvement exceeds the noise."""
        best = self.best
        if best is None:
            first = [int(i) for i in np.argsort(self._additive, kind="stable") if int(i) not in self._excluded]
            return Next(tuple(first[:count]), float("inf"))
        means, deviations = self._residuals()
        gain = expected_improvement(self._additive + means - self._log_us[best], deviations)
        gain[[*self._log_us, *self._excluded]] = 0.0
        order = np.argsort(-gain, kind="stable")
        chosen = [int(i) for i in order[:count] if gain[i] > self._noise]
        return Next(tuple(chosen), float(gain[order[0]]))

    def _residuals(self) -> tuple[Vector, Vector]:
        return self._model.residuals(self.observed)


def expected_improvement(log_ratio: Vector, deviation: Vector) -> Vector:
    """E[max(0, 1 - exp(y))] for normal y: the expected relative gain on the best.

    Args:
        log_ratio: mean of log(time / best time).
        deviation: its standard deviation; 0 where it is certain.
    """
    certain = np.maximum(0.0, -np.expm1(log_ratio))
    safe = np.where(deviation > 0, deviation, 1.0)
    z = -log_ratio / safe
    uncertain = norm.cdf(z) - np.exp(log_ratio + safe**2 / 2) * norm.cdf(z - safe)
    return np.maximum(0.0, np.where(deviation > 0, uncertain, certain))


def _relative_error_of_median(samples: Sequence[float]) -> float:
    """Standard error of the median, from the interquartile range as for a normal distribution."""
    values = np.asarray(samples, dtype=np.float64)
    low, mid, high = np.quantile(values, [0.25, 0.5, 0.75])
    return float(1.2533 * (high - low) / 1.349 / mid / math.sqrt(values.size))
