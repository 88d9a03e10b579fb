"""What a kernel costs, out of its samples."""

from __future__ import annotations

import pytest

from layoutsearch.measure.results import VIEW_US, Measurement, Status, cost_us


def ok(*us: float) -> Measurement:
    return Measurement(Status.OK, us)


def test_skewed_samples_cost_their_mean() -> None:
    assert ok(10.0, 10.0, 10.0, 11.0, 14.0).expected_us == pytest.approx(11.0)


def test_a_burst_of_other_work_counts_little() -> None:
    assert ok(10.0, 10.0, 10.0, 10.0, 9000.0).expected_us == pytest.approx(11.0)
    assert ok(10.0, 10.0, 4000.0, 10.0, 9000.0).expected_us == pytest.approx(12.0)


def test_a_failure_never_wins() -> None:
    assert Measurement(Status.TIMEOUT).expected_us == float("inf")
    assert cost_us('{"template":"reshape"}', Measurement(Status.CRASH)) == float("inf")


def test_a_view_is_next_to_free() -> None:
    schedule = '{"params":{},"template":"reshape","version":1}'
    assert cost_us(schedule, ok(7.0, 7.0)) == VIEW_US
    assert cost_us('{"params":{},"template":"loops","version":1}', ok(7.0, 7.0)) == 7.0
