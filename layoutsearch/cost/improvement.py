"""How much faster a candidate still gets: from the tries it has had to the end of its schedule search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.intp]

# A schedule search ends after so many tries, or when the template has no more.
FULL_TRIES = 24
_TRIES = (1, 2, 4, 8, 16, FULL_TRIES)
# Pooled over 350 searches of three models: the share that stays as it is, and the mean log gain of the others.
_SETTLED = (0.10, 0.26, 0.36, 0.53, 0.80, 1.0)
_GAIN = (0.13, 0.07, 0.055, 0.04, 0.03, 0.0)
# A run's own curves outweigh the pooled ones from this number on.
_PRIOR_CURVES = 20.0


@dataclass(frozen=True)
class Improvement:
    """log(best so far / best in the end): 0 with probability `settled`, else exponential with mean `gain`.

    Attributes:
        settled: by number of tries, at 1, 2, 4, 8, 16 and `FULL_TRIES`; in between it is interpolated over log tries.
        gain: likewise.
    """

    settled: tuple[float, ...] = _SETTLED
    gain: tuple[float, ...] = _GAIN

    @classmethod
    def fit(cls, curves: Sequence[Sequence[float]]) -> Improvement:
        """Statistics of complete searches, mixed with the pooled ones.

        Args:
            curves: times (us) of the tries of one candidate each, in the order in which they were made.
        """
        settled, gain = list(_SETTLED), list(_GAIN)
        ran = [np.array([t for t in curve if np.isfinite(t)]) for curve in curves]
        for k, tries in enumerate(_TRIES[:-1]):
            gains = np.array([np.log(c[:tries].min() / c.min()) for c in ran if len(c)])
            positive = gains[gains > 0]
            moved = _PRIOR_CURVES * (1 - _SETTLED[k])
            settled[k] = (_PRIOR_CURVES * _SETTLED[k] + len(gains) - len(positive)) / (_PRIOR_CURVES + len(gains))
            gain[k] = (moved * _GAIN[k] + positive.sum()) / (moved + len(positive))
        return cls(tuple(settled), tuple(gain))

    def at(self, tries: IntArray) -> tuple[FloatArray, FloatArray]:
        """`settled` and `gain` after a number of tries, at least one."""
        where, known = np.log(np.maximum(tries, 1)), np.log(_TRIES)
        return np.interp(where, known, self.settled), np.interp(where, known, self.gain)

    def moments(self, tries: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Mean and variance of the log gain to come, and the mean factor on the time."""
        settled, gain = self.at(tries)
        mean = (1 - settled) * gain
        return mean, 2 * (1 - settled) * gain**2 - mean**2, settled + (1 - settled) / (1 + gain)

    def quantile(self, tries: IntArray, quantile: float) -> FloatArray:
        """The log gain that is exceeded with probability `quantile`."""
        settled, gain = self.at(tries)
        open_share = np.maximum(1 - settled, 1e-12)
        return np.where(quantile < open_share, -gain * np.log(np.minimum(quantile / open_share, 1.0)), 0.0)

    def draw(self, tries: IntArray, rng: np.random.Generator, size: int) -> FloatArray:
        """Log gains to come, shape (size, len(tries))."""
        settled, gain = self.at(tries)
        shape = (size, len(tries))
        return np.where(rng.random(shape) < settled, 0.0, rng.standard_exponential(shape) * gain)
