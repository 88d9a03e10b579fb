"""`layoutsearch bench acceptance`: how often the rule of acceptance is wrong, on a device's own noise.

Each A/A pair is one trial: a win of either copy over the other would be a false one. With the times of one side divided
by 1.03 the same samples are a true gain of 3 % under real noise; the share that is accepted is the power.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from layoutsearch.bench.aa_samples import Pair, Samples
from layoutsearch.search.acceptance import compare

ALPHA = 0.05
TARGET_GAIN = 0.03
TARGET_POWER = 0.8
GAINS = (0.0, 0.01, 0.02, 0.03, 0.05)
# Fewer starts than were run, to see what each is worth.
_STARTS = (4, 6, 8, 10)


@dataclass(frozen=True)
class PowerRow:
    """Share of pairs accepted at a true gain (0: false wins), with its 95 % Wilson interval."""

    gain: float
    starts: int
    rounds: int
    pairs: int
    accepted: int
    share: float
    low: float
    high: float


@dataclass(frozen=True)
class Noise:
    """Standard deviations of the log of the ratio of two equal copies, as robust estimates.

    Attributes:
        between: of what a process start does to it.
        within: of a single round, apart from that.
        load_order: mean log ratio; away from 0 by more than `load_order_se`, one copy is favored.
        load_order_se: its standard error.
    """

    between: float
    within: float
    load_order: float
    load_order_se: float


@dataclass(frozen=True)
class AcceptanceResult:
    """What a set of samples says about the rule."""

    rows: tuple[PowerRow, ...]
    noise: Noise
    false_wins: PowerRow
    power: PowerRow

    def as_json(self, samples: Samples) -> dict[str, Any]:
        """One object with everything but the raw samples."""
        return {
            **asdict(samples.origin),
            "pairs": len(samples.pairs),
            "alpha": ALPHA,
            "false_win_rate": self.false_wins.share,
            "false_win_rate_ci": [self.false_wins.low, self.false_wins.high],
            "gain": TARGET_GAIN,
            "accepted_share": self.power.share,
            "accepted_share_ci": [self.power.low, self.power.high],
            "noise": asdict(self.noise),
            "curve": [asdict(row) for row in self.rows],
        }


def evaluate(samples: Samples) -> AcceptanceResult:
    """Apply the rule to every pair, at every gain, with all starts and with the first few of them.

    Raises:
        ValueError: there are no pairs.
    """
    if not samples.pairs:
        raise ValueError("there are no pairs to evaluate")
    most = max(len(pair.a_us) // pair.per_start for pair in samples.pairs)
    counts = sorted({n for n in _STARTS if n < most} | {most})
    rows = tuple(_row(samples.pairs, gain, n) for n in counts for gain in GAINS)
    full = {row.gain: row for row in rows if row.starts == most}
    return AcceptanceResult(rows, _noise(samples.pairs), full[0.0], full[TARGET_GAIN])


def _row(pairs: Sequence[Pair], gain: float, starts: int) -> PowerRow:
    accepted = 0
    for pair in pairs:
        rounds = starts * pair.per_start
        faster = [us / (1 + gain) for us in pair.b_us[:rounds]]
        accepted += compare(pair.a_us[:rounds], faster, per_start=pair.per_start, seed=pair.seed).accepted
    interval = stats.binomtest(accepted, len(pairs)).proportion_ci(method="wilson")
    share = accepted / len(pairs)
    return PowerRow(gain, starts, starts * pairs[0].per_start, len(pairs), accepted, share, interval.low, interval.high)


def _noise(pairs: Sequence[Pair]) -> Noise:
    """Median-based, since tails are heavy; the part of rounds is taken off that of starts."""
    centres, inner, sizes = [], [], []
    for pair in pairs:
        ratios = np.log(np.array(pair.a_us) / np.array(pair.b_us))
        for block in np.split(ratios, range(pair.per_start, len(ratios), pair.per_start)):
            centres.append(float(np.median(block)))
            if len(block) > 1:
                # Deviations from a mean of few are too small by this factor.
                inner.append((block - block.mean()) * math.sqrt(len(block) / (len(block) - 1)))
            sizes.append(len(block))
    within = float(stats.median_abs_deviation(np.concatenate(inner), scale="normal")) if inner else 0.0
    total = float(stats.median_abs_deviation(centres, scale="normal"))
    # The variance of a median of n normal values is about pi / 2 / (n + 1.3) of theirs.
    noise = within**2 * math.pi / 2 / (float(np.mean(sizes)) + 1.3)
    between = math.sqrt(max(0.0, total**2 - noise))
    error = float(np.std(centres, ddof=1) / math.sqrt(len(centres))) if len(centres) > 1 else math.inf
    return Noise(between, within, float(np.mean(centres)), error)


def write_results(result: AcceptanceResult, samples: Samples, folder: Path) -> None:
    """`acceptance.csv` with every row, and `acceptance.png`: share accepted against the true gain."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame([asdict(row) for row in result.rows])
    table.to_csv(folder / "acceptance.csv", index=False, float_format="%.6g")
    figure, axes = pyplot.subplots(figsize=(6.5, 4.2))
    for starts, line in table.groupby("starts"):
        full = starts == result.power.starts
        below, above = (line.share - line.low).clip(lower=0), (line.high - line.share).clip(lower=0)
        style = {"linewidth": 1.8} if full else {"linewidth": 0.8, "alpha": 0.6}
        axes.errorbar(
            100 * line.gain,
            100 * line.share,
            yerr=[100 * below, 100 * above] if full else None,
            marker="o",
            markersize=4,
            capsize=2,
            label=f"{starts} starts",
            **style,
        )
    axes.axhline(100 * TARGET_POWER, color="grey", linewidth=0.8, linestyle="--")
    axes.axhline(100 * ALPHA, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="true gain, %", ylabel="accepted, % of pairs", ylim=(-2, 102))
    axes.set_title(f"{samples.origin.model}: {len(samples.pairs)} A/A pairs", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "acceptance.png", dpi=140)
    pyplot.close(figure)
