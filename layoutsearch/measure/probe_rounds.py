"""The probes that have many variants, sampled in rounds on one session until the time is over.

The order of a round is drawn anew and the best sample of a variant counts: what disturbs one only ever makes it slower,
and a limit must not be lower than what a real kernel reaches.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import tvm

from layoutsearch.measure.device import Device
from layoutsearch.measure.levels import CurvePoint, levels_of
from layoutsearch.measure.peak_meter import peak_operands
from layoutsearch.measure.probe_kernels import STREAM_BYTES, STREAM_DTYPE
from layoutsearch.measure.probes import PeakProbe, ProbeSet, StreamProbe
from layoutsearch.measure.profile import MemoryLevel
from layoutsearch.measure.session import Session

SMALLEST_BYTES = 8 << 10
"""Of a working set, for each thread."""

_SESSION_S = 300.0
# Long enough that starting the threads does not count, short enough to find both cores undisturbed on a busy machine.
_SAMPLE_S = 4e-4
_SAMPLES = 7
# Working sets that take longer than this are sampled once at a time.
_SLOW_S = 4e-3
_LEAST_ROUNDS = 2
_MOST_ROUNDS = 40
# A variant may take this many times its part of the time.
_UNFAIR = 4.0
_GROWTH = 2.0
# A sample that is that much slower than the best of its kind met another program.
_MUCH_SLOWER = 1.3
_TICK_S = 1e-7
_FASTEST_GROWTH = 64
_MOST_REPETITIONS = 1 << 30
_MOST_TRIES = 12


@dataclass
class _Variant:
    """A probe with its arguments, and the best it did.

    Attributes:
        probe: what runs.
        unit: work of one repetition: operations, or bytes.
        tasks: of a peak probe; 0 for streams.
        steps: of a stream; 0 for peaks.
        repetitions: rounds of multiply-adds, or passes over the working set.
        spent_s: what its samples took.
        rates: units of work a nanosecond, of each sample that was long enough.
    """

    probe: PeakProbe | StreamProbe
    unit: int
    tasks: int = 0
    steps: int = 0
    repetitions: int = 1
    spent_s: float = 0.0
    rates: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        """The highest rate; 0 before the first."""
        return max(self.rates, default=0.0)

    def add(self, samples: Sequence[float]) -> bool:
        """Take samples, in seconds, and make the next as long as wanted; False if these were too short to count."""
        rates = [self.repetitions * self.unit / (max(s, _TICK_S) * 1e9) for s in samples]
        enough = min(samples) > _SAMPLE_S / 4
        if enough:
            self.rates += rates
        wanted = math.ceil(max(self.best, *rates) * _SAMPLE_S * 1e9 / self.unit)
        self.repetitions = max(1, min(wanted, _FASTEST_GROWTH * self.repetitions, _MOST_REPETITIONS))
        return enough


class ProbeRounds:
    """Peaks for one thread and for all, and streams over growing working sets.

    Args:
        device: where to run.
        library: from `probes.build_probes`.
        probes: what it holds.
        capacity: bytes of each of the two buffers of the streams.
        order: draws the order of each round.
    """

    def __init__(self, device: Device, library: str, probes: ProbeSet, capacity: int, order: random.Random) -> None:
        self._device, self._library, self._probes, self._order = device, library, probes, order
        self._capacity = capacity
        counts = sorted({1, device.threads})
        self._variants = [_Variant(p, p.flops * tasks, tasks=tasks) for p in probes.peaks for tasks in counts]
        for stream in probes.streams:
            self._variants += self._stream(stream)

    def _stream(self, stream: StreamProbe) -> list[_Variant]:
        per_step = stream.bytes(self._probes.step) * self._probes.threads
        in_a_buffer = max(stream.reads, stream.writes) * self._probes.step * self._probes.threads * STREAM_BYTES
        steps: dict[int, None] = {}
        size = float(SMALLEST_BYTES * self._probes.threads)
        while size <= self._capacity:
            steps[max(1, min(round(size / per_step), self._capacity // in_a_buffer))] = None
            size *= _GROWTH
        return [_Variant(stream, n * per_step, steps=n) for n in steps]

    def run(self, budget_s: float) -> None:
        """Sample each variant a few times at least, then until `budget_s` is over.

        Raises:
            RunFailed: a probe failed.
        """
        session = self._device.new_session(_SESSION_S)
        with session.deadline(_SESSION_S):
            self._sample(session, budget_s)

    def _sample(self, session: Session, budget_s: float) -> None:
        end = time.monotonic() + budget_s
        share_s = _UNFAIR * budget_s / len(self._variants)
        module = session.load(self._library)
        elements = self._capacity // STREAM_BYTES
        buffers = [tvm.runtime.empty((elements,), STREAM_DTYPE, session.cpu) for _ in range(2)]
        for buffer in buffers:
            module["fill"](buffer)
        operands = {p.function: peak_operands(session, p, self._probes.threads) for p in self._probes.peaks}
        functions = sorted({v.probe.function for v in self._variants})
        timers = {
            (function, count): module.time_evaluator(function, session.cpu, number=1, repeat=count)
            for function in functions
            for count in (1, _SAMPLES)
        }
        for number in range(_MOST_ROUNDS):
            self._order.shuffle(self._variants)
            for variant in self._variants:
                if number >= _LEAST_ROUNDS and (variant.spent_s > share_s or time.monotonic() > end):
                    continue
                function = variant.probe.function
                began = time.monotonic()
                for _ in range(_MOST_TRIES):
                    slow = variant.best > 0 and variant.unit / (variant.best * 1e9) > _SLOW_S
                    more = [variant.steps] if variant.steps else []
                    args = [*(operands.get(function) or buffers), *more, variant.repetitions]
                    args += [variant.tasks] if variant.tasks else []
                    count = 1 if slow or variant.best == 0 else _SAMPLES
                    if variant.add(timers[function, count](*args).results):
                        break
                variant.spent_s += time.monotonic() - began
            if time.monotonic() > end and number + 1 >= _LEAST_ROUNDS:
                return

    def peaks(self, tasks: int) -> dict[str, float]:
        """Best of all variants by dtype, in operations a nanosecond."""
        found: dict[str, float] = {}
        for v in self._variants:
            if isinstance(v.probe, PeakProbe) and v.tasks == tasks:
                found[v.probe.dtype] = max(found.get(v.probe.dtype, 0.0), v.best)
        return dict(sorted(found.items()))

    def disturbed(self) -> float:
        """Share of the samples of the peaks that were much slower than the best of their variant."""
        peaks = [(rate, v.best) for v in self._variants if isinstance(v.probe, PeakProbe) for rate in v.rates]
        return sum(rate * _MUCH_SLOWER < best for rate, best in peaks) / max(1, len(peaks))

    def levels(self, capacities: Sequence[int] | None, memory_gb_s: float, whole: int) -> tuple[MemoryLevel, ...]:
        """Levels of the best curve over all kinds of streams; see `levels_of`."""
        points = [CurvePoint(v.unit, v.best) for v in self._variants if isinstance(v.probe, StreamProbe)]
        return levels_of(points, capacities, memory_gb_s, whole)
