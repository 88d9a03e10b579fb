"""`layoutsearch bench model --per-op`: the words around the measurement."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
from rich.console import Console


def per_op(model: str, plan_path: str, roofline: str | None, as_json: bool, **how: Any) -> None:
    """Time every kernel of a plan within the model and print a table, or JSON; draw a roofline where it is asked for.

    Raises:
        LayoutSearchError: see `bench_per_op` and `plot_roofline`.
    """
    from layoutsearch.bench import per_op_report
    from layoutsearch.bench.per_op import bench_per_op
    from layoutsearch.bench.roofline import check_output, plot_roofline

    plot = check_output(roofline) if roofline is not None else None
    with Console(stderr=True).status("building") as status:
        found = bench_per_op(model, plan_path, needs_profile=plot is not None, tell=status.update, **how)
    if plot is not None:
        plot_roofline(found, plot)
    for note in found.notes:
        click.echo(f"warning: {note}", err=True)
    if as_json:
        click.echo(json.dumps({**per_op_report.as_json(found), "roofline": roofline}))
        return
    console = Console(width=None if sys.stdout.isatty() else per_op_report.WIDTH)
    console.print(per_op_report.per_op_table(found))
    for line in per_op_report.summary(found):
        click.echo(line)
    if plot is not None:
        click.echo(f"roofline in {plot}")
