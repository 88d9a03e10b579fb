"""`layoutsearch bench solver`: how long the exact solver takes, and what it proves, on problems like real networks."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pandas as pd

from layoutsearch.bench.families import FAMILIES
from layoutsearch.bench.graphs import N_CANDIDATES, Net
from layoutsearch.errors import LayoutSearchError
from layoutsearch.search.problem import LayoutProblem
from layoutsearch.search.solve import solve

SIZES = (50, 100, 200, 500, 1000, 2000)
TARGET_S = 10.0
TARGET_MB = 2048.0
# What has to be proven in that time and memory: families with realistic costs, and their number of operators.
_TARGETS = (("chain", 1000), ("densenet", 185), ("unet", 47), ("unet", 1000))
_ADVERSARIAL = (("chain", 1000), ("densenet", 185), ("unet", 47), ("resnet", 72), ("inception", 108))
# How long a child may take beyond the solver's own limit, to start, to build its instance and for elimination.
_CHILD_EXTRA_S = 120.0


@dataclass(frozen=True)
class Instance:
    """A problem by its generator's arguments; `n_ops` is what was asked for, the family rounds it to whole blocks."""

    family: str
    n_ops: int
    costs: str = "realistic"
    mixed: bool = False
    seed: int = 0

    @property
    def name(self) -> str:
        """For tables, e.g. `chain-1000 mixed`."""
        return f"{self.family}-{self.n_ops}" + (" mixed" if self.mixed else "")

    def problem(self) -> LayoutProblem:
        """Make the problem.

        Raises:
            LayoutSearchError: there is no such family.
        """
        if self.family not in FAMILIES:
            raise LayoutSearchError(f"there is no family {self.family!r}; expected one of {', '.join(FAMILIES)}")
        net = Net(self.seed, self.costs, mixed=self.mixed)
        FAMILIES[self.family](net, self.n_ops, self.seed)
        return net.problem()


@dataclass(frozen=True)
class SolverRow:
    """What solving an instance took: seconds without making the instance, and the process's peak memory with it."""

    instance: str
    family: str
    costs: str
    mixed: bool
    seed: int
    ops: int
    candidates: int
    seconds: float
    peak_mb: float
    method: str
    proven: bool
    gap: float
    cost: float
    lower_bound: float


def default_instances(sizes: Sequence[int], seeds: int = 1) -> list[Instance]:
    """Every family at every size with realistic costs, what the targets name, and adversarial costs at one size."""
    wanted: dict[Instance, None] = {}
    for seed in range(seeds):
        points = [*_TARGETS, *((family, n) for family in FAMILIES for n in sizes)]
        wanted.update((Instance(family, n, seed=seed), None) for family, n in points)
        wanted.update((Instance(family, n, mixed=True, seed=seed), None) for family, n in _TARGETS)
        wanted.update(
            (Instance(f, n, costs, seed=seed), None) for costs in ("dense", "shared") for f, n in _ADVERSARIAL
        )
    return list(wanted)


def run_instances(
    instances: Iterable[Instance], *, time_limit_s: float = 10.0, tell: Callable[[str], None] = lambda text: None
) -> list[SolverRow]:
    """Solve each instance in a process of its own, one after the other.

    Raises:
        LayoutSearchError: a process died, or took minutes more than its limit.
    """
    rows = []
    for instance in instances:
        tell(f"{instance.name}, {instance.costs} costs")
        rows.append(_in_child(instance, time_limit_s))
    return rows


def met_targets(rows: Sequence[SolverRow]) -> dict[str, bool]:
    """For each target, whether all of its instances were proven optimal in time and memory; absent if none ran."""
    met: dict[str, bool] = {}
    names = {f"{family}-{n}" for family, n in _TARGETS}
    for row in rows:
        name = row.instance.split()[0]
        if name in names and row.costs == "realistic":
            good = row.proven and row.seconds <= TARGET_S and row.peak_mb <= TARGET_MB
            met[name] = met.get(name, True) and good
    return met


def write_results(rows: Sequence[SolverRow], folder: Path) -> None:
    """`solver.csv` with every row, and `solver.png`: seconds against the number of operators, realistic costs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame([asdict(row) for row in rows])
    table.to_csv(folder / "solver.csv", index=False, float_format="%.6g")
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    drawn = table[(table.costs == "realistic") & ~table.mixed]
    for family, points in drawn.groupby("family", sort=False):
        line = points.groupby("ops").agg(seconds=("seconds", "median"), proven=("proven", "all")).reset_index()
        (artist,) = axes.plot(line.ops, line.seconds, marker="o", markersize=4, label=family)
        missed = line[~line.proven]
        axes.plot(missed.ops, missed.seconds, "x", markersize=9, color=artist.get_color())
    axes.axhline(TARGET_S, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel=f"operators, {N_CANDIDATES} candidates each", ylabel="seconds")
    axes.set_title("to the proven optimum (crosses: limit reached, not proven)", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "solver.png", dpi=140)
    pyplot.close(figure)


def _in_child(instance: Instance, time_limit_s: float) -> SolverRow:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(theirs, instance, time_limit_s), daemon=True)
    child.start()
    theirs.close()
    try:
        if not ours.poll(time_limit_s + _CHILD_EXTRA_S):
            raise LayoutSearchError(f"{instance.name}: no answer within {time_limit_s + _CHILD_EXTRA_S:.0f} s")
        answer = ours.recv()
    except EOFError:
        child.join()
        raise LayoutSearchError(f"{instance.name}: its process died (exit code {child.exitcode})") from None
    finally:
        child.kill()
        child.join()
        ours.close()
    if isinstance(answer, LayoutSearchError):
        raise answer
    return SolverRow(**answer)


def _child(pipe: Connection, instance: Instance, time_limit_s: float) -> None:
    try:
        pipe.send(_solved(instance, time_limit_s))
    except LayoutSearchError as error:
        pipe.send(error)


def _solved(instance: Instance, time_limit_s: float) -> dict[str, Any]:
    problem = instance.problem()
    began = time.perf_counter()
    solution = solve(problem, time_limit_s=time_limit_s)
    seconds = time.perf_counter() - began
    return {
        "instance": instance.name,
        "family": instance.family,
        "costs": instance.costs,
        "mixed": instance.mixed,
        "seed": instance.seed,
        "ops": len(problem.nodes),
        "candidates": sum(len(node.costs) for node in problem.nodes),
        "seconds": seconds,
        "peak_mb": _peak_mb(),
        "method": solution.method,
        "proven": solution.proven,
        "gap": solution.gap,
        "cost": solution.cost,
        "lower_bound": solution.lower_bound,
    }


def _peak_mb() -> float:
    """Largest resident size of this process so far."""
    if os.path.exists("/proc/self/status"):
        # Not getrusage: on Linux it remembers the size of the parent from before exec.
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) / 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024**2 if sys.platform == "darwin" else 1024)
