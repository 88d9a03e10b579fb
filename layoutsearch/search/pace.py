"""How fast a device is at the moment, against when its kernels were timed.

The clock of a shared machine moves by a tenth within a quarter of an hour. Whole models are timed minutes after their
kernels, so their sum is off by as much; what the same kernels take in the minutes around says by how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from layoutsearch.search.visits import KernelTimer, Timing, time_in_visits


@dataclass(frozen=True)
class Paced:
    """A kernel whose time is known.

    Attributes:
        timing: its library, one function.
        us: its time when it was recorded.
        count: how often the model runs it.
    """

    timing: Timing
    us: float
    count: int


class Pace:
    """Kernels of one assignment, built, to be timed again and again.

    Args:
        device: times them.
        kernels: at least one.
    """

    def __init__(self, device: KernelTimer, kernels: Sequence[Paced]) -> None:
        self._device, self._kernels = device, tuple(kernels)

    def ratio(self) -> float:
        """Their time now over that when they were recorded, as a model runs them; 1 where none of them runs.

        Raises:
            DeviceError: the device is gone.
        """
        again = [replace(kernel.timing, visits=[]) for kernel in self._kernels]
        time_in_visits(self._device, again, lambda: False)
        now = before = 0.0
        for kernel, timing in zip(self._kernels, again, strict=True):
            (result,) = timing.results
            if result.ok:
                now += kernel.count * result.expected_us
                before += kernel.count * kernel.us
        return now / before if before else 1.0
