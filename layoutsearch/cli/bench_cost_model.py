"""`layoutsearch bench cost-model`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

_COLUMNS = (
    ("kernel_spearman", "kernels: rank", "{:.3f}"),
    ("kernel_error", "error", "{:.1%}"),
    ("kernel_coverage", "80 % holds", "{:.0%}"),
    ("transform_error", "transforms: error", "{:.1%}"),
    ("transform_coverage", "80 % holds", "{:.0%}"),
    ("choice_regret", "regret per op", "{:.1%}"),
    ("assignment_regret", "solved", "{:.1%}"),
    ("whole_error", "whole: sum", "{:.1%}"),
    ("whole_error_corrected", "corrected", "{:.1%}"),
    ("whole_error_own_5", "5 own", "{:.1%}"),
)


@click.command("cost-model")
@click.option("--tables", default="results/tables", show_default=True, help="Folder of recorded tables.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the fits and of which timings are known.")
@click.option("--out", type=click.Path(file_okay=False), default="results/bench/cost-model", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def cost_model(tables: str, seed: int, out: str, as_json: bool) -> None:
    """Predict each recorded model from the others.

    Kernels and transforms by the cost model, whole models by the sum of their parts and its correction; what choosing
    by predictions alone would lose.
    """
    from layoutsearch.bench.cost_model import evaluate, load_tables
    from layoutsearch.bench.cost_report import TARGETS, met_targets, summarize, write_report

    recorded = load_tables(tables)
    with Console(stderr=True).status("fitting") as status:
        found = evaluate(recorded, seed, tell=status.update)
    summary = summarize(found)
    write_report(found, summary, Path(out))
    met = met_targets(summary)
    if as_json:
        ids = {name: table.id for name, table in recorded.items()}
        click.echo(json.dumps({"models": summary, "targets": TARGETS, "met": met, "tables": ids, "seed": seed}))
        return
    table = Table()
    table.add_column("model left out")
    for _, heading, _ in _COLUMNS:
        table.add_column(heading, justify="right")
    for name, numbers in summary.items():
        table.add_row(name, *(text.format(numbers[key]) for key, _, text in _COLUMNS))
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    for name, good in met.items():
        low, high = TARGETS[name]
        console.print(f"{name} {summary['all'][name]:.3f}: {'' if good else 'NOT '}within {low:g} to {high:g}")
    console.print(f"tables and plots: {out}")
