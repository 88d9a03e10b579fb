"""Measured times of kernels and transforms: what is known, and how more becomes known.

Each kernel is built in a worker (which may crash) and timed over RPC (where it may crash or hang); either way the
outcome is a record. Builds and timings alternate, so that nothing is timed while a compiler runs beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layoutsearch.errors import ToolchainError
from layoutsearch.layout.candidate import Candidate, choice_text
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.transform import TransformKey
from layoutsearch.measure.builder import Builder, BuildResult
from layoutsearch.measure.device import Device
from layoutsearch.measure.kernels import KernelCall, TensorSpec
from layoutsearch.measure.records import RecordContext, RecordStore, WorkloadRecord
from layoutsearch.measure.results import Measurement, Status
from layoutsearch.search.budget import Budget
from layoutsearch.search.jobs import KERNELS, TRANSFORM, BuiltKernels, KernelJob, TransformJob, function_name
from layoutsearch.search.known import WHOLE, Known, Request
from layoutsearch.search.memory import LabMemory
from layoutsearch.search.proposals import PROPOSE, ProposalJob
from layoutsearch.search.reporter import Reporter
from layoutsearch.search.tuners import NO_MORE, KernelTuner, is_proposed
from layoutsearch.search.visits import Timing, time_in_visits
from layoutsearch.search.workloads import Workload

_BATCH = 32
_POLL_S = 0.2
_REPEAT = 7
_BUILD_S = 120.0
_MUCH_BYTES = 2 << 20


@dataclass(frozen=True)
class _Ready:
    """A candidate or transform whose kernels are built, to be timed."""

    workload: str
    candidate: str
    what: str
    built: BuiltKernels
    timing: Timing


class KernelLab:
    """Builds, times, records and remembers kernels. One per run.

    With `began`, a mark of the store, what was recorded later is recalled when it is asked for; see `LabMemory`.
    `tuner` says where schedules come from.
    """

    def __init__(
        self,
        device: Device,
        builder: Builder,
        store: RecordStore,
        context: RecordContext,
        target: dict[str, Any],
        folder: Path,
        budget: Budget,
        reporter: Reporter,
        began: int | None = None,
        tuner: KernelTuner = KernelTuner.TEMPLATE,
    ) -> None:
        self._device, self._builder, self._store, self._context = device, builder, store, context
        self._target, self._folder, self._budget, self._reporter = target, folder, budget, reporter
        self._memory, self._tuner = LabMemory(store, context, began, tuner), tuner
        self._described: set[str] = set()
        self._files = itertools.count()
        self.measured = 0

    @property
    def failures(self) -> Mapping[str, int]:
        """How many failed, by status."""
        return self._memory.failures

    def of(self, workload: Workload, choice: Candidate | None) -> Known:
        """What is known of a candidate."""
        return self._memory.known(workload.key, choice_text(choice))

    def transform(self, key: TransformKey) -> Known:
        """What is known of a transform."""
        return self._memory.known(key.workload, key.candidate)

    def recall(self, requests: Sequence[Request], keys: Iterable[TransformKey] = ()) -> bool:
        """See `Lab`."""
        found = [self._memory.recall(r.workload.key, choice_text(r.choice), r.tries) for r in requests]
        found += [self._memory.recall(key.workload, key.candidate, 1) for key in keys]
        return any(found)

    def measure(self, requests: Sequence[Request], reserve_s: float = 0.0) -> None:
        """Try schedules until each request has its number or the budget is over."""
        self._describe({r.workload.key: r.workload for r in requests})
        self.recall(requests)
        todo = [r for r in requests if self._missing(r) > 0]
        while todo:
            before = [self._progress(r) for r in todo]
            for batch in _batches(todo):
                if not self._measure_batch(batch, reserve_s):
                    return
            # What a kernel's first schedule is decides whether MetaSchedule is asked for the others.
            moved = [r for r, was in zip(todo, before, strict=True) if self._progress(r) != was]
            todo = [r for r in moved if self._missing(r) > 0] if self._tuner is not KernelTuner.TEMPLATE else []

    def _measure_batch(self, batch: Sequence[Request], reserve_s: float) -> bool:
        """Build and time the next schedules of some requests; False if the budget was over first."""
        if self._budget.over(reserve_s):
            return False
        shares = [self._tuner.shares(self.of(r.workload, r.choice), self._missing(r)) for r in batch]
        jobs = [
            (r, self._builder.submit(KERNELS, self._kernel_job(r, count), _BUILD_S))
            for r, (count, _) in zip(batch, shares, strict=True)
            if count
        ]
        asked = [
            (r, self._builder.submit(PROPOSE, self._proposal_job(r, count), _BUILD_S), count)
            for r, (_, count) in zip(batch, shares, strict=True)
            if count
        ]
        if not self._all_built([f for _, f in jobs] + [f for _, f, _ in asked], reserve_s):
            return False
        found = [(r, self._proposed(r, f.result(), count)) for r, f, count in asked]
        built = [
            (r, only, self._builder.submit(KERNELS, self._only_job(r, only), _BUILD_S)) for r, only in found if only
        ]
        if not self._all_built([f for _, _, f in built], reserve_s):
            return False
        ready = [self._finish_kernel(request, future) for request, future in jobs]
        for request, only, future in built:
            ready += self._finish_proposals(request, only, future.result())
        return self._time(ready, reserve_s)

    def refine(self, requests: Sequence[Request], repeat: int, reserve_s: float = 0.0) -> None:
        """Time the `tries` fastest schedules of each request again, `repeat` samples each.

        The fastest of many noisy measurements is the luckiest as well; the later measurement counts.
        """
        for request in requests:
            for schedule in self._unrefined(request):
                self._memory.recall_again(request.workload.key, choice_text(request.choice), schedule)
        todo = [r for r in requests if self._unrefined(r)]
        for batch in _batches(todo):
            if self._budget.over(reserve_s):
                return
            jobs = []
            for request in batch:
                only = self._unrefined(request)
                jobs.append((request, self._builder.submit(KERNELS, self._only_job(request, only), _BUILD_S)))
            if not self._all_built([f for _, f in jobs], reserve_s):
                return
            ready = []
            for request, future in jobs:
                candidate, result = choice_text(request.choice), future.result()
                what = f"{request.workload.summary} {candidate}"
                if result.ok:
                    tries = self.of(request.workload, request.choice).tries
                    earlier = [tries[schedule] for schedule in result.value.schedules]
                    ready.append(self._ready(request.workload.key, candidate, result, what, request, repeat, earlier))
                else:
                    # It was built before; a build that fails now says nothing against the record.
                    self._reporter.note(f"{what}: {result.status.value}: {result.error}")
            if not self._time(ready, reserve_s):
                return

    def _unrefined(self, request: Request) -> tuple[str, ...]:
        """Those of the fastest schedules that have no more samples than a first measurement has."""
        known = self.of(request.workload, request.choice)
        fastest = [schedule for schedule, _ in known.ranked[: request.tries]]
        # One that was disturbed the second time may have kept as few samples as a first measurement has.
        return tuple(s for s in fastest if s not in known.again and len(known.tries[s].samples_us) <= _REPEAT)

    def measure_transforms(self, keys: Iterable[TransformKey], reserve_s: float = 0.0) -> None:
        """Measure transforms that are not known yet."""
        keys = list(dict.fromkeys(keys))
        self.recall((), keys)
        todo = [k for k in keys if not (self.transform(k).tries or self.transform(k).closed)]
        self._time_transforms(todo, reserve_s)

    def measure_transforms_again(self, keys: Iterable[TransformKey], reserve_s: float = 0.0) -> None:
        """Time transforms that ran once more, minutes later: what was disturbed either time does not count.

        A transform has one schedule: nothing beside it shows that other work made it look slow.
        """
        known = {k: self.transform(k) for k in dict.fromkeys(keys)}
        hasty = {k: f.best[0] for k, f in known.items() if f.best is not None and f.best[0] not in f.again}
        todo = [k for k, schedule in hasty.items() if not self._memory.recall_again(k.workload, k.candidate, schedule)]
        self._time_transforms(todo, reserve_s)

    def _time_transforms(self, keys: Sequence[TransformKey], reserve_s: float) -> None:
        for batch in _batches(keys):
            if self._budget.over(reserve_s):
                return
            jobs = [(k, self._builder.submit(TRANSFORM, self._transform_job(k), _BUILD_S)) for k in batch]
            if not self._all_built([f for _, f in jobs], reserve_s):
                return
            ready = []
            for k, future in jobs:
                earlier = [m for m in self.transform(k).tries.values() if m.ok][:1]
                result = future.result()
                what = f"{k.workload} {k.candidate}"
                if result.ok or not earlier:
                    ready.append(self._ready(k.workload, k.candidate, result, what, k, earlier=earlier))
                else:
                    # As in `refine`: it was built before.
                    self._reporter.note(f"{what}: {result.status.value}: {result.error}")
            if not self._time(ready, reserve_s):
                return

    def _describe(self, workloads: Mapping[str, Workload]) -> None:
        """Records hold keys only; what they stand for is written once a run, measured in this run or in an earlier."""
        new = [w for key, w in workloads.items() if key not in self._described]
        self._store.add_workloads(*(WorkloadRecord(w.key, w.summary, w.facts) for w in new))
        self._described.update(w.key for w in new)

    def _missing(self, request: Request) -> int:
        known = self.of(request.workload, request.choice)
        return 0 if known.closed else request.tries - len(known.tries)

    def _progress(self, request: Request) -> tuple[int, bool, bool]:
        known = self.of(request.workload, request.choice)
        return len(known.tries), known.spent, known.closed

    def _proposed(self, request: Request, result: BuildResult, count: int) -> tuple[str, ...]:
        """The schedules that MetaSchedule proposed; that there are no more, or that it failed, is a record."""
        found: tuple[str, ...] = result.value if result.ok else ()
        if len(found) < count:
            status = Status.INFEASIBLE if result.ok else result.status
            workload, candidate = request.workload.key, choice_text(request.choice)
            self._add(workload, candidate, NO_MORE, Measurement(status, (), result.error, result.wall_s))
        if not result.ok:
            what = f"{request.workload.summary} {choice_text(request.choice)}"
            self._reporter.note(f"{what}: MetaSchedule: {result.status.value}: {result.error}")
        return found

    def _finish_proposals(self, request: Request, only: tuple[str, ...], result: BuildResult) -> list[_Ready | None]:
        """What MetaSchedule proposed; where the build of several failed, each by itself."""
        workload, candidate = request.workload.key, choice_text(request.choice)
        what = f"{request.workload.summary} {candidate}"
        for_toolchain = result.error.startswith(ToolchainError.__name__)
        if result.ok or for_toolchain:
            return [self._ready(workload, candidate, result, what, request)]
        if len(only) == 1:
            self._add(workload, candidate, only[0], Measurement(result.status, (), result.error, result.wall_s))
            self._reporter.note(f"{what}: {result.status.value}: {result.error}")
            self._reporter.step(what)
            return []
        found: list[_Ready | None] = []
        for schedule in only:
            alone = self._builder.submit(KERNELS, self._only_job(request, (schedule,)), _BUILD_S).result()
            found += self._finish_proposals(request, (schedule,), alone)
        return found

    def _finish_kernel(self, request: Request, future: Future[BuildResult]) -> _Ready | None:
        workload, candidate = request.workload.key, choice_text(request.choice)
        what = f"{request.workload.summary} {candidate}"
        result = future.result()
        if not result.ok and self._missing(request) > 1 and result.status is not Status.BUILD_ERROR:
            # One schedule of several took the worker down; the first alone may be well.
            result = self._builder.submit(KERNELS, self._kernel_job(request, 1), _BUILD_S).result()
        return self._ready(workload, candidate, result, what, request)

    def _all_built(self, futures: Sequence[Future[BuildResult]], reserve_s: float) -> bool:
        """Wait until nothing of a batch is being built; False (and the rest cancelled) if the budget is over first."""
        while wait(futures, timeout=_POLL_S).not_done:
            if self._budget.over(reserve_s):
                _cancel(futures)
                return False
        return True

    def _ready(
        self,
        workload: str,
        candidate: str,
        result: BuildResult,
        what: str,
        asked: Request | TransformKey,
        repeat: int = _REPEAT,
        earlier: Sequence[Measurement] = (),
    ) -> _Ready | None:
        """What is to be timed of a build; None, and a record of the failure, where it failed.

        Raises:
            ToolchainError: no property of the kernel: recorded, it would outlive the missing linker or the full disk.
        """
        if not result.ok:
            if result.error.startswith(ToolchainError.__name__):
                raise ToolchainError(result.error.partition(": ")[2])
            self._add(workload, candidate, WHOLE, Measurement(result.status, (), result.error, result.wall_s))
            self._reporter.note(f"{what}: {result.status.value}: {result.error}")
            self._reporter.step(what)
            return None
        built: BuiltKernels = result.value
        specs = tuple(TensorSpec(*arg) for arg in built.args)
        cold, size, out = _state(asked)
        shared = out is not None and out.axes[-1].letter == "C"
        calls = tuple(KernelCall(function_name(i), specs, cold, size, shared) for i in range(len(built.schedules)))
        timing = Timing(built.output, calls, min(repeat, _repeat_for(specs, cold, repeat)), earlier=tuple(earlier))
        return _Ready(workload, candidate, what, built, timing)

    def _time(self, ready: Iterable[_Ready | None], reserve_s: float) -> bool:
        """Time and record what was built; False if the budget was over before all of it was."""
        todo = [each for each in ready if each is not None]
        time_in_visits(self._device, [each.timing for each in todo], lambda: self._budget.over(reserve_s))
        done = [each for each in todo if each.timing.visits or not each.timing.calls]
        for each in done:
            self._record(each)
        return len(done) == len(todo)

    def _record(self, ready: _Ready) -> None:
        built = ready.built
        for schedule, reason in built.failed:
            self._add(ready.workload, ready.candidate, schedule, Measurement(Status.INFEASIBLE, (), reason))
        for schedule, measurement in zip(built.schedules, ready.timing.results, strict=True):
            self._add(ready.workload, ready.candidate, schedule, measurement, ready.timing.repeat)
            self.measured += 1
        Path(built.output).unlink(missing_ok=True)
        if built.exhausted and not self._memory.known(ready.workload, ready.candidate).spent:
            self._add(ready.workload, ready.candidate, WHOLE, Measurement(Status.INFEASIBLE, (), ""))
        self._reporter.step(ready.what)

    def _add(
        self, workload: str, candidate: str, schedule: str, measurement: Measurement, repeat: int = _REPEAT
    ) -> None:
        self._memory.add(workload, candidate, schedule, measurement, repeat)

    def _output(self) -> str:
        return str(self._folder / f"kernels_{next(self._files)}.so")

    def _kernel_job(self, request: Request, count: int) -> KernelJob:
        workload = request.workload
        return KernelJob(
            module_json=workload.module_json,
            axes=workload.axes,
            members=workload.members,
            candidate=choice_text(request.choice),
            target=self._target,
            threads=self._context.threads,
            known=tuple(self.of(workload, request.choice).tries),
            count=count,
            output=self._output(),
        )

    def _only_job(self, request: Request, only: tuple[str, ...]) -> KernelJob:
        return replace(self._kernel_job(request, len(only)), only=only)

    def _proposal_job(self, request: Request, count: int) -> ProposalJob:
        tries = self.of(request.workload, request.choice).tries
        measured = tuple((s, m.median_us) for s, m in tries.items() if is_proposed(s) and s != NO_MORE)
        return ProposalJob(self._kernel_job(request, count), measured, count)

    def _transform_job(self, key: TransformKey) -> TransformJob:
        return TransformJob(
            key.shape, key.axes, key.dtype, str(key.source), str(key.target), self._target, self._context.threads,
            self._output(),
        )  # fmt: skip


def _state(asked: Request | TransformKey) -> tuple[tuple[int, ...], int, Layout | None]:
    """Positions of the weights, footprint, and layout of the result."""
    if isinstance(asked, TransformKey):
        return (), 0, asked.target
    choice = asked.choice
    return asked.workload.cold, asked.workload.facts.footprint, choice.out if choice is not None else None


def _repeat_for(specs: Sequence[TensorSpec], cold: Sequence[int], repeat: int) -> int:
    """Fewer samples where making the weights cold before each costs tens of milliseconds."""
    size = sum(specs[i].nbytes for i in cold)
    return max(3, repeat // 2) if size > _MUCH_BYTES else repeat


def _cancel(futures: Iterable[Future[BuildResult]]) -> None:
    """Builds that have not started are not needed any more."""
    for future in futures:
        future.cancel()


def _batches(items: Sequence[Any]) -> Iterable[Sequence[Any]]:
    for start in range(0, len(items), _BATCH):
        yield items[start : start + _BATCH]
