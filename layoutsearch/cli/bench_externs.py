"""`layoutsearch bench externs`."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
from rich.console import Console
from rich.table import Table


@click.command("externs")
@click.option("--threads", type=click.IntRange(1), help="Threads of every variant; all cores by default.")
@click.option("--starts", type=click.IntRange(1), default=3, show_default=True, help="Process starts of each.")
@click.option("--rounds", type=click.IntRange(2), default=8, show_default=True, help="Blocks in each start.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order of blocks and of the bootstrap.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def externs(as_json: bool, **how: Any) -> None:
    """Time external functions of oneDNN with blocked layouts at their borders, against plain ones.

    conv - max_pool2d - conv - global average pool - dense: `blocked` has NCHW16c from end to end, `plain` NCHW at the
    borders, `around` NCHW16c within the convolutions and transforms around each.
    """
    from layoutsearch.bench.externs import bench_externs

    with Console(stderr=True).status("building") as status:
        found = bench_externs(tell=status.update, **how)
    rows = [
        {
            "variant": row.name,
            "transforms": found.transforms.get(row.name),
            "ms": round(row.ms, 4),
            "spread": round(row.spread, 4),
            "blocked_is_faster_by": round(found.result.speedups[row.name].speedup, 4) if index else None,
            "ci": [round(c, 4) for c in found.result.speedups[row.name].ci] if index else None,
            "max_rel_error": row.max_rel_error,
        }
        for index, row in enumerate(found.result.rows)
    ]
    if as_json:
        click.echo(json.dumps({"variants": rows}))
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
