"""What the device's arithmetic reaches right now: its clock changes with the heat and with what its neighbors do.

A share of the calibrated peak compares two times of day. Multiply-adds in registers, timed between the runs of a model,
are a peak of the same minutes.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import tvm

from layoutsearch.measure.probes import PeakProbe
from layoutsearch.measure.session import Session

_CALL_S, _FIRST_ROUNDS, _CALLS = 2e-4, 10_000, 7


def peak_operands(session: Session, probe: PeakProbe, threads: int) -> list[Any]:
    """Factor, summand and sums of a peak probe, on the device."""
    # A factor below one: the sums settle, and never overflow.
    given = np.repeat(np.array([0.5, 0.25], probe.dtype), probe.lanes)
    made = (threads * probe.lanes * probe.accumulators,)
    return [tvm.runtime.tensor(given, device=session.cpu), tvm.runtime.empty(made, probe.dtype, session.cpu)]


class PeakMeter:
    """A peak probe, loaded into a session. Use it within a deadline of the session.

    Args:
        session: where to run it.
        path: library that `build_peak` wrote.
        probe: what it returned.
        threads: how many run it at once.
    """

    def __init__(self, session: Session, path: str, probe: PeakProbe, threads: int) -> None:
        self._flops = probe.flops * threads
        self._operands = peak_operands(session, probe, threads)
        self._threads = threads
        self._time = session.load(path).time_evaluator(probe.function, session.cpu, number=1, repeat=_CALLS)
        taken = self._seconds(_FIRST_ROUNDS)
        self._rounds = max(1, math.ceil(_FIRST_ROUNDS * _CALL_S / max(taken, 1e-9)))

    def gflops(self) -> float:
        """Operations a nanosecond, all threads together: the median of a few calls of 0.2 ms."""
        return self._flops * self._rounds / self._seconds(self._rounds) / 1e9

    def _seconds(self, rounds: int) -> float:
        return statistics.median(self._time(*self._operands, rounds, self._threads).results)
