"""`layoutsearch bench suite`."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from layoutsearch.cli.options import metaschedule_options, parse_metaschedule


@click.command("suite")
@click.option("--models", type=click.Path(file_okay=False), default="models", show_default=True, help="ONNX files.")
@click.option(
    "--plans",
    type=click.Path(file_okay=False),
    default="results/suite",
    show_default=True,
    help="NAME/plan.json of each.",
)
@click.option("--against", default="onnxruntime,openvino", show_default=True, help="As of bench model.")
@click.option("--only", default="", help="Names of models, comma-separated; all by default.")
@click.option("--threads", type=click.IntRange(1), help="Threads of every runtime; each plan's by default.")
@click.option("--starts", type=click.IntRange(1), default=4, show_default=True, help="Process starts of each.")
@click.option("--rounds", type=click.IntRange(2), default=6, show_default=True, help="Blocks in each start.")
@metaschedule_options
@click.option(
    "--out",
    type=click.Path(file_okay=False),
    default="results/bench/suite",
    show_default=True,
    help="Folder of suite.csv; its lines of other models stay.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def suite(
    models: str,
    plans: str,
    against: str,
    only: str,
    threads: int | None,
    starts: int,
    rounds: int,
    metaschedule_budget: str | None,
    metaschedule_db: str | None,
    out: str,
    as_json: bool,
) -> None:
    """Time the plans of a fixed set of models against other runtimes and the best uniform layouts."""
    from layoutsearch.bench.suite import TARGETS, bench_suite, chosen, over_best_runtime, summary, write_csv

    wanted = chosen([name.strip() for name in only.split(",") if name.strip()])
    names = [name.strip() for name in against.split(",") if name.strip()]
    peer = parse_metaschedule(metaschedule_budget, metaschedule_db)
    with Console(stderr=True).status("building") as status:
        rows = bench_suite(
            wanted, Path(models), Path(plans), names, threads=threads, starts=starts, rounds=rounds,
            metaschedule=peer, tell=status.update,
        )  # fmt: skip
    write_csv(rows, Path(out) / "suite.csv")
    if as_json:
        click.echo(json.dumps({"targets": TARGETS, "summary": summary(rows), "models": rows}))
        return
    table = Table()
    for heading in ("model", "plan ms", *(f"{n} ms" for n in names), "uniform ms", "over the best runtime", "error"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for row in rows:
        best = over_best_runtime(row)
        table.add_row(
            row["model"],
            *(f"{row[f'{n}_ms']:.3f}" if f"{n}_ms" in row else "" for n in ("plan", *names, "uniform")),
            f"{best:.3f}x" if best is not None else "",
            f"{row['plan_max_rel_error']:.1e}",
        )
    console = Console(width=120)
    console.print(table)
    console.print(", ".join(f"{name} {value:.3f}x" for name, value in summary(rows).items()), highlight=False)
