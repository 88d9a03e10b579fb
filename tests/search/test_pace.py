"""How fast a device is now: the same kernels, timed again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from layoutsearch.measure.kernels import KernelCall
from layoutsearch.measure.results import Measurement, Status
from layoutsearch.search.pace import Pace, Paced
from layoutsearch.search.visits import Timing


class Device:
    """Takes so long for each library, or fails."""

    def __init__(self, us: dict[str, float | Status]) -> None:
        self.us = us

    def time_kernels(self, lib_path: str, calls: Sequence[KernelCall], *, repeat: int = 7) -> list[Measurement]:
        took = self.us[lib_path]
        if isinstance(took, Status):
            return [Measurement(took, (), "gone wrong")]
        return [Measurement(Status.OK, (took,) * repeat)]


def paced(library: str, us: float, count: int) -> Paced:
    return Paced(Timing(library, (KernelCall("f", ()),), 7), us, count)


def test_kernels_count_as_often_as_a_model_runs_them() -> None:
    device = Device({"a": 20.0, "b": 5.0})
    pace = Pace(device, [paced("a", 10.0, 1), paced("b", 5.0, 4)])
    assert pace.ratio() == pytest.approx((20 + 20) / (10 + 20))
    device.us["a"] = 10.0
    assert pace.ratio() == pytest.approx(1.0), "every time is a new one"


def test_what_fails_says_nothing() -> None:
    device = Device({"a": 20.0, "b": Status.CRASH})
    assert Pace(device, [paced("a", 10.0, 1), paced("b", 5.0, 4)]).ratio() == pytest.approx(2.0)
    assert Pace(device, [paced("b", 5.0, 4)]).ratio() == 1.0
    assert Pace(device, []).ratio() == 1.0
