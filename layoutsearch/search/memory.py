"""What a lab knows: from the records at first, then from what it measures.

A run that was killed and is resumed goes through its decisions again from the start, so that it comes to the same end.
For that it must not know at once what it measured before it was killed: records made after the run began are *recalled*
when they are asked for, in the order in which they were made, in place of measuring again.
"""

from __future__ import annotations

from collections import deque

from layoutsearch.measure.records import KernelRecord, RecordContext, RecordStore
from layoutsearch.measure.results import Measurement, Status
from layoutsearch.search.known import WHOLE, Known
from layoutsearch.search.tuners import KernelTuner
from layoutsearch.search.visits import later


class LabMemory:
    """Known kernels and transforms of one context.

    Args:
        store: keeps the records; nothing is kept without one.
        context: of the records.
        began: mark of the store when the run began; what came later is recalled. None where all is known at once.
        tuner: whether a candidate whose template has no further schedule is closed.
    """

    def __init__(
        self,
        store: RecordStore | None,
        context: RecordContext,
        began: int | None = None,
        tuner: KernelTuner = KernelTuner.TEMPLATE,
    ) -> None:
        self._store, self._context, self._began, self._tuner = store, context, began, tuner
        self._known: dict[tuple[str, str], Known] = {}
        self._waiting: dict[tuple[str, str], deque[KernelRecord]] = {}
        self._loaded: set[str] = set()
        self.failures: dict[str, int] = {}

    def known(self, workload: str, candidate: str) -> Known:
        """What is known of a candidate."""
        self._load(workload)
        return self._known.setdefault((workload, candidate), Known())

    def recall(self, workload: str, candidate: str, tries: int) -> bool:
        """Know again the next schedules of a candidate, until `tries` are known; whether there was one."""
        known, waiting = self.known(workload, candidate), self._waiting.get((workload, candidate))
        found = False
        while waiting and not known.closed and waiting[0].schedule not in known.tries:
            last_word = waiting[0].schedule == WHOLE
            if len(known.tries) >= tries and not last_word:
                break
            self._take(waiting.popleft())
            found = True
        return found

    def recall_again(self, workload: str, candidate: str, schedule: str) -> bool:
        """Know again that a known schedule was measured once more; whether it was."""
        self._load(workload)
        waiting = self._waiting.get((workload, candidate))
        if not waiting or waiting[0].schedule != schedule or schedule not in self._known[workload, candidate].tries:
            return False
        self._take(waiting.popleft())
        return True

    def add(self, workload: str, candidate: str, schedule: str, measurement: Measurement, repeat: int) -> None:
        """Remember a measurement, and keep it."""
        record = KernelRecord(self._context, workload, candidate, schedule, measurement, repeat=repeat)
        if self._store is not None:
            self._store.add(record)
        self._take(record)
        if not measurement.ok and measurement.error:
            self.failures[measurement.status.value] = self.failures.get(measurement.status.value, 0) + 1

    def _load(self, workload: str) -> None:
        if workload in self._loaded or self._store is None:
            return
        self._loaded.add(workload)
        for record in self._store.records(self._context, workload=workload, flush=True, upto=self._began):
            # That a build took too long was so in another run, on a machine that may have been busy.
            if record.schedule != WHOLE or record.measurement.status is not Status.BUILD_TIMEOUT:
                self._take(record)
        if self._began is not None:
            for record in self._store.records(self._context, workload=workload, flush=True, after=self._began):
                self._waiting.setdefault((workload, record.candidate), deque()).append(record)

    def _take(self, record: KernelRecord) -> None:
        known = self._known.setdefault((record.workload, record.candidate), Known())
        if record.schedule == WHOLE:
            known.spent, known.reason = True, record.measurement.error
        else:
            measurement = record.measurement
            if record.schedule in known.tries:
                known.again.add(record.schedule)
                measurement = later(known.tries[record.schedule], [measurement])
            known.tries[record.schedule] = measurement
        known.closed = known.spent and (bool(known.reason) or not self._tuner.goes_on(known))
