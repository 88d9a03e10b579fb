"""`layoutsearch bench acceptance`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from layoutsearch.errors import LayoutSearchError


@click.command("acceptance")
@click.option("--pairs", type=click.IntRange(1), default=200, show_default=True, help="A/A pairs in all.")
@click.option("--model", type=click.Path(), help="The model to time; a small one is fastest.")
@click.option("--plan", "plan_path", type=click.Path(), help="plan.json of this model.")
@click.option("--samples", type=click.Path(dir_okay=False), help="Raw samples; OUT/MODEL.jsonl.gz by default.")
@click.option("--threads", type=click.IntRange(1), help="Threads of a kernel; the plan's by default.")
@click.option("--rpc", metavar="HOST:PORT", help="TVM RPC tracker; a server on this machine by default.")
@click.option("--device-key", metavar="KEY", help="Device key at the tracker.")
@click.option("--out", type=click.Path(file_okay=False), default="results/bench/acceptance", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def acceptance(
    pairs: int,
    model: str | None,
    plan_path: str | None,
    samples: str | None,
    threads: int | None,
    rpc: str | None,
    device_key: str | None,
    out: str,
    as_json: bool,
) -> None:
    """How often acceptance is wrong, and how often it finds a true gain.

    With --model and --plan, pairs of copies of the plan are timed as tune times its finalists, and added to the file
    of samples until it holds all; a stopped run continues. With --samples alone the statistics are computed again.
    """
    from layoutsearch.bench.aa_samples import Samples, measure_pairs
    from layoutsearch.bench.acceptance import evaluate, write_results
    from layoutsearch.search.acceptance import FINAL_STARTS, ROUNDS_PER_START

    if bool(model) != bool(plan_path) or not (model or samples):
        raise LayoutSearchError("give --model and --plan to measure, or --samples FILE alone to evaluate")
    if model and plan_path:
        path = Path(samples) if samples else Path(out) / f"{Path(model).stem}.jsonl.gz"
        with Console(stderr=True).status("loading") as status:
            found = measure_pairs(
                model,
                plan_path,
                path,
                pairs,
                threads=threads,
                tracker=rpc,
                device_key=device_key,
                tell=status.update,
            )
    else:
        found = Samples.load(Path(str(samples)))
        if not found.pairs:
            raise LayoutSearchError(f"{samples} holds no pairs yet")
    result = evaluate(found)
    write_results(result, found, Path(out))
    if as_json:
        click.echo(json.dumps(result.as_json(found)))
        return
    table = Table(title=f"{found.origin.model}: {len(found.pairs)} A/A pairs")
    for heading in ("true gain", "starts", "rounds", "accepted", "share", "95 % interval"):
        table.add_column(heading, justify="right")
    for row in result.rows:
        interval = f"{row.low:.1%} to {row.high:.1%}"
        gain = f"{row.gain:.0%}" if row.gain else "none"
        table.add_row(gain, str(row.starts), str(row.rounds), str(row.accepted), f"{row.share:.1%}", interval)
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)
    noise = result.noise
    console.print(
        f"noise of the ratio: {noise.between:.2%} between starts, {noise.within:.2%} within; "
        f"second copy faster by {noise.load_order:.2%} (standard error {noise.load_order_se:.2%})"
    )
    console.print(f"default budget: {FINAL_STARTS} starts of {ROUNDS_PER_START} rounds; table and plot: {out}")
