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
_GAIN = (0.14, 0.075, 0.06, 0.04, 0.03, 0.0)
# One gain in ten is of another kind, such as the first schedule that is vectorized: parts and means of the two, the
# latter in units of the mean of both.
_PARTS, _MEANS = (0.9, 0.1), (0.8, 2.8)
# A run's own curves outweigh the pooled ones from this number on.
_PRIOR_CURVES = 20.0


@dataclass(frozen=True)
class Improvement:
    """log(best so far / best in the end): 0 with probability `settled`, else of mean `gain`, one of two exponentials.

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
        square = (1 - settled) * sum(p * 2 * (m * gain) ** 2 for p, m in zip(_PARTS, _MEANS, strict=True))
        factor = settled + (1 - settled) * sum(p / (1 + m * gain) for p, m in zip(_PARTS, _MEANS, strict=True))
        return mean, square - mean**2, factor

    def quantile(self, tries: IntArray, quantile: float) -> FloatArray:
        """The log gain that is exceeded with probability `quantile`."""
        settled, gain = self.at(tries)
        grid = np.linspace(0.0, 20.0, 401)
        above = sum(p * np.exp(-grid / m) for p, m in zip(_PARTS, _MEANS, strict=True))
        # In units of the mean; of those that move at all, this share moves farther.
        wanted = np.minimum(quantile / np.maximum(1 - settled, 1e-12), 1.0)
        return gain * np.interp(-np.log(wanted), -np.log(above), grid)

    def draw(self, tries: IntArray, rng: np.random.Generator, size: int) -> FloatArray:
        """Log gains to come, shape (size, len(tries))."""
        settled, gain = self.at(tries)
        shape = (size, len(tries))
        means = np.where(rng.random(shape) < _PARTS[1], _MEANS[1], _MEANS[0]) * gain
        return np.where(rng.random(shape) < settled, 0.0, rng.standard_exponential(shape) * means)
