"""Is the candidate faster than the baseline? Statistics on rounds that ran both, interleaved.

Times on a shared machine drift, and they have outliers upwards: so medians, and rounds kept together as pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_RESAMPLES = 2000
_FLIPS = 2000


@dataclass(frozen=True)
class Summary:
    """Robust description of repeated times: median, quartiles and count, in the unit of the samples."""

    median: float
    lower_quartile: float
    upper_quartile: float
    count: int

    @property
    def spread(self) -> float:
        """Interquartile range over the median: 0.02 is quiet, 0.2 a busy machine."""
        return (self.upper_quartile - self.lower_quartile) / self.median


@dataclass(frozen=True)
class Comparison:
    """Outcome of `compare`.

    Attributes:
        speedup: median time of the baseline over that of the candidate; above 1 the candidate is faster.
        ci: confidence interval of the speedup.
        p_value: one-sided, of the hypothesis that the two are equally fast.
        accepted: whether the candidate may replace the baseline.
        rounds: number of paired rounds.
    """

    speedup: float
    ci: tuple[float, float]
    p_value: float
    accepted: bool
    rounds: int


def _samples(name: str, values: Sequence[float]) -> npt.NDArray[np.float64]:
    out = np.asarray(values, dtype=np.float64)
    if out.ndim != 1 or not out.size:
        raise ValueError(f"{name}: expected a non-empty flat sequence of times, got shape {out.shape}")
    if not np.isfinite(out).all() or (out <= 0).any():
        raise ValueError(f"{name}: times must be finite and above 0; leave out rounds that failed")
    return out


def summarize(samples: Sequence[float]) -> Summary:
    """Median and quartiles.

    Raises:
        ValueError: no samples, or one that is not a positive number.
    """
    low, mid, high = np.quantile(_samples("samples", samples), [0.25, 0.5, 0.75])
    return Summary(float(mid), float(low), float(high), len(samples))


def _sign_flip_p(log_ratios: npt.NDArray[np.float64], rng: np.random.Generator) -> float:
    """One-sided p of the mean signed rank under random swaps of the two times within each round."""
    ranks = np.argsort(np.argsort(np.abs(log_ratios), kind="stable"), kind="stable") + 1.0
    ranks[log_ratios == 0] = 0.0
    observed = float((ranks * np.sign(log_ratios)).sum())
    n = len(log_ratios)
    if n <= 12:
        signs = 1.0 - 2.0 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
        return float(np.mean(signs @ ranks >= observed))
    signs = 1.0 - 2.0 * rng.integers(0, 2, size=(_FLIPS, n))
    return float((1 + np.count_nonzero(signs @ ranks >= observed)) / (_FLIPS + 1))


def compare(
    baseline_us: Sequence[float],
    candidate_us: Sequence[float],
    *,
    confidence: float = 0.95,
    min_effect: float = 0.01,
    seed: int = 0,
) -> Comparison:
    """Compare times of interleaved rounds; `baseline_us[k]` and `candidate_us[k]` are of the same round.

    Method: the speedup is the ratio of the medians; its interval is the percentile bootstrap over rounds, both times of
    a round drawn together, so that drift common to both cancels. The percentile interval is too narrow with few rounds,
    so a win must also pass Wilcoxon's signed-rank statistic under sign flips of the log ratios (exact up to 12 rounds):
    its false-win rate holds with few rounds and under any drift, as long as the order within a round is random.
    A candidate is accepted if its speedup is at least 1 + `min_effect`, the interval lies above 1, and the test rejects
    at half of 1 - `confidence` (the same tail as the interval). Fewer than 6 rounds cannot win at 0.95.

    Where the best of k candidates is tried, pass 1 - 0.05 / k as `confidence`, or the best of k lucky draws wins.

    Args:
        baseline_us: times of the baseline, one per round.
        candidate_us: times of the candidate, one per round.
        confidence: of the two-sided interval.
        min_effect: smallest relative gain worth a change.
        seed: of the resampling; the result is a function of the arguments.

    Raises:
        ValueError: different numbers of rounds, none, a time that is not positive, or a confidence outside (0, 1).
    """
    base, cand = _samples("baseline_us", baseline_us), _samples("candidate_us", candidate_us)
    if len(base) != len(cand):
        raise ValueError(f"rounds come in pairs: {len(base)} baseline times, {len(cand)} candidate times")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence} is not between 0 and 1")
    rng = np.random.default_rng(seed)
    n = len(base)
    speedup = float(np.median(base) / np.median(cand))
    rounds = rng.integers(0, n, size=(_RESAMPLES, n))
    ratios = np.median(base[rounds], axis=1) / np.median(cand[rounds], axis=1)
    tail = (1 - confidence) / 2
    low, high = (float(q) for q in np.quantile(ratios, [tail, 1 - tail]))
    p_value = _sign_flip_p(np.log(base / cand), rng)
    accepted = speedup >= 1 + min_effect and low > 1 and p_value <= tail + math.ulp(1.0)
    return Comparison(speedup, (low, high), p_value, accepted, n)
