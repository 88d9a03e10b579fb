"""How long each kernel takes within its model: with the caches, threads and clock that the others leave it.

The model is built twice, as it ships and with marks between kernels (`layoutsearch.measure.marks`), and both are run in
turns: the one gives the whole time, the other its parts. What a mark costs is known from two in a row with nothing in
between, at the end of every run, and is taken off every part. A mark that follows a large kernel is a little slower
than that, since its code has left the caches; what is left of it shows as the difference of the sum and the whole. On a
disturbed device the sum of medians is below the median of the whole, since not every kernel is hit in the same run.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from layoutsearch.errors import DeviceError
from layoutsearch.measure.marks import START, TAKE
from layoutsearch.measure.models import MODELS_SESSION_S, RemoteModel, calls_in_sample, send
from layoutsearch.measure.peak_meter import PeakMeter
from layoutsearch.measure.probes import PeakProbe
from layoutsearch.measure.results import RunFailed, Status
from layoutsearch.measure.session import Session

if TYPE_CHECKING:
    from layoutsearch.measure.device import Device

_WARM_CALLS = 3
_LEAST_CALLS = 5


@dataclass(frozen=True)
class StepTimes:
    """Times of a model and of its steps, in microseconds.

    Attributes:
        steps_us: by step, one sample a run; the cost of a mark is taken off.
        whole_us: of the model without marks: the median of each block of runs; empty where it was not wanted.
        mark_us: what a mark costs, typically.
        peak_gflops: what multiply-adds in registers reached between the runs, once a round; empty without a probe.
    """

    steps_us: tuple[tuple[float, ...], ...]
    whole_us: tuple[float, ...]
    mark_us: float
    peak_gflops: tuple[float, ...] = ()

    @property
    def sum_us(self) -> float:
        """The medians of all steps, added up."""
        return sum(statistics.median(samples) for samples in self.steps_us)


def time_steps(
    device: Device,
    plain: str | None,
    marked: str,
    inputs: Sequence[np.ndarray],
    *,
    steps: int,
    starts: int = 3,
    rounds: int = 8,
    timeout_s: float = 60.0,
    peak: tuple[str, PeakProbe] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> StepTimes:
    """Run a model whole and in parts, a block of each in every round.

    Args:
        device: where to run; its server must be ours.
        plain: shared library of the model as it ships; None where its whole time is not wanted.
        marked: the same model with the marker `marks.MARK`.
        inputs: arrays in the model's order.
        steps: kernels of the model.
        starts: processes on the device, one after the other.
        rounds: blocks in each; a block is as many runs as fill 20 ms, five at least.
        timeout_s: limit of a block.
        peak: library of a peak probe and the probe, to be timed once a round.
        tell: is told how far it is.

    Raises:
        DeviceError: the server on the device keeps no marks, or the device is gone.
        RunFailed: a library does not load or run, or its marks are not those of `steps` kernels.
    """
    parts: list[np.ndarray] = []
    whole_us: list[float] = []
    empty_us: list[np.ndarray] = []
    peaks: list[float] = []
    for start in range(starts):
        with _Pair(device, plain, marked, inputs, rounds, timeout_s, peak) as pair:
            for number in range(rounds):
                tell(f"start {start + 1} of {starts}, round {number + 1} of {rounds}")
                peaks += pair.peak_gflops()
                whole_us += pair.whole_us()
                found = pair.parts_us(steps)
                parts.append(found[:, :steps])
                empty_us.append(found[:, steps])
    mark_us = float(np.median(np.concatenate(empty_us)))
    samples = np.maximum(np.concatenate(parts) - mark_us, 0.0)
    return StepTimes(tuple(tuple(column.tolist()) for column in samples.T), tuple(whole_us), mark_us, tuple(peaks))


class _Pair:
    """The builds in one process on the device. A context manager."""

    def __init__(
        self,
        device: Device,
        plain: str | None,
        marked: str,
        inputs: Sequence[np.ndarray],
        rounds: int,
        timeout_s: float,
        peak: tuple[str, PeakProbe] | None,
    ) -> None:
        self._device, self._inputs, self._timeout_s = device, inputs, timeout_s
        self._paths = (marked,) if plain is None else (marked, plain)
        self._blocks = 3 * (rounds + 1)
        self._peak = peak

    def __enter__(self) -> _Pair:
        load_s = [Session.transfer_s(os.path.getsize(path)) for path in self._paths]
        self._session = self._device.new_session(sum(load_s) + self._timeout_s * self._blocks, MODELS_SESSION_S)
        with self._session.deadline(self._timeout_s):
            start, take = (self._session.function(name) for name in (START, TAKE))
        if start is None or take is None:
            raise DeviceError(
                f"device {self._device.key!r} keeps no times of kernels within a model: start its server with "
                "python -m layoutsearch.measure.server of this version"
            )
        self._start, self._take = start, take
        arrays = send(self._session, self._inputs)
        self._models = []
        for path, limit_s in zip(self._paths, load_s, strict=True):
            with self._session.deadline(limit_s):
                model = RemoteModel(self._session, path, arrays)
            with self._session.deadline(self._timeout_s):
                typical = statistics.median(model.time(_WARM_CALLS))
            model.calls = max(_LEAST_CALLS, calls_in_sample(typical))
            self._models.append(model)
        self._meter = None
        if self._peak is not None:
            with self._session.deadline(self._timeout_s):
                self._meter = PeakMeter(self._session, *self._peak, self._device.threads)
        return self

    def __exit__(self, *_: object) -> None:
        # What lies on the device must be dropped before its session is closed.
        self._models.clear()
        self._meter = None
        del self._start, self._take, self._session

    def whole_us(self) -> list[float]:
        """Microseconds of a run without marks: the median of a block; nothing where only the marked build is here."""
        found = []
        for model in self._models[1:]:
            with self._session.deadline(self._timeout_s):
                found.append(statistics.median(model.time(model.calls)) * 1e6)
        return found

    def peak_gflops(self) -> list[float]:
        """The peak of this moment; nothing without a probe."""
        if self._meter is None:
            return []
        with self._session.deadline(self._timeout_s):
            return [self._meter.gflops()]

    def parts_us(self, steps: int) -> np.ndarray:
        """Microseconds of every step and of the empty one behind the last, by run: (runs, steps + 1)."""
        model, marks = self._models[0], steps + 2
        with self._session.deadline(self._timeout_s):
            # One run more: the evaluator's own, which warms up and does not count.
            self._start((model.calls + 1) * marks)
            model.time(model.calls)
            found = json.loads(self._take())
        runs = np.array(found["ns"], dtype=np.int64)
        if found["steps"] != list(range(marks)) * (model.calls + 1):
            raise RunFailed(Status.ERROR, f"the marked build does not tell of {steps} kernels in order; build it again")
        times: np.ndarray = np.diff(runs.reshape(-1, marks), axis=1)[1:] / 1e3
        return times
