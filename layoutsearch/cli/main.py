"""The command line. Errors a user can cause are one line on stderr and exit code 2."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import click
from rich.console import Console

from layoutsearch.cli.bench import bench
from layoutsearch.cli.device import device
from layoutsearch.cli.options import desired_layout_option, extern_option, io_layout_option
from layoutsearch.cli.plan import plan_command
from layoutsearch.cli.space import space
from layoutsearch.errors import LayoutSearchError

# The linear algebra of a search is many small systems: threads only get in each other's way, and in the device's.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

INTERRUPTED = 130
PIPED_WIDTH = 100


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="layoutsearch")
def cli() -> None:
    """Autotune the layout of every operator of a model for Apache TVM."""


@cli.command()
@click.argument("model", type=click.Path())
@click.option("--shape", "shapes", multiple=True, metavar="NAME=1,3,320,320", help="Shape of a dynamic input.")
@click.option("--target", metavar="TARGET", help="TVM target, JSON or 'llvm -mcpu=...'; this CPU by default.")
@click.option("--threads", type=click.IntRange(1), help="Threads of a kernel; all cores by default.")
@click.option("--space", type=click.Path(), help="Search-space file; the one shipped for the target by default.")
@desired_layout_option
@click.option("--trials", type=click.IntRange(1), default=8, show_default=True, help="Assignments timed whole at most.")
@click.option(
    "--sampler",
    type=click.Choice(["solver", "tpe", "random", "nsga2"]),
    default="solver",
    show_default=True,
    help="What proposes assignments; all but solver are Optuna's own.",
)
@click.option(
    "--kernel-tuner",
    type=click.Choice(["template", "metaschedule", "both"]),
    default="template",
    show_default=True,
    help="Source of schedules: metaschedule has TVM's search where there is no template, both let them race.",
)
@extern_option
@io_layout_option
@click.option("--storage", metavar="FILE|URL", help="Of the Optuna study; OUT/study.journal by default.")
@click.option("--replay", type=click.Path(dir_okay=False), help="A recorded table in the place of the device.")
@click.option(
    "--time-budget", metavar="90s|8h", help="For the search; the last comparison of whole models is finished."
)
@click.option("--rpc", metavar="HOST:PORT", help="TVM RPC tracker; a server on this machine by default.")
@click.option("--device-key", metavar="KEY", help="Device key at the tracker.")
@click.option("--out", type=click.Path(file_okay=False), help="Folder for plan.json; results/MODEL by default.")
@click.option("--records", type=click.Path(dir_okay=False), help="Record store; OUT/records.sqlite by default.")
@click.option(
    "--max-rel-error",
    type=click.FloatRange(0, min_open=True),
    default=1e-3,
    show_default=True,
    help="Refuse plans that are off by more, over the range of an output.",
)
@click.option("--resume", is_flag=True, help="Continue the run in OUT.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order of runs and of the bootstrap.")
@click.option("--quiet", is_flag=True, help="Print warnings and errors only.")
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object on stdout, and no progress.")
def tune(model: str, shapes: tuple[str, ...], target: str | None, time_budget: str | None, **rest: Any) -> None:
    """Find the best layouts for MODEL and write plan.json.

    MODEL is an ONNX file, or a Relax module saved with tvm.ir.save_json. The best validated plan so far is always on
    disk. Ctrl-C finishes the measurement in flight and exits with code 130; a second one stops at once.
    """
    from layoutsearch.cli.options import parse_target
    from layoutsearch.cli.progress import reporter_for
    from layoutsearch.model.shapes import parse_shapes
    from layoutsearch.search.budget import Budget, parse_duration
    from layoutsearch.search.options import TuneOptions
    from layoutsearch.search.tune import run_tune

    quiet, as_json, replay = rest.pop("quiet"), rest.pop("as_json"), rest.pop("replay")
    seconds = None if time_budget is None else parse_duration(time_budget)
    options = TuneOptions(
        shapes=parse_shapes(shapes) or None, target=parse_target(target), time_budget_s=seconds, **rest
    )
    source = None
    budget = Budget(seconds)
    if replay is not None:
        from layoutsearch.replay.clock import SimulatedBudget
        from layoutsearch.replay.session import ReplaySource
        from layoutsearch.replay.table import Table

        if options.rpc or options.device_key:
            raise LayoutSearchError("--replay takes the place of a device; leave --rpc and --device-key away")
        source = ReplaySource(Table.load(replay), options.target, options.threads)
        budget = SimulatedBudget(seconds)
    console = Console(stderr=True)
    with _interruptible(budget, console), reporter_for(console, budget, quiet or as_json) as reporter:
        result = run_tune(model, options, reporter, budget, source)
    if result.failures:
        counts = ", ".join(f"{status} {count}" for status, count in sorted(result.failures.items()))
        click.echo(f"warning: kernels that failed: {counts}; see the records", err=True)
    if (quiet or as_json) and result.notes:
        click.echo(f"warning: {len(result.notes)} notes while tuning; the last: {result.notes[-1]}", err=True)
    if as_json:
        click.echo(json.dumps(result.to_json()))
    elif not quiet:
        click.echo(result.note)
        if result.plan is not None:
            click.echo(f"plan: {result.path} ({result.seconds:.0f} s)")
    if result.interrupted:
        sys.exit(INTERRUPTED)


@contextlib.contextmanager
def _interruptible(budget: Any, console: Console) -> Iterator[None]:
    """Ctrl-C once: finish the measurement in flight and write. Twice: stop at once."""

    def stop(_signal: int, _frame: Any) -> None:
        if budget.interrupted:
            raise KeyboardInterrupt
        budget.interrupt()
        console.print("stopping after the measurement in flight; again to stop at once", highlight=False)

    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@cli.command(name="compile")
@click.argument("model", type=click.Path())
@click.option("--plan", "plan_path", type=click.Path(), required=True, help="plan.json of this model.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), required=True, help="Shared library to write.")
@click.option("--target", metavar="TARGET", help="Must be the plan's target; by default it is.")
def compile_command(model: str, plan_path: str, output: str, target: str | None) -> None:
    """Compile MODEL with a plan: no search, no measurement.

    The library runs with plain TVM: tvm.runtime.load_module and relax.VirtualMachine. Its main takes the inputs of the
    model in order and returns its outputs in order, in the model's layouts or those of --io-layout.
    """
    from layoutsearch.cli.options import parse_target
    from layoutsearch.plan.apply import target_of
    from layoutsearch.plan.compile import compile
    from layoutsearch.plan.plan import LayoutPlan
    from layoutsearch.targets import as_target
    from layoutsearch.toolchain import require_toolchain

    plan = LayoutPlan.load(plan_path)
    require_toolchain(target_of(plan))
    wanted = parse_target(target)
    compile(model, plan, target=as_target(wanted) if wanted is not None else None, output=output)
    click.echo(f"wrote {output}")


@cli.command()
@click.argument("model", type=click.Path())
@click.option("--plan", "plan_path", type=click.Path(), required=True, help="plan.json of this model.")
@click.option("--rpc", metavar="HOST:PORT", help="TVM RPC tracker; a server on this machine by default.")
@click.option("--device-key", metavar="KEY", help="Device key at the tracker.")
@click.option(
    "--max-rel-error",
    type=click.FloatRange(0, min_open=True),
    default=1e-3,
    show_default=True,
    help="Allowed difference, over the range of an output.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def check(
    model: str, plan_path: str, rpc: str | None, device_key: str | None, max_rel_error: float, as_json: bool
) -> None:
    """Verify that a plan does on MODEL what it says: layouts, transforms, outputs.

    The exit code is 0 if all is as the plan says, 1 if not, 2 if it could not be checked.
    """
    from layoutsearch.measure.device import Device
    from layoutsearch.plan.apply import target_of
    from layoutsearch.plan.plan import LayoutPlan
    from layoutsearch.search.check import check_plan
    from layoutsearch.toolchain import require_toolchain

    plan = LayoutPlan.load(plan_path)
    require_toolchain(target_of(plan))
    if bool(rpc) != bool(device_key):
        raise LayoutSearchError("--rpc HOST:PORT and --device-key KEY go together; give both or neither")
    source = Device.remote(rpc, device_key, plan.threads) if rpc and device_key else Device.local(plan.threads)
    result = check_plan(model, plan, source, max_rel_error=max_rel_error)
    if as_json:
        click.echo(json.dumps(result.to_json()))
    else:
        click.echo(
            f"{result.achieved} of {result.requested} ops in their layouts, {result.transforms} transforms, "
            f"largest error {result.max_rel_error:.2e} of the output's range"
        )
        for line in result.mismatches:
            click.echo(line)
    sys.exit(0 if result.ok else 1)


@cli.command()
@click.argument("plan_path", metavar="PLAN", type=click.Path())
@click.option("--all", "everything", is_flag=True, help="Every kernel, not only those with a choice.")
@click.option(
    "--pin", "pins", multiple=True, metavar="OP=LAYOUT", help="What if OP had this layout; as --desired-layout of tune."
)
@click.option(
    "--costs",
    type=click.Path(dir_okay=False),
    help="Costs of the plan's run; plan.costs.jsonl.gz beside it by default.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def explain(plan_path: str, everything: bool, pins: tuple[str, ...], costs: str | None, as_json: bool) -> None:
    """Show what a plan chose, what it costs, and why; with --pin, what other layouts would cost.

    With --pin the exact problem of the run is solved again, from the costs it left beside the plan: no device is
    needed.
    """
    if pins:
        from layoutsearch.cli.what_if import show_what_if

        show_what_if(plan_path, pins, costs, as_json)
        return
    from layoutsearch.cli.table import explanation_table
    from layoutsearch.plan.explain import explain as explain_plan
    from layoutsearch.plan.plan import LayoutPlan

    explanation = explain_plan(LayoutPlan.load(plan_path))
    if as_json:
        click.echo(json.dumps(explanation.to_json()))
        return
    rows = [row for row in explanation.rows if everything or row.op.choice is not None]
    if rows:
        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
        Console(width=width).print(explanation_table(rows))
    for line in explanation.summary:
        click.echo(line)


cli.add_command(bench)
cli.add_command(device)
cli.add_command(space)
cli.add_command(plan_command)


def main() -> None:
    """Entry point: run, and turn expected errors into one line."""
    try:
        cli(standalone_mode=False)
    except LayoutSearchError as error:
        click.echo(f"layoutsearch: {_one_line(error)}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        click.echo(f"layoutsearch: {error.format_message()}", err=True)
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        # A file or folder of the user's that no step above has words of its own for.
        click.echo(f"layoutsearch: {_one_line(error)}", err=True)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        click.echo("layoutsearch: stopped", err=True)
        sys.exit(INTERRUPTED)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    main()
