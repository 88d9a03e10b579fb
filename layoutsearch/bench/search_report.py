"""What a comparison of searches comes to: a summary against the targets, CSV files, plots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from layoutsearch.bench.search import OURS

TARGETS = {
    "share_at_3pct": 0.10,
    "share_at_1pct": 0.25,
    "gap_at_25pct": 0.06,
    "regret_at_100pct": 0.0,
    "gap_at_100pct": 0.0,
}
"""Highest value of each number, for every model."""

LEAST_VALID = 0.95
"""Lowest share of runs and limits in which the optimum is above the statistical bound, over all models together."""

_AT = (0.10, 0.25)
_ROUNDING = 1e-9


def summarize(points: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Numbers of each table; see `bench.search.compare` for the points. Medians over seeds."""
    return {str(name): _numbers(group) for name, group in points.groupby("table", sort=False)}


def met_targets(summary: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    """Which targets hold for every model."""
    met = {
        name: all(numbers[name] is not None and numbers[name] <= high + _ROUNDING for numbers in summary.values())
        for name, high in TARGETS.items()
    }
    valid = [numbers["bound_valid"] for numbers in summary.values()]
    return {**met, "bound_valid": sum(valid) / len(valid) >= LEAST_VALID}


def _numbers(points: pd.DataFrame) -> dict[str, Any]:
    ours = points[points["search"] == OURS]

    def at(limit: float, column: str, rows: pd.DataFrame = ours) -> float:
        return float(rows.loc[rows["limit"] == limit, column].median())

    return {
        "share_at_3pct": share_within(ours, 0.03),
        "share_at_1pct": share_within(ours, 0.01),
        "gap_at_25pct": at(0.25, "gap"),
        "strict_gap_at_25pct": at(0.25, "strict_gap"),
        "bound_valid": float(ours["valid"].mean()),
        "regret_at_100pct": at(1.0, "regret"),
        "gap_at_100pct": at(1.0, "gap"),
        "regret": {
            str(search): {f"{limit:.0%}": at(limit, "regret", rows) for limit in _AT}
            for search, rows in points.groupby("search", sort=False)
        },
        "worst_regret": {f"{limit:.0%}": float(ours.loc[ours["limit"] == limit, "regret"].max()) for limit in _AT},
    }


def share_within(points: pd.DataFrame, regret: float) -> float | None:
    """Median over seeds of the smallest limit at which, and at all larger ones, the regret is at most that.

    None where half of the seeds never get there.
    """
    found = []
    for _, run in points.groupby("seed"):
        run = run.sort_values("limit")
        outside = run.loc[run["regret"] > regret + _ROUNDING, "limit"]
        inside = run.loc[run["limit"] > outside.max(), "limit"] if len(outside) else run["limit"]
        found.append(float(inside.min()) if len(inside) else float("inf"))
    middle = float(pd.Series(found).median())
    return middle if middle < float("inf") else None


def write_report(points: pd.DataFrame, summary: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """`points.csv`, `summary.csv`, and a plot of regret and of the gap for each table."""
    folder.mkdir(parents=True, exist_ok=True)
    points.to_csv(folder / "points.csv", index=False, float_format="%.6g")
    flat = []
    for name, numbers in summary.items():
        row = {key: value for key, value in numbers.items() if not isinstance(value, dict)}
        row |= {f"regret_{s}_{at}": us for s, values in numbers["regret"].items() for at, us in values.items()}
        flat.append({"table": name, **row})
    pd.DataFrame(flat).to_csv(folder / "summary.csv", index=False, float_format="%.6g")
    for name, group in points.groupby("table", sort=False):
        _plot(str(name), group, folder / f"{name}.png")


def _plot(name: str, points: pd.DataFrame, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for search, rows in points.groupby("search", sort=False):
        by_limit = rows.groupby("limit")["regret"]
        middle = 100 * by_limit.median()
        left.plot(100 * middle.index, middle, marker="o", markersize=3, label=str(search))
        left.fill_between(100 * middle.index, 100 * by_limit.min(), 100 * by_limit.max(), alpha=0.15)
    left.set_yscale("symlog", linthresh=1.0)
    left.set(title=name, xlabel="candidates measured, %", ylabel="regret, %", ylim=(0, None))
    left.legend()
    ours = points[points["search"] == OURS].groupby("limit")[["gap", "strict_gap", "regret"]].median()
    for column, label in (("gap", "gap, 95 %"), ("strict_gap", "strict gap"), ("regret", "true regret")):
        right.plot(100 * ours.index, 100 * ours[column], marker="o", markersize=3, label=label)
    right.set(title="how far it says it may be", xlabel="candidates measured, %", ylabel="%", ylim=(0, None))
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
