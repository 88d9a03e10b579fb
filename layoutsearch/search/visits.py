"""Time a batch of built kernels in several visits, so that other work on the machine does not pass for a slow kernel.

A neighbour that takes the memory bus for half a second doubles every sample of the kernels that are timed meanwhile:
no statistic over these samples shows it. Samples are therefore shared out between visits with the rest of the batch in
between, and a visit that took much longer than the fastest one does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from layoutsearch.errors import DeviceError
from layoutsearch.measure.kernels import KernelCall
from layoutsearch.measure.results import Measurement

_VISITS = 2
# Times the fastest visit. Where operands happen to lie makes a tenth or two, which a model sees as well.
DISTURBED = 1.25


class KernelTimer(Protocol):
    """Times kernels of a library: a `measure.device.Device`."""

    def time_kernels(self, lib_path: str, calls: Sequence[KernelCall], *, repeat: int = 7) -> list[Measurement]:
        """See `Device.time_kernels`."""


@dataclass
class Timing:
    """A library of kernels to time.

    Attributes:
        library: its path.
        calls: its functions.
        repeat: samples of each, over all visits.
        visits: what came of each function so far.
        earlier: what came of each function in another batch; none where they are timed for the first time.
    """

    library: str
    calls: tuple[KernelCall, ...]
    repeat: int
    visits: list[list[Measurement]] = field(default_factory=list)
    earlier: tuple[Measurement, ...] = ()

    @property
    def results(self) -> list[Measurement]:
        """Of each function, over its visits; empty before the first."""
        if not self.earlier:
            return [agreed(visits) for visits in self.visits]
        return [later(before, visits) for before, visits in zip(self.earlier, self.visits, strict=True)]


def later(earlier: Measurement, visits: Sequence[Measurement]) -> Measurement:
    """What is known of a function after it was timed again: the later samples, but for what disturbed them.

    The earlier ones count where all later ones were disturbed, and only then: what is timed again was the fastest of
    many, and the luckiest as well. That a function fails now says nothing against that it ran before.
    """
    ran = [visit for visit in visits if visit.ok]
    if not earlier.ok or not ran:
        return earlier if earlier.ok or not visits else agreed(visits)
    return agreed(ran) if not _is_disturbed(agreed(ran), earlier) else earlier


def agreed(visits: Sequence[Measurement]) -> Measurement:
    """All samples of the visits that nothing disturbed; the failure, if one failed.

    Raises:
        ValueError: no visits.
    """
    if not visits:
        raise ValueError("nothing was timed")
    wall_s = sum(visit.wall_s for visit in visits)
    for visit in visits:
        if not visit.ok:
            return Measurement(visit.status, (), visit.error, wall_s)
    most = DISTURBED * min(visit.expected_us for visit in visits)
    samples = [us for visit in visits if visit.expected_us <= most for us in visit.samples_us]
    return Measurement(visits[0].status, tuple(samples), "", wall_s)


def time_in_visits(device: KernelTimer, timings: Sequence[Timing], over: Callable[[], bool]) -> None:
    """Time all, one after the other, twice; and a third time those of which one visit was disturbed.

    Args:
        device: times them.
        timings: filled in.
        over: whether there is no time for more; what had no visit by then has no results.

    Raises:
        DeviceError: the device is gone.
    """
    for visit in range(_VISITS):
        for timing in timings:
            if over():
                return
            # The first visit takes the odd sample.
            share = -(-timing.repeat // _VISITS) if visit == 0 else timing.repeat // _VISITS
            if share and (visit == 0 or timing.visits):
                _visit(device, timing, share, range(len(timing.calls)))
    for timing in timings:
        if over():
            return
        disturbed = [i for i, visits in enumerate(timing.visits) if _differ([*timing.earlier[i : i + 1], *visits])]
        if disturbed:
            _visit(device, timing, max(1, timing.repeat // _VISITS), disturbed)


def _visit(device: KernelTimer, timing: Timing, repeat: int, chosen: Sequence[int]) -> None:
    if not timing.visits:
        timing.visits = [[] for _ in timing.calls]
    todo = [i for i in chosen if all(visit.ok for visit in timing.visits[i])]
    if not todo:
        return
    found = device.time_kernels(timing.library, [timing.calls[i] for i in todo], repeat=repeat)
    for i, measurement in zip(todo, found, strict=True):
        if measurement.is_infrastructure:
            raise DeviceError(f"the device is gone: {measurement.error}")
        timing.visits[i].append(measurement)


def _is_disturbed(visit: Measurement, other: Measurement) -> bool:
    return visit.expected_us > DISTURBED * other.expected_us


def _differ(visits: Sequence[Measurement]) -> bool:
    times = [visit.expected_us for visit in visits]
    return all(visit.ok for visit in visits) and max(times) > DISTURBED * min(times)
