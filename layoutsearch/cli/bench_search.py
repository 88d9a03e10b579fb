"""`layoutsearch bench search`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table


@click.command("search")
@click.option("--tables", default="results/tables", show_default=True, help="Folder of recorded tables.")
@click.option("--seeds", type=click.IntRange(1), default=5, show_default=True, help="Runs of each search.")
@click.option("--searches", default="solver,tpe,nsga2,random,greedy", show_default=True, help="Which, by commas.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Processes.")
@click.option("--out", type=click.Path(file_okay=False), default="results/bench/search", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def search(tables: str, seeds: int, searches: str, jobs: int, out: str, as_json: bool) -> None:
    """How good an assignment is found after how many measurements.

    Searches replay recorded tables; the cost model knows the tables of other models only. Beside the lazy exact search
    stand Optuna's samplers and the fastest candidate of each operator.
    """
    from layoutsearch.bench.cost_model import load_tables
    from layoutsearch.bench.search import SEARCHES, cases, compare
    from layoutsearch.bench.search_report import TARGETS, met_targets, summarize, write_report
    from layoutsearch.errors import LayoutSearchError

    wanted = [name.strip() for name in searches.split(",") if name.strip()]
    unknown = sorted(set(wanted) - set(SEARCHES))
    if unknown or SEARCHES[0] not in wanted:
        raise LayoutSearchError(f"--searches {searches}: expected {SEARCHES[0]} and any of {', '.join(SEARCHES[1:])}")
    recorded = load_tables(tables)
    with Console(stderr=True).status("searching") as status:
        points = compare(cases(recorded), seeds, wanted, tell=status.update, jobs=jobs)
    summary = summarize(points)
    write_report(points, summary, Path(out))
    met = met_targets(summary)
    if as_json:
        ids = {name: table.id for name, table in recorded.items()}
        click.echo(json.dumps({"models": summary, "targets": TARGETS, "met": met, "tables": ids, "seeds": seeds}))
        return
    table = Table()
    for heading in ("model", "within 3 %", "within 1 %", "gap at 25 %", "strict", "bound holds"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name in wanted:
        table.add_column(f"{name}: regret", justify="right")
    for model, numbers in summary.items():
        shares = [numbers["share_at_3pct"], numbers["share_at_1pct"]]
        row = ["never" if share is None else f"{share:.0%}" for share in shares]
        row += [f"{numbers[key]:.1%}" for key in ("gap_at_25pct", "strict_gap_at_25pct")]
        row.append(f"{numbers['bound_valid']:.0%}")
        row += [" / ".join(f"{value:.1%}" for value in numbers["regret"][name].values()) for name in wanted]
        table.add_row(model, *row)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    console.print("regret: with 10 % / 25 % of the candidates measured, median over seeds")
    for name, good in met.items():
        console.print(f"{name}: {'met' if good else 'NOT met'} for all models")
    console.print(f"tables and plots: {out}")
