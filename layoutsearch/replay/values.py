"""What a table is made of, as values."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from layoutsearch.errors import LayoutSearchError
from layoutsearch.layout.layout import Layout
from layoutsearch.measure.results import Measurement
from layoutsearch.search.known import WHOLE


class TableError(LayoutSearchError):
    """A table of recorded measurements cannot be read, or does not fit what it is asked about."""


@dataclass(frozen=True)
class TableHeader:
    """What was recorded, where, and with which versions.

    Attributes:
        model: name of the model.
        fingerprint: of its canonical module.
        target: TVM target as plain data.
        device: identity of the device: key, cpu, features, cores, threads.
        profile: the calibrated device as plain data, None where it was not calibrated.
        threads: of every kernel.
        tvm: TVM's version.
        templates: versions of the schedule templates.
        created: ISO time.
        layouts: uniform layouts of the search space.
        anchors: indices of the nodes whose root is layout-sensitive.
    """

    model: str
    fingerprint: str
    target: Mapping[str, Any] = field(hash=False)
    device: Mapping[str, Any] = field(hash=False)
    profile: Mapping[str, Any] | None = field(hash=False)
    threads: int
    tvm: str
    templates: str
    created: str
    layouts: tuple[Layout, ...]
    anchors: tuple[int, ...]


@dataclass(frozen=True)
class RecordedTry:
    """One schedule of one candidate of a kernel, or a transform.

    Attributes:
        workload: its key, as in the record store.
        candidate: as text; empty for a frozen kernel.
        schedule: canonical JSON, or `WHOLE` for what is said of the candidate as a whole: there is no further schedule,
            or none can be built.
        measurement: the first one.
        build_s: seconds of one worker.
        refined: the later one with more samples, where there is one; it counts.
    """

    workload: str
    candidate: str
    schedule: str
    measurement: Measurement
    build_s: float = 0.0
    refined: Measurement | None = None

    @property
    def last(self) -> Measurement:
        """The measurement that counts."""
        return self.refined or self.measurement

    @property
    def timed(self) -> bool:
        """Whether it ran on the device, or was to."""
        return self.schedule != WHOLE and self.measurement.status.value in ("ok", "timeout", "crash", "error")


@dataclass(frozen=True)
class RecordedWhole:
    """An assignment that was built, validated and timed whole.

    Attributes:
        group: assignments of one group were timed interleaved: round r of all was taken together.
        starts: processes that the rounds were shared out between, equally and in order.
        label: how it was found, e.g. `uniform NCHW`.
        solution: candidate of every node.
        samples_us: by round.
        build_s: seconds of one worker.
        schedules: (node, schedule) where it is not the fastest of the table.
    """

    group: int
    starts: int
    label: str
    solution: tuple[int, ...]
    samples_us: tuple[float, ...]
    build_s: float = 0.0
    schedules: tuple[tuple[int, str], ...] = ()

    @property
    def median_us(self) -> float:
        """Median sample."""
        return statistics.median(self.samples_us)
