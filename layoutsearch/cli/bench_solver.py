"""`layoutsearch bench solver`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from layoutsearch.errors import LayoutSearchError


def parse_sizes(text: str) -> tuple[int, ...]:
    """Numbers of operators, separated by commas.

    Raises:
        LayoutSearchError: something else.
    """
    try:
        sizes = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 20:
        raise LayoutSearchError(f"--sizes {text!r}: expected numbers of operators from 20, such as 100,1000")
    return sizes


@click.command("solver")
@click.option("--sizes", default="50,100,200,500,1000,2000", show_default=True, help="Numbers of operators to plot.")
@click.option("--seeds", type=click.IntRange(1), default=1, show_default=True, help="Instances of each kind.")
@click.option("--time-limit", type=float, default=10.0, show_default=True, help="Seconds for each instance.")
@click.option("--out", type=click.Path(file_okay=False), default="results/bench/solver", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def solver(sizes: str, seeds: int, time_limit: float, out: str, as_json: bool) -> None:
    """Time the exact solver on problems shaped like real networks.

    Chains with skips, DenseNet, U-Net, ResNet and Inception by number of operators, ten candidates each, transforms
    shared by their consumers; realistic costs, and adversarial ones, which are reported with their gap.
    """
    from layoutsearch.bench.solver import TARGET_MB, TARGET_S, default_instances, met_targets, run_instances
    from layoutsearch.bench.solver import write_results as write

    instances = default_instances(parse_sizes(sizes), seeds)
    with Console(stderr=True).status("solving") as status:
        rows = run_instances(instances, time_limit_s=time_limit, tell=status.update)
    write(rows, Path(out))
    met = met_targets(rows)
    if as_json:
        limits = {"seconds": TARGET_S, "peak_mb": TARGET_MB}
        click.echo(json.dumps({"targets": met, "limits": limits, "instances": [asdict(row) for row in rows]}))
        return
    table = Table()
    for heading in ("instance", "costs", "ops", "candidates", "seconds", "peak MB", "method", "proven", "gap"):
        table.add_column(heading, justify="left" if heading in ("instance", "costs", "method") else "right")
    for row in rows:
        gap = "" if row.proven else f"{row.gap:.3%}"
        numbers = (str(row.ops), str(row.candidates), f"{row.seconds:.2f}", f"{row.peak_mb:.0f}")
        table.add_row(row.instance, row.costs, *numbers, row.method, "yes" if row.proven else "no", gap)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for name, good in met.items():
        console.print(f"{name}: {'' if good else 'NOT '}proven within {TARGET_S:g} s and {TARGET_MB:g} MB")
    console.print(f"table and plot: {out}")
