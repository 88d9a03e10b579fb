"""Schedules as values: JSON there and back, and what a damaged plan says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tvm_ffi
from tvm import relax

from layoutsearch.errors import LayoutSearchError, PlanError
from layoutsearch.schedule import TEMPLATES, Schedule, ScheduleError, apply, candidates, default
from tests.schedule import kernels as k

GOOD = {
    "template": "channels",
    "version": 1,
    "params": {"tile": 14, "vectors": 2, "reduce": "taps_outer", "outer": "rows"},
}


def _conv() -> Any:
    return k.fused(lambda x, w: relax.op.nn.conv2d(x, w, padding=(1, 1)), (1, 8, 12, 12), (16, 8, 3, 3))


def test_round_trip() -> None:
    schedule = Schedule.from_json(GOOD)
    assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule
    assert hash(Schedule.from_json(GOOD)) == hash(schedule)
    assert schedule["tile"] == 14
    assert Schedule.make("loops") != schedule


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"template": "winograd9"}, "winograd9"),
        ({"template": 3}, "3"),
        ({"version": 99}, "99"),
        ({"version": True}, "True"),
        ({"params": {**GOOD["params"], "unroll": 4}}, "unroll"),
        ({"params": {"tile": 14}}, "outer"),
        ({"params": {**GOOD["params"], "tile": 0}}, "tile=0"),
        ({"params": {**GOOD["params"], "tile": 10**9}}, "tile"),
        ({"params": {**GOOD["params"], "tile": "14"}}, "tile"),
        ({"params": {**GOOD["params"], "vectors": True}}, "vectors"),
        ({"params": {**GOOD["params"], "outer": "__import__('os')"}}, "outer"),
        ({"params": [1, 2]}, "params"),
        ({"script": "x"}, "script"),
    ],
)
def test_refuses(change: dict[str, Any], named: str) -> None:
    with pytest.raises(PlanError, match="schedule") as caught:
        Schedule.from_json({**GOOD, **change})
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [None, 7, "channels", [], {}, {"template": "channels"}])
def test_refuses_other_data(data: Any) -> None:
    with pytest.raises(PlanError):
        Schedule.from_json(data)


def test_schedule_that_does_not_fit() -> None:
    func = _conv()
    for schedule in (
        Schedule.make("flat", channels=7, vectors=2, rows=1),
        Schedule.make("flat", channels=8, vectors=2, rows=500),
        Schedule.make("channels", tile=60, vectors=1, reduce="taps_outer", outer="rows"),
        Schedule.make("reshape"),
    ):
        with pytest.raises(ScheduleError) as caught:
            apply(func, schedule, k.INFO)
        assert isinstance(caught.value, LayoutSearchError)


def test_candidates_are_distinct_and_known() -> None:
    every = candidates(_conv(), k.INFO)
    assert len(set(every)) == len(every) > 8
    assert {s.template for s in every} <= set(TEMPLATES)
    assert default(_conv(), k.INFO) == every[0]
    assert all(Schedule.from_json(s.to_json()) == s for s in every)


def test_apply_is_deterministic() -> None:
    func = _conv()
    first, second = (apply(func, default(func, k.INFO), k.INFO) for _ in range(2))
    assert tvm_ffi.structural_equal(first, second)
