"""What came of a measurement: samples, or a failure with a type."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from layoutsearch.errors import DeviceError, LayoutSearchError


class Status(str, Enum):
    """How a measurement or a build ended."""

    OK = "ok"
    TIMEOUT = "timeout"
    CRASH = "crash"
    ERROR = "error"
    NO_DEVICE = "no_device"
    NO_TRACKER = "no_tracker"
    BUILD_ERROR = "build_error"
    BUILD_CRASH = "build_crash"
    BUILD_TIMEOUT = "build_timeout"
    INFEASIBLE = "infeasible"

    @property
    def is_infrastructure(self) -> bool:
        """True where the failure says nothing about what was to be measured, so that it may not be recorded as such."""
        return self in (Status.NO_DEVICE, Status.NO_TRACKER)


class RunFailed(LayoutSearchError):
    """A run on a device, or a build, that failed in a known way.

    Attributes:
        status: The kind of failure, never `Status.OK`.
        message: One line.
    """

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(f"{status.value}: {message}")
        self.status = status
        self.message = message


class DeviceFailed(RunFailed, DeviceError):
    """No tracker, or no device to run on: a failure of the infrastructure."""

    def __str__(self) -> str:
        return self.message


WARMUP = 2
"""Runs of a kernel before its samples, each in the state of its model like those: the first fetches code and page
tables, and takes 5 to 25 % longer than any later one."""

_BURST = 1.5


@dataclass(frozen=True)
class Measurement:
    """Samples of one kernel or model, or why there are none.

    Attributes:
        status: `Status.OK` with at least one sample, anything else with `error`.
        samples_us: Microseconds, in the order in which they were taken.
        error: One line; empty when the status is ok.
        wall_s: Seconds that the measurement took, set-up included.
    """

    status: Status
    samples_us: tuple[float, ...] = ()
    error: str = ""
    wall_s: float = 0.0

    def __post_init__(self) -> None:
        if self.ok and not self.samples_us:
            raise ValueError("a measurement that is ok has at least one sample")

    @classmethod
    def failed(cls, failure: RunFailed, wall_s: float = 0.0) -> Measurement:
        """The measurement that `failure` leaves behind."""
        return cls(failure.status, (), failure.message, wall_s)

    @property
    def ok(self) -> bool:
        """True if there are samples."""
        return self.status is Status.OK

    @property
    def is_infrastructure(self) -> bool:
        """See `Status.is_infrastructure`."""
        return self.status.is_infrastructure

    @property
    def median_us(self) -> float:
        """Median sample in microseconds; infinite for a failure, so that it never wins a comparison."""
        return statistics.median(self.samples_us) if self.samples_us else float("inf")

    @cached_property
    def expected_us(self) -> float:
        """What a kernel takes on average: the mean of the samples, each counted as at most 1.5 times the median.

        The time of a model is the sum of its kernels' expected times. Samples are skewed, so medians add up to a few
        per cent less; a burst of other work is many times the median and says nothing of the kernel. Infinite for a
        failure.
        """
        if not self.ok:
            return float("inf")
        most = _BURST * self.median_us
        return statistics.fmean(min(sample, most) for sample in self.samples_us)

    @property
    def spread(self) -> float:
        """Interquartile range over the median; 0 with fewer than two samples."""
        if len(self.samples_us) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples_us, n=4, method="inclusive")
        return (high - low) / self.median_us if self.median_us > 0 else 0.0


VIEW_US = 0.1
"""About what a call costs by which a model hands on a tensor under another shape."""
_VIEWS = ('"template":"reshape"', '"template":"stack"')


def cost_us(schedule: str, measurement: Measurement) -> float:
    """What a kernel costs in a model under a schedule (JSON): its expected time, but next to nothing for a view.

    Alone, what reshapes a tensor or joins several end to end is a copy; in a model it is memory under another name (see
    `plan.sequence`).
    """
    us = measurement.expected_us
    return min(us, VIEW_US) if measurement.ok and any(view in schedule for view in _VIEWS) else us


_NOISE = (
    "Stack trace",
    "Traceback",
    "File ",
    "at ",
    "[bt]",
    "Error caught from RPC call",
    "RPCError:",
    "^",
    "!!!!",
    "<traceback",
)


def one_line(error: object, *, last: bool = False, limit: int = 300) -> str:
    """The line of an error text, or the last line of a log, that says something: not a part of a stack trace."""
    lines = [line for line in map(str.strip, str(error).splitlines()) if line]
    useful = [line for line in lines if not line.startswith(_NOISE)] or lines or [type(error).__name__]
    text = useful[-1 if last else 0]
    return text if len(text) <= limit else text[: limit - 3] + "..."
