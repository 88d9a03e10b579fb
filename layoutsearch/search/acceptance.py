"""Is the candidate faster than the baseline? Statistics on rounds that ran both, interleaved, over process starts.

Times on a shared machine drift, and they have outliers upwards: so medians, and rounds kept together as pairs. And
where a process happens to place its memory speeds a model up or slows it down for as long as the process lives: rounds
of one start are alike in a way that no number of rounds averages out. So the start, not the round, is independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

# The default budget, chosen by simulation with the noise of real runs: the ratio of two models varies by 0.3 to 1.5 %
# from start to start and by 1 to 5 % from round to round. A start costs a second or more, a round some 0.05 s. Four
# starts, of however many rounds, find a true gain of 3 % in two thirds of the cases at most where starts differ by 1 %;
# ten starts of six rounds do in nine of ten. Where one start in ten is 8 % slower for one side, they do in little more
# than half. `bench acceptance` asks a device.
FINAL_STARTS = 10
ROUNDS_PER_START = 6
FINAL_ROUNDS = FINAL_STARTS * ROUNDS_PER_START
# Smallest estimated gain that is worth a change.
MIN_EFFECT = 0.005

_RESAMPLES = 1000
_FLIPS = 2000
_EXACT_STARTS = 12


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
        ci: confidence interval of the speedup; (0, inf) where there is one start only, which says nothing of others.
        p_value: one-sided, of the hypothesis that the two are equally fast.
        accepted: whether the candidate may replace the baseline.
        rounds: number of paired rounds.
        starts: number of independent blocks of rounds: process starts, or rounds where starts are not told apart.
    """

    speedup: float
    ci: tuple[float, float]
    p_value: float
    accepted: bool
    rounds: int
    starts: int


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


def _sign_flip_p(effects: npt.NDArray[np.float64], rng: np.random.Generator) -> float:
    """One-sided p of the signed-rank sum under random swaps of the two sides within each start."""
    ranks = stats.rankdata(np.abs(effects))
    ranks[effects == 0] = 0.0
    # Half a unit of slack: rank sums are multiples of 0.5, and rounding must not split ties.
    observed = float((ranks * np.sign(effects)).sum()) - 0.25
    n = len(effects)
    if n <= _EXACT_STARTS:
        signs = 1.0 - 2.0 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
        return float(np.mean(signs @ ranks >= observed))
    signs = 1.0 - 2.0 * rng.integers(0, 2, size=(_FLIPS, n))
    return float((1 + np.count_nonzero(signs @ ranks >= observed)) / (_FLIPS + 1))


def _pseudo_median(effects: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Hodges-Lehmann estimate along the last axis: the median of the means of all pairs, each with itself included."""
    first, second = np.triu_indices(effects.shape[-1])
    return np.asarray(np.median((effects[..., first] + effects[..., second]) / 2, axis=-1))


def _interval(effects: npt.NDArray[np.float64], tail: float, rng: np.random.Generator) -> tuple[float, float]:
    """Bootstrap interval of the pseudo-median: whole starts are drawn, and the quantiles' distance is stretched."""
    n = len(effects)
    if n == 1:
        return -math.inf, math.inf
    centre = float(_pseudo_median(effects))
    drawn = _pseudo_median(effects[rng.integers(0, n, size=(_RESAMPLES, n))])
    stretch = float(stats.t.ppf(1 - tail, n - 1) / stats.norm.ppf(1 - tail)) * math.sqrt(n / (n - 1))
    low, high = (float(q) for q in np.quantile(drawn, [tail, 1 - tail]))
    return centre - stretch * max(0.0, centre - low), centre + stretch * max(0.0, high - centre)


def compare(
    baseline_us: Sequence[float],
    candidate_us: Sequence[float],
    *,
    per_start: int = 1,
    confidence: float = 0.95,
    min_effect: float = MIN_EFFECT,
    seed: int = 0,
) -> Comparison:
    """Compare times of interleaved rounds; `baseline_us[k]` and `candidate_us[k]` are of the same round.

    Method. In each process start, the log of the ratio of the two medians; what drifts from start to start cancels.
    The speedup is the pseudo-median of these (Hodges and Lehmann 1963), which one odd start does not move much. Its
    interval is the bootstrap over whole starts, as is right for clustered data when clusters differ more than their
    members (Davison and Hinkley, Bootstrap Methods, 1997, section 3.8). A percentile interval of n starts is too
    narrow by the factor that Student's t and n / (n - 1) make up for (Hesterberg, The American Statistician 69,
    2015); it is stretched by that. A win must also pass the signed-rank test under swaps of the two sides of whole
    starts, exact up to 12 starts, whose false-win rate holds whatever starts do to times, as long as they do it to
    both sides alike.

    A candidate is accepted if the estimate is at least 1 + `min_effect`, the interval lies above 1, and the test
    rejects at (1 - `confidence`) / 2, the same tail as the interval: at 0.95, false wins are at most 2.5 %. The
    smallest effect is asked of the estimate and not of the interval's lower end: that end says that the plan is no
    regression, and asking more of it would take away a sixth of a true gain of 3 %. With less than 6 starts the
    test cannot reject at 0.95; then all starts must agree, and the interval, by then several times as wide,
    decides.

    Only fresh samples are valid here. Those by which the best of k challengers was chosen flatter it; where they have
    to be used, pass 1 - 0.05 / k as `confidence`.

    Args:
        baseline_us: times of the baseline, one per round.
        candidate_us: times of the candidate, one per round.
        per_start: rounds of each process start, in order; the last may have less. With 1, rounds are taken to be
            independent, which they are if nothing lasts from one to the next.
        confidence: of the two-sided interval.
        min_effect: smallest relative gain worth a change.
        seed: of the resampling; the result is a function of the arguments.

    Raises:
        ValueError: different numbers of rounds, none, a time that is not positive, `per_start` below 1, or a confidence
            outside (0, 1).
    """
    base, cand = _samples("baseline_us", baseline_us), _samples("candidate_us", candidate_us)
    if len(base) != len(cand):
        raise ValueError(f"rounds come in pairs: {len(base)} baseline times, {len(cand)} candidate times")
    if per_start < 1:
        raise ValueError(f"per_start is {per_start}; a start has at least 1 round")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence} is not between 0 and 1")
    rng = np.random.default_rng(seed)
    cuts = range(per_start, len(base), per_start)
    starts = zip(np.split(base, cuts), np.split(cand, cuts), strict=True)
    effects = np.array([math.log(float(np.median(b)) / float(np.median(c))) for b, c in starts])
    speedup = math.exp(float(_pseudo_median(effects)))
    tail = (1 - confidence) / 2
    log_low, log_high = _interval(effects, tail, rng)
    low, high = math.exp(log_low), math.exp(log_high)
    p_value = _sign_flip_p(effects, rng)
    beaten = p_value <= max(tail, 0.5 ** len(effects)) + math.ulp(1.0)
    accepted = speedup >= 1 + min_effect and low > 1 and beaten
    return Comparison(speedup, (low, high), p_value, accepted, len(base), len(effects))
