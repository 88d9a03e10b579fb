"""A lab that answers from a table, in simulated time: what a search would have measured, it gets to see."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from layoutsearch.layout.candidate import Candidate, choice_text
from layoutsearch.layout.transform import TransformKey
from layoutsearch.measure.device import DeviceIdentity
from layoutsearch.measure.records import RecordContext, RecordStore
from layoutsearch.measure.results import Measurement, Status
from layoutsearch.replay.clock import SimulatedBudget
from layoutsearch.replay.table import Table
from layoutsearch.replay.values import RecordedTry
from layoutsearch.search.known import WHOLE, Known, Request
from layoutsearch.search.memory import LabMemory
from layoutsearch.search.reporter import Reporter, Silent
from layoutsearch.search.workloads import Workload

WORKERS = 2


def replay_identity(table: Table) -> DeviceIdentity:
    """The recorded device under a key of its own, so that no plan of a replay passes for one that was measured."""
    device = table.header.device
    return DeviceIdentity(
        key=f"replay:{device['key']}",
        cpu=device["cpu"],
        features=tuple(device["features"]),
        cores=device["cores"],
        threads=table.header.threads,
    )


def replay_context(table: Table) -> RecordContext:
    """Context of the records that a replay writes: never mixed up with measurements made now, or of another table."""
    header = table.header
    return RecordContext(
        target=json.dumps(dict(header.target), sort_keys=True),
        device=replay_identity(table).key,
        cpu=header.device["cpu"],
        threads=header.threads,
        tvm=header.tvm,
        template=f"{header.templates} table {table.id}",
    )


class ReplayLab:
    """Implements `search.known.Lab`. Reveals the tries of each candidate in the order in which they were recorded.

    What is known at first is what the store holds of this table. With `began`, a mark of the store, what was revealed
    later is recalled when it is asked for, so that a search that was killed goes on as a live one does; see
    `search.memory`. Each try costs the seconds that its build (shared by `workers`) and its measurement took.

    Raises:
        TableError: something is asked that was not recorded.
    """

    def __init__(
        self,
        table: Table,
        store: RecordStore | None = None,
        budget: SimulatedBudget | None = None,
        reporter: Reporter | None = None,
        workers: int = WORKERS,
        began: int | None = None,
    ) -> None:
        self._table = table
        self._budget = budget if budget is not None else SimulatedBudget()
        self._reporter: Reporter = reporter or Silent()
        self._workers = workers
        self._memory = LabMemory(store, replay_context(table), began)
        self._touched: set[tuple[str, str]] = set()
        self.measured = 0

    @property
    def failures(self) -> Mapping[str, int]:
        """How many failed, by status."""
        return self._memory.failures

    @property
    def candidates_measured(self) -> int:
        """Different kernel candidates of which this lab has revealed a try; transforms are not counted."""
        return sum(not workload.startswith("transform ") for workload, _ in self._touched)

    @property
    def budget(self) -> SimulatedBudget:
        """The simulated time."""
        return self._budget

    def of(self, workload: Workload, choice: Candidate | None) -> Known:
        """What is known of a candidate."""
        return self._of(workload.key, choice_text(choice), workload.summary)

    def transform(self, key: TransformKey) -> Known:
        """What is known of a transform."""
        return self._of(key.workload, key.candidate)

    def recall(self, requests: Sequence[Request], keys: Iterable[TransformKey] = ()) -> bool:
        """See `Lab`."""
        found = [self._recall(r.workload.key, choice_text(r.choice), r.tries) for r in requests]
        found += [self._recall(key.workload, key.candidate, 1) for key in keys]
        return any(found)

    def _recall(self, workload: str, candidate: str, tries: int) -> bool:
        if not self._memory.recall(workload, candidate, tries):
            return False
        known, attempts = self._of(workload, candidate), self._table.attempts(workload, candidate)
        # Killed between the last try and the word that there is no other.
        if not known.closed and all(a.schedule in known.tries for a in attempts if a.schedule != WHOLE):
            self._close(workload, candidate, attempts)
        return True

    def measure(self, requests: Sequence[Request], reserve_s: float = 0.0) -> None:
        """Reveal tries until each request has its number or the budget is over."""
        self.recall(requests)
        for request in requests:
            known = self.of(request.workload, request.choice)
            missing = 0 if known.closed else request.tries - len(known.tries)
            if missing <= 0:
                continue
            if self._budget.over(reserve_s):
                return
            self._reveal(request.workload.key, choice_text(request.choice), missing)
            self._reporter.step(f"{request.workload.summary} {choice_text(request.choice)}")

    def refine(self, requests: Sequence[Request], repeat: int, reserve_s: float = 0.0) -> None:
        """Reveal the refinements that were recorded of the `tries` fastest schedules of each request.

        Only the schedules that were fastest when the table was recorded have one; the others stay as they are.
        `repeat` is what it was then.
        """
        for request in requests:
            workload, candidate = request.workload.key, choice_text(request.choice)
            known = self.of(request.workload, request.choice)
            attempts = {a.schedule: a for a in self._table.attempts(workload, candidate, request.workload.summary)}
            for schedule, _ in known.ranked[: request.tries]:
                refined = attempts[schedule].refined
                if refined is None or known.tries[schedule] == refined:
                    continue
                if self._memory.recall_again(workload, candidate, schedule):
                    continue
                if self._budget.over(reserve_s):
                    return
                self._spend(attempts[schedule].build_s, refined.wall_s)
                self._add(workload, candidate, schedule, refined)
                self.measured += 1
            self._reporter.step(f"{request.workload.summary} {candidate}")

    def measure_transforms(self, keys: Iterable[TransformKey], reserve_s: float = 0.0) -> None:
        """Reveal transforms that are not known yet."""
        keys = list(dict.fromkeys(keys))
        self.recall((), keys)
        for key in keys:
            known = self.transform(key)
            if known.tries or known.closed:
                continue
            if self._budget.over(reserve_s):
                return
            self._reveal(key.workload, key.candidate, 1)
            self._reporter.step(f"{key.workload} {key.candidate}")

    def measure_transforms_again(self, keys: Iterable[TransformKey], reserve_s: float = 0.0) -> None:
        """Reveals nothing: a table holds what came of all times together."""

    def _of(self, workload: str, candidate: str, summary: str = "") -> Known:
        self._table.attempts(workload, candidate, summary)
        return self._memory.known(workload, candidate)

    def _reveal(self, workload: str, candidate: str, count: int) -> None:
        known, attempts = self._of(workload, candidate), self._table.attempts(workload, candidate)
        fresh = [a for a in attempts if a.schedule != WHOLE and a.schedule not in known.tries]
        for attempt in fresh[:count]:
            self._spend(attempt.build_s, attempt.measurement.wall_s)
            self._add(workload, candidate, attempt.schedule, attempt.measurement)
            self.measured += attempt.timed
        self._touched.add((workload, candidate))
        if len(fresh) <= count:
            self._close(workload, candidate, attempts)

    def _close(self, workload: str, candidate: str, attempts: Sequence[RecordedTry]) -> None:
        """No further schedule was recorded: the templates had none, or the recorder stopped there."""
        last = next((a for a in attempts if a.schedule == WHOLE), None)
        if last is not None:
            # Seconds of a build count where the candidate did not build; else its schedules have them already.
            self._spend(last.build_s if len(attempts) == 1 else 0.0, last.measurement.wall_s)
        measurement = last.measurement if last is not None else Measurement(Status.INFEASIBLE)
        self._add(workload, candidate, WHOLE, measurement)

    def _spend(self, build_s: float, measure_s: float) -> None:
        self._budget.spend(build_s / self._workers + measure_s)

    def _add(self, workload: str, candidate: str, schedule: str, measurement: Measurement) -> None:
        self._memory.add(workload, candidate, schedule, measurement, max(1, len(measurement.samples_us)))
