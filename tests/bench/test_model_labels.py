"""Several plans beside each other in the JSON of `bench model`."""

from __future__ import annotations

import pytest

from layoutsearch.bench.compare import BenchResult, BenchRow
from layoutsearch.bench.model import _as_json


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["plan", "onnxruntime"], ["plan", "onnxruntime"]),
        (["plan", "a/uniform.json"], ["plan", "uniform"]),
        (["plan", "a/plan.json", "b/plan.json"], ["plan", "a_plan", "b_plan"]),
        (["plan", "x/a/plan.json", "y/a/plan.json"], ["plan", "x/a/plan.json", "y/a/plan.json"]),
    ],
)
def test_every_plan_has_numbers_of_its_own(names: list[str], labels: list[str]) -> None:
    rows = tuple(BenchRow(name, 1.0 + i, 0.0, 4, 0.0) for i, name in enumerate(names))
    data = _as_json("model", 2, BenchResult(rows, {}))
    assert {label: data[f"{label}_ms"] for label in labels} == {label: 1.0 + i for i, label in enumerate(labels)}
