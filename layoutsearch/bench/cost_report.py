"""What an evaluation of the cost model comes to: a summary against the targets, CSV files, plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from layoutsearch.bench.cost_model import OWN_TIMINGS, Evaluation
from layoutsearch.cost.conformal import coverage

TARGETS = {
    "kernel_spearman": (0.95, 1.0),
    "kernel_error": (0.0, 0.15),
    "transform_error": (0.0, 0.10),
    "choice_regret": (0.0, 0.05),
    "kernel_coverage": (0.75, 0.85),
    "transform_coverage": (0.75, 0.85),
    "whole_error": (0.0, 0.05),
    "whole_error_corrected": (0.0, 0.03),
}
"""Lowest and highest value of each number over all models together."""

ALL = "all"


def summarize(found: Evaluation) -> dict[str, dict[str, float]]:
    """Numbers by table, and over all of them as `all`."""
    names = list(found.kernels["table"].unique())
    return {name: _numbers(found, name) for name in [*names, ALL]}


def met_targets(summary: dict[str, dict[str, float]]) -> dict[str, bool]:
    """Which targets hold over all models together."""
    return {name: bool(low <= summary[ALL][name] <= high) for name, (low, high) in TARGETS.items()}


def relative_error(us: pd.Series, predicted: pd.Series) -> float:
    """Median of |predicted / measured - 1|, where there is a prediction."""
    errors = (predicted / us - 1.0).abs()
    return float(errors.median())


def choice_regret(kernels: pd.DataFrame) -> float:
    """Time lost, over all operators, where each takes the candidate that is predicted fastest, over the fastest."""
    lost = best = 0.0
    for _, group in kernels.groupby(["table", "workload"], sort=False):
        count = float(group["count"].iloc[0])
        lowest = float(group["us"].min())
        lost += count * (float(group["us"].loc[group["predicted_us"].idxmin()]) - lowest)
        best += count * lowest
    return lost / best


def _numbers(found: Evaluation, name: str) -> dict[str, float]:
    def of(frame: pd.DataFrame) -> pd.DataFrame:
        return frame if name == ALL else frame[frame["table"] == name]

    kernels, transforms, wholes, choices = map(of, (found.kernels, found.transforms, found.wholes, found.choices))
    timed, moved = kernels[~kernels["view"]], transforms[~transforms["view"]]
    numbers = {
        "kernel_spearman": float(timed["us"].corr(timed["predicted_us"], method="spearman")),
        "kernel_error": relative_error(timed["us"], timed["predicted_us"]),
        "kernel_coverage": _covered(timed),
        "transform_error": relative_error(moved["us"], moved["predicted_us"]),
        "transform_coverage": _covered(moved),
        "choice_regret": choice_regret(kernels),
        "assignment_regret": float(choices["chosen_us"].sum() / choices["optimum_us"].sum() - 1.0),
        "whole_error": relative_error(wholes["us"], wholes["additive_us"]),
        "whole_error_modeled": relative_error(wholes["us"], wholes["modeled_us"]),
        "whole_error_corrected": relative_error(wholes["us"], wholes["corrected_us"]),
    }
    for count in OWN_TIMINGS:
        numbers[f"whole_error_own_{count}"] = relative_error(wholes["us"], wholes[f"own_{count}_us"])
    numbers |= {"kernels": len(timed), "transforms": len(moved), "assignments": len(wholes)}
    return numbers


def _covered(frame: pd.DataFrame) -> float:
    errors = np.log(frame["us"].to_numpy() / frame["predicted_us"].to_numpy())
    return coverage(errors, frame["sigma"].to_numpy())


def write_report(found: Evaluation, summary: dict[str, dict[str, float]], folder: Path) -> None:
    """CSV files and plots into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(summary).T.rename_axis("table").to_csv(folder / "summary.csv", float_format="%.4f")
    for name in ("kernels", "transforms", "wholes", "choices"):
        getattr(found, name).to_csv(folder / f"{name}.csv", index=False, float_format="%.5g")
    _plots(found, folder)


def _plots(found: Evaluation, folder: Path) -> None:
    # Chosen before pyplot is imported: there may be no display.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name, frame in (("kernels", found.kernels), ("transforms", found.transforms)):
        figure, axes = pyplot.subplots(figsize=(6, 6))
        _scatter(axes, frame, "predicted_us")
        axes.set(xscale="log", yscale="log", xlabel="measured, us", ylabel="predicted, us")
        axes.set_title(f"{name}, each model left out")
        _save(figure, folder / f"{name}.png")
    columns = [("additive_us", "sum of measured parts"), ("corrected_us", "corrected, model left out")]
    columns.append((f"own_{OWN_TIMINGS[-1]}_us", f"after {OWN_TIMINGS[-1]} own timings"))
    figure, row = pyplot.subplots(1, len(columns), figsize=(5 * len(columns), 5), sharex=True, sharey=True)
    for axes, (column, title) in zip(row, columns, strict=True):
        _scatter(axes, found.wholes, column)
        axes.set(xscale="log", yscale="log", xlabel="measured whole, us", title=title)
    row[0].set_ylabel("predicted, us")
    _save(figure, folder / "wholes.png")


def _scatter(axes: Any, frame: pd.DataFrame, column: str) -> None:
    low, high = float(frame["us"].min()), float(frame["us"].max())
    axes.plot([low, high], [low, high], color="0.7", linewidth=1, zorder=0)
    for name, group in frame.groupby("table", sort=False):
        axes.scatter(group["us"], group[column], s=8, alpha=0.6, label=str(name))
    axes.legend(fontsize=7)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
