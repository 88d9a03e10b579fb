"""Whole models in a replay. What was recorded is replayed; everything else here is SIMULATED, not measured.

An assignment that was timed when the table was made takes its recorded time. Any other takes its additive cost under
the table, times the ratio of whole to additive time that is typical of the recorded assignments, times a deviation
drawn from theirs: a property of the assignment, the same in every run. Each sample then deviates from that level as
recorded samples deviate from their median, drawn by assignment, seed and round.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.measure.models import SAMPLE_S
from layoutsearch.measure.records import canonical_json
from layoutsearch.measure.results import cost_us
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.replay.clock import SimulatedBudget
from layoutsearch.replay.lab import WORKERS
from layoutsearch.replay.table import Table, TableError
from layoutsearch.search.reporter import Reporter, Silent
from layoutsearch.search.whole import Built

# Simulated seconds to load and warm up a model on the device.
_LOAD_S = 0.5

Schedules = Mapping[int, str]
"""Node -> schedule (canonical JSON) where it is not the fastest of the table."""


class SimulatedTimes:
    """What whole assignments of a table take: recorded, or simulated where they were not.

    Raises:
        TableError: the table has no whole assignments at all, or not every candidate and transform.
    """

    def __init__(self, table: Table) -> None:
        if not table.wholes:
            raise TableError(f"{table.source} has no whole assignments to go by; {table.record_again}")
        self._table = table

    def level_us(self, solution: Sequence[int], schedules: Schedules | None = None) -> float:
        """The time that the samples of an assignment spread about; infinite where a kernel has none."""
        key = tuple(solution)
        fastest = self._table.additive_us(key)
        total = fastest + sum(self._slower_us(key, node, text) for node, text in (schedules or {}).items())
        whole = self._table.whole_us.get(key)
        if whole is not None:
            return total * whole / fastest
        deviation = self._ratios[self._draw(len(self._ratios), "level", key)] / self.typical_ratio
        return total * self.typical_ratio * deviation

    def residual(self, solution: Sequence[int], seed: int, number: int, schedules: Schedules | None = None) -> float:
        """Sample of one round over the level: the same for the same arguments."""
        about = sorted((schedules or {}).items())
        return self._residuals[self._draw(len(self._residuals), "sample", tuple(solution), about, seed, number)]

    def samples_us(self, solution: Sequence[int], seed: int, rounds: int) -> tuple[float, ...]:
        """The first `rounds` samples of an assignment in its fastest schedules."""
        level = self.level_us(solution)
        return tuple(level * self.residual(solution, seed, number) for number in range(rounds))

    @cached_property
    def typical_ratio(self) -> float:
        """Median of whole to additive time over the recorded assignments."""
        return statistics.median(self._ratios)

    @cached_property
    def build_s(self) -> float:
        """Median seconds of a build."""
        return statistics.median(whole.build_s for whole in self._table.wholes)

    @cached_property
    def _ratios(self) -> list[float]:
        return [us / self._table.additive_us(solution) for solution, us in self._table.whole_us.items()]

    @cached_property
    def _residuals(self) -> list[float]:
        return [us / whole.median_us for whole in self._table.wholes for us in whole.samples_us]

    def _slower_us(self, solution: tuple[int, ...], node: int, schedule: str) -> float:
        kernel = self._table.skeleton.nodes[node]
        known = self._table.of(kernel.workload, kernel.choices[solution[node]])
        if schedule not in known.tries:
            raise TableError(f"{self._table.source} has no schedule {schedule} of {kernel.workload.summary}")
        return cost_us(schedule, known.tries[schedule]) - known.best_us

    def _draw(self, count: int, *about: Any) -> int:
        digest = hashlib.sha256(repr((self._table.id, *about)).encode()).digest()
        return int.from_bytes(digest[:8], "big") % count


class ReplayWhole:
    """The counterpart of `search.whole.WholeLab`: nothing is built, times are those of `SimulatedTimes`."""

    def __init__(
        self,
        table: Table,
        graph: LayoutGraph,
        budget: SimulatedBudget | None = None,
        reporter: Reporter | None = None,
        workers: int = WORKERS,
    ) -> None:
        self._table, self._times, self._workers = table, SimulatedTimes(table), workers
        self._ids = [graph.by_name[node.root].id for node in table.skeleton.nodes]
        self._budget = budget if budget is not None else SimulatedBudget()
        self._reporter: Reporter = reporter or Silent()
        self._built: dict[str, tuple[tuple[int, ...], Schedules]] = {}

    @property
    def weights(self) -> str:
        """Stands for the key of the reference outputs."""
        return f"table {self._table.id}"

    @property
    def once_s(self) -> float:
        """Nothing is validated."""
        return 0.0

    def build(self, plans: Mapping[str, LayoutPlan]) -> dict[str, Built]:
        """Pretend to build plans. Their paths name no files, their errors are zero."""
        built = {}
        for label, plan in plans.items():
            path = f"replay-{self._table.id}-{len(self._built)}.so"
            self._built[path] = self._read(plan)
            self._budget.spend(self._times.build_s / self._workers)
            self._reporter.step(f"built {label}")
            built[label] = Built(path, 0.0)
        return built

    def time(
        self, built: Mapping[str, Built], rounds: int, seed: int, starts: int = 1, finish: bool = False
    ) -> dict[str, tuple[float, ...]]:
        """Samples by label, as many of each as `WholeLab.time` takes."""
        samples: dict[str, list[float]] = {label: [] for label in built}
        levels = {label: self._times.level_us(*self._built[model.path]) for label, model in built.items()}
        each = -(-rounds // starts)
        for start in range(starts):
            self._budget.spend(_LOAD_S * len(built))
            for number in range(start * each, (start + 1) * each):
                for label, model in built.items():
                    solution, schedules = self._built[model.path]
                    us = levels[label] * self._times.residual(solution, seed, number, schedules)
                    samples[label].append(us)
                    calls = math.ceil(SAMPLE_S * 1e6 / us)
                    self._budget.spend((1 + calls) * us / 1e6)
                self._reporter.step("whole models, simulated")
                if not finish and self._budget.over() and number >= 1:
                    break
            if not finish and self._budget.over():
                break
        return {label: tuple(values) for label, values in samples.items() if values}

    def _read(self, plan: LayoutPlan) -> tuple[tuple[int, ...], Schedules]:
        """Solution and unusual schedules of a plan."""
        ops = {op.id: op for op in plan.ops}
        solution, schedules = [], {}
        for index, (node, name) in enumerate(zip(self._table.skeleton.nodes, self._ids, strict=True)):
            op = ops.get(name)
            choice = op.choice if op is not None else None
            if choice not in node.choices:
                raise TableError(f"{self._table.source} has no {node.workload.summary} as {choice}")
            solution.append(node.choices.index(choice))
            best = self._table.of(node.workload, choice).best
            if op is not None and op.schedule is not None and best is not None:
                text = canonical_json(op.schedule.to_json())
                if text != best[0]:
                    schedules[index] = text
        return tuple(solution), schedules
