"""What is known of kernels and transforms, and the interface through which more becomes known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.transform import TransformKey
from layoutsearch.measure.results import Measurement, cost_us
from layoutsearch.search.workloads import Workload

# Names the record that speaks of a candidate as a whole: no further schedule exists, or none can be built.
WHOLE = "*"


@dataclass
class Known:
    """What is known of one candidate of one workload.

    Attributes:
        tries: measurement by schedule (canonical JSON).
        closed: whether no further schedule will be tried; `reason` says why if that is a failure.
        spent: whether the template has no further schedule; another source of schedules may have.
        again: schedules that were timed more than once.
    """

    tries: dict[str, Measurement] = field(default_factory=dict)
    closed: bool = False
    reason: str = ""
    spent: bool = False
    again: set[str] = field(default_factory=set)

    @property
    def ranked(self) -> list[tuple[str, float]]:
        """Schedules that ran with their costs, fastest first; see `cost_us`."""
        ok = [(s, cost_us(s, m)) for s, m in self.tries.items() if m.ok]
        return sorted(ok, key=lambda pair: pair[1])

    @property
    def best(self) -> tuple[str, float] | None:
        """Schedule and time of the fastest try."""
        return next(iter(self.ranked), None)

    @property
    def best_us(self) -> float:
        """Time of the fastest try; infinite without one."""
        return self.best[1] if self.best else float("inf")


@dataclass(frozen=True)
class Request:
    """Measure up to `tries` schedules in all of one candidate."""

    workload: Workload
    choice: Candidate | None
    tries: int


class Knows(Protocol):
    """What plans are made from."""

    def of(self, workload: Workload, choice: Candidate | None) -> Known:
        """What is known of a candidate of a workload."""

    def transform(self, key: TransformKey) -> Known:
        """What is known of a transform."""


class Lab(Knows, Protocol):
    """Measures kernels and transforms and remembers them: on a device, or from a recorded table."""

    @property
    def measured(self) -> int:
        """Kernels and transforms timed by this lab; what came from records does not count."""

    @property
    def failures(self) -> Mapping[str, int]:
        """How many failed, by status."""

    def recall(self, requests: Sequence[Request], keys: Iterable[TransformKey] = ()) -> bool:
        """Know again what this run measured of these before it was stopped, and measure nothing; whether it did.

        Only in a run that is resumed; `measure`, `refine` and `measure_transforms` recall first.
        """

    def measure(self, requests: Sequence[Request], reserve_s: float = 0.0) -> None:
        """Try schedules until each request has its number or the budget is over."""

    def refine(self, requests: Sequence[Request], repeat: int, reserve_s: float = 0.0) -> None:
        """Time the `tries` fastest schedules of each request again, `repeat` samples each."""

    def measure_transforms(self, keys: Iterable[TransformKey], reserve_s: float = 0.0) -> None:
        """Measure transforms that are not known yet."""

    def measure_transforms_again(self, keys: Iterable[TransformKey], reserve_s: float = 0.0) -> None:
        """Time transforms that ran once more: what was disturbed either time does not count."""
