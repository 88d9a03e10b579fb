"""`layoutsearch bench`: comparisons, measured here and now."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from layoutsearch.cli.bench_acceptance import acceptance
from layoutsearch.cli.bench_cost_model import cost_model
from layoutsearch.cli.bench_externs import externs
from layoutsearch.cli.bench_per_op import per_op as time_kernels
from layoutsearch.cli.bench_record import record
from layoutsearch.cli.bench_search import search
from layoutsearch.cli.bench_solver import solver
from layoutsearch.cli.bench_suite import suite
from layoutsearch.cli.options import metaschedule_options, parse_metaschedule
from layoutsearch.errors import LayoutSearchError


@click.group()
def bench() -> None:
    """Comparisons, measured here and now."""


@bench.command()
@click.argument("model", metavar="MODEL", type=click.Path())
@click.option("--plan", "plan_path", type=click.Path(), required=True, help="plan.json of this model.")
@click.option(
    "--against",
    default="onnxruntime,tvm",
    show_default=True,
    help="Comma-separated: onnxruntime, openvino, tvm, metaschedule, other plans.",
)
@click.option("--threads", type=click.IntRange(1), help="Threads of every runtime; the plan's by default.")
@click.option("--starts", type=click.IntRange(1), default=3, show_default=True, help="Process starts of each.")
@click.option("--rounds", type=click.IntRange(2), default=8, show_default=True, help="Blocks in each start.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order of blocks and of the bootstrap.")
@click.option("--per-op", is_flag=True, help="Time each kernel within the model instead, as shares of the peak.")
@click.option("--roofline", metavar="FILE", help="With --per-op, and draw a roofline; .png or .svg.")
@metaschedule_options
@click.option("--save", type=click.Path(dir_okay=False), help="Add the result to this JSON-lines file.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_context
def model(
    context: click.Context,
    model: str,
    plan_path: str,
    against: str,
    metaschedule_budget: str | None,
    metaschedule_db: str | None,
    per_op: bool,
    roofline: str | None,
    save: str | None,
    as_json: bool,
    **rest: Any,
) -> None:
    """Time a plan against other runtimes, or each of its kernels.

    Each runtime runs in a process of its own; blocks of runs alternate, and outputs are compared. With --per-op
    kernels are timed within the model, and compared with the device as `layoutsearch device calibrate` found it.
    """
    if per_op or roofline is not None:
        _refuse_given(context, "against", "seed", "save", "metaschedule_budget", "metaschedule_db")
        how = {name: rest[name] for name in ("threads", "starts", "rounds")}
        time_kernels(model, plan_path, roofline, as_json, **how)
        return
    from layoutsearch.bench.model import append_table, bench_model

    names = [name.strip() for name in against.split(",") if name.strip()]
    peer = parse_metaschedule(metaschedule_budget, metaschedule_db)
    with Console(stderr=True).status("building") as status:
        result, data = bench_model(model, plan_path, names, metaschedule=peer, tell=status.update, **rest)
    if save:
        command = f"layoutsearch bench model {os.path.basename(model)} --plan plan.json --against {against}"
        command += f" --starts {rest['starts']} --rounds {rest['rounds']} --seed {rest['seed']}"
        if metaschedule_budget:
            command += f" --metaschedule-budget {metaschedule_budget}"
        append_table(Path(save), data, command)
    if as_json:
        click.echo(json.dumps(data))
        return
    table = Table()
    for heading in ("runtime", "ms", "spread", "plan is faster by", "95 % interval", "error"):
        table.add_column(heading, justify="left" if heading == "runtime" else "right")
    for row in result.rows:
        comparison = result.speedups.get(row.name)
        ratio = f"{comparison.speedup:.3f}x" if comparison else ""
        interval = f"{comparison.ci[0]:.3f} to {comparison.ci[1]:.3f}" if comparison else ""
        table.add_row(row.name, f"{row.ms:.3f}", f"{row.spread:.1%}", ratio, interval, f"{row.max_rel_error:.1e}")
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def _refuse_given(context: click.Context, *names: str) -> None:
    """Options that mean nothing where only the plan is timed."""
    for name in names:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            option = "--" + name.replace("_", "-")
            raise LayoutSearchError(f"{option} belongs to a comparison; --per-op times the plan alone: leave one out")


bench.add_command(acceptance)
bench.add_command(cost_model)
bench.add_command(externs)
bench.add_command(record)
bench.add_command(search)
bench.add_command(solver)
bench.add_command(suite)
