"""Measured times of pairs of kernels: the one kernel in some schedules, next to the two that it replaces.

What is compared is timed by turns in the same minutes, and the fastest once more, or the luckiest would win. All
records of a pair are written at once, so that a run that was killed finds a pair whole or not at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layoutsearch.errors import ToolchainError
from layoutsearch.measure.builder import Builder, BuildResult
from layoutsearch.measure.kernels import KernelCall, TensorSpec
from layoutsearch.measure.records import KernelRecord, RecordContext, RecordStore, canonical_json
from layoutsearch.measure.results import Measurement, Status
from layoutsearch.schedule import pair
from layoutsearch.schedule.value import TEMPLATES
from layoutsearch.search.budget import Budget
from layoutsearch.search.jobs import ArgSpec, KernelJob, function_name
from layoutsearch.search.known import WHOLE
from layoutsearch.search.pair_jobs import APART, PAIR, BuiltPair, PairJob
from layoutsearch.search.pairs import Half, PairTimes, PairWork
from layoutsearch.search.reporter import Reporter
from layoutsearch.search.visits import KernelTimer, Timing, time_in_visits

_COUNT = 8
_BATCH = 16
_REPEAT = 7
# The fastest schedules and the two kernels apart, timed again.
_AGAIN, _REPEAT_AGAIN = 2, 15
_BUILD_S = 120.0
_POLL_S = 0.2


@dataclass
class _Ready:
    """A pair that is built, to be timed."""

    work: PairWork
    built: BuiltPair
    all: Timing
    again: Timing | None = None
    fastest: tuple[str, ...] = ()


class PairLab:
    """Builds, times and records pairs. Implements `pairs.PairTimer` on a device. One per run.

    `context` is that of the run's kernels; pairs have one of their own, so that nothing that is learned from kernels or
    recorded of them knows of pairs.
    """

    def __init__(
        self,
        device: KernelTimer,
        builder: Builder,
        store: RecordStore,
        context: RecordContext,
        target: dict[str, Any],
        folder: Path,
        budget: Budget,
        reporter: Reporter,
    ) -> None:
        specs = [(name, TEMPLATES[name]) for name in pair.TEMPLATES]
        versions = " ".join(f"{name}{spec.version}.{spec.revision}" for name, spec in specs)
        self._context = replace(context, template=f"{context.template} {versions}")
        self._device, self._builder, self._store = device, builder, store
        self._target, self._folder, self._budget, self._reporter = target, folder, budget, reporter
        self._files = itertools.count()

    def measure(self, works: Sequence[PairWork], reserve_s: float) -> dict[str, PairTimes]:
        """See PairTimer. What the records know is not measured again."""
        works = list({work.key: work for work in works}.values())
        found = {work.key: known for work in works if (known := self._known(work)) is not None}
        todo = [work for work in works if work.key not in found]
        self._reporter.stage("pairs of kernels", len(todo))
        for start in range(0, len(todo), _BATCH):
            batch = todo[start : start + _BATCH]
            if self._budget.over(reserve_s) or not self._measure_batch(batch, reserve_s):
                break
        found.update({work.key: known for work in todo if (known := self._known(work)) is not None})
        return found

    def _known(self, work: PairWork) -> PairTimes | None:
        """What the records say; None where they do not know the pair."""
        latest: dict[str, KernelRecord] = {}
        for record in self._store.records(self._context, workload=work.key, candidate=work.candidate):
            latest[record.schedule] = record
        if WHOLE in latest:
            return PairTimes()
        apart = [latest.pop(_apart_key(name), None) for name in APART]
        if apart[0] is None or apart[1] is None:
            return None
        joined = {text: record.measurement for text, record in latest.items() if record.repeat == _REPEAT_AGAIN}
        return PairTimes((apart[0].measurement, apart[1].measurement), joined)

    def _measure_batch(self, batch: Sequence[PairWork], reserve_s: float) -> bool:
        """Build and time some pairs; False if the budget was over first."""
        jobs = [(work, self._builder.submit(PAIR, self._job(work), _BUILD_S)) for work in batch]
        futures = [future for _, future in jobs]
        while wait(futures, timeout=_POLL_S).not_done:
            if self._budget.over(reserve_s):
                for future in futures:
                    future.cancel()
                return False
        ready = [each for work, future in jobs if (each := self._ready(work, future)) is not None]

        def over() -> bool:
            return self._budget.over(reserve_s)

        time_in_visits(self._device, [each.all for each in ready], over)
        for each in ready:
            _choose(each)
        again = [each.again for each in ready if each.again is not None]
        time_in_visits(self._device, again, over)
        for each in ready:
            self._record(each)
            Path(each.built.output).unlink(missing_ok=True)
        return not over()

    def _job(self, work: PairWork) -> PairJob:
        first, second = (self._kernel_job(half) for half in (work.first, work.second))
        schedules = [_text(half) for half in (work.first, work.second)]
        return PairJob(
            first, second, (schedules[0], schedules[1]), _COUNT, f"{self._folder}/pair_{next(self._files)}.so"
        )

    def _kernel_job(self, half: Half) -> KernelJob:
        workload = half.workload
        return KernelJob(
            workload.module_json, workload.axes, workload.members, str(half.choice), self._target,
            self._context.threads, (), 0, "",
        )  # fmt: skip

    def _ready(self, work: PairWork, future: Future[BuildResult]) -> _Ready | None:
        """What is to be timed; None, and a record, where there is nothing.

        Raises:
            ToolchainError: no property of the pair.
        """
        result = future.result()
        self._reporter.step(work.summary)
        if not result.ok:
            if result.error.startswith(ToolchainError.__name__):
                raise ToolchainError(result.error.partition(": ")[2])
            self._reporter.note(f"{work.summary}: {result.status.value}: {result.error}")
            self._close(work, Measurement(result.status, (), result.error, result.wall_s))
            return None
        built: BuiltPair = result.value
        if built.why_none:
            self._close(work, Measurement(Status.INFEASIBLE, (), built.why_none, result.wall_s))
            return None
        return _Ready(work, built, Timing(built.output, _calls(work, built), _REPEAT))

    def _close(self, work: PairWork, failure: Measurement) -> None:
        self._store.add(KernelRecord(self._context, work.key, work.candidate, WHOLE, failure))

    def _record(self, ready: _Ready) -> None:
        """All that is known of a pair, if it was timed to the end."""
        first, again = ready.all.results, ready.again.results if ready.again is not None else []
        if not first or (ready.again is not None and not again):
            return
        latest = dict(zip((*ready.built.schedules, *map(_apart_key, APART)), first, strict=True))
        repeats = dict.fromkeys(latest, _REPEAT)
        for name, measurement in zip(ready.fastest, again, strict=False):
            latest[name], repeats[name] = measurement, _REPEAT_AGAIN
        work = ready.work
        self._store.add(
            *(
                KernelRecord(self._context, work.key, work.candidate, name, measurement, repeat=repeats[name])
                for name, measurement in latest.items()
            )
        )


def _choose(ready: _Ready) -> None:
    """What of a pair is timed again: the fastest schedules, and the two kernels apart in the same minutes."""
    results = ready.all.results
    if not results:
        return
    count = len(ready.built.schedules)
    ran = sorted((i for i in range(count) if results[i].ok), key=lambda i: results[i].expected_us)[:_AGAIN]
    if not ran or not all(result.ok for result in results[count:]):
        return
    chosen = [*ran, *range(count, count + len(APART))]
    names = (*ready.built.schedules, *map(_apart_key, APART))
    ready.fastest = tuple(names[i] for i in chosen)
    ready.again = Timing(ready.built.output, tuple(ready.all.calls[i] for i in chosen), _REPEAT_AGAIN)


def _apart_key(name: str) -> str:
    return canonical_json({"apart": name})


def _text(half: Half) -> str:
    return canonical_json(half.schedule.to_json()) if half.schedule is not None else ""


def _calls(work: PairWork, built: BuiltPair) -> tuple[KernelCall, ...]:
    """The one kernel in each schedule, then the two."""
    first, second = work.first, work.second
    before, reads = len(built.apart[0]) - 1, built.reads
    cold = (*first.workload.cold, *(before + i - (i > reads) for i in second.workload.cold))
    size = first.workload.facts.footprint

    def call(name: str, args: Sequence[ArgSpec], cold: tuple[int, ...], last: Half) -> KernelCall:
        specs = tuple(TensorSpec(*arg) for arg in args)
        return KernelCall(name, specs, cold, size, last.choice.out.axes[-1].letter == "C")

    return (
        *(call(function_name(i), built.args, cold, second) for i in range(len(built.schedules))),
        call(APART[0], built.apart[0], first.workload.cold, first),
        call(APART[1], built.apart[1], second.workload.cold, second),
    )
