"""`layoutsearch bench record`: a full table of measurements, for searches that are compared without a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console


@click.command()
@click.argument("model", metavar="MODEL", type=click.Path())
@click.option("--out", type=click.Path(dir_okay=False), required=True, help="Table to write, NAME.jsonl.gz.")
@click.option("--shape", "shapes", multiple=True, metavar="NAME=1,3,320,320", help="Shape of a dynamic input.")
@click.option("--target", metavar="TARGET", help="TVM target, JSON or 'llvm -mcpu=...'; this CPU by default.")
@click.option("--space", type=click.Path(), help="Search-space file; the one shipped for the target by default.")
@click.option("--threads", type=click.IntRange(1), help="Threads of a kernel; all cores by default.")
@click.option("--tries", type=click.IntRange(1), default=24, show_default=True, help="Schedules of each candidate.")
@click.option("--assignments", type=click.IntRange(1), default=32, show_default=True, help="Timed whole.")
@click.option("--rounds", type=click.IntRange(2), default=24, show_default=True, help="Samples of each.")
@click.option("--starts", type=click.IntRange(1), default=4, show_default=True, help="Processes they are shared by.")
@click.option("--transforms/--no-transforms", default=True, help="Every transform, or those of the assignments only.")
@click.option("--records", type=click.Path(dir_okay=False), help="Record store; results/MODEL/records.sqlite.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the choice of assignments.")
@click.option("--rpc", metavar="HOST:PORT", help="TVM RPC tracker; a server on this machine by default.")
@click.option("--device-key", metavar="KEY", help="Device key at the tracker.")
@click.option("--quiet", is_flag=True, help="Print warnings and errors only.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def record(
    model: str,
    out: str,
    shapes: tuple[str, ...],
    target: str | None,
    records: str | None,
    quiet: bool,
    as_json: bool,
    **rest: Any,
) -> None:
    """Measure every candidate of MODEL and keep the result as a table.

    Takes hours for a large model. What is measured goes to the record store at once: stopped or killed, the same
    command continues.
    """
    from layoutsearch.cli.options import parse_target
    from layoutsearch.cli.progress import reporter_for
    from layoutsearch.model.shapes import parse_shapes
    from layoutsearch.replay.record import RecordOptions, record_table
    from layoutsearch.search.budget import Budget
    from layoutsearch.search.reporter import NoteKeeper

    options = RecordOptions(
        out=Path(out),
        shapes=parse_shapes(shapes) or None,
        target=parse_target(target),
        records=Path(records) if records else None,
        **rest,
    )
    console = Console(stderr=True)
    with reporter_for(console, Budget(), quiet or as_json) as reporter:
        keeper = NoteKeeper(reporter)
        table = record_table(model, options, keeper)
    if (quiet or as_json) and keeper.notes:
        click.echo(f"warning: {len(keeper.notes)} notes while recording; the last: {keeper.notes[-1]}", err=True)
    summary = {
        "table": out,
        "candidates": len(table.candidates),
        "kernels": len(table.kernels),
        "transforms": len(table.transforms),
        "wholes": len(table.wholes),
        "bytes": Path(out).stat().st_size,
    }
    if as_json:
        click.echo(json.dumps(summary))
    elif not quiet:
        click.echo(", ".join(f"{name} {value}" for name, value in summary.items()))
