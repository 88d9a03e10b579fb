"""Costs of a program whose measuring was cut short."""

from __future__ import annotations

import math

from layoutsearch.layout.graph import TensorInfo
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.transform import TransformKey
from layoutsearch.measure.results import Measurement, Status
from layoutsearch.search.assemble import transform_us
from layoutsearch.search.known import Known


class OneTransform:
    """A lab that knows one transform."""

    def __init__(self, known: Known) -> None:
        self.known = known

    def transform(self, key: TransformKey) -> Known:
        return self.known


KEY = TransformKey.of(TensorInfo("x", (1, 16, 8, 9), "float32", "NCHW"), Layout("NCHW"), Layout("NCHW16c"))


def us(known: Known) -> float:
    return transform_us(KEY, OneTransform(known))  # type: ignore[arg-type]


def test_a_transform_that_the_time_did_not_reach_costs_something_finite() -> None:
    assert 0 < us(Known()) < math.inf


def test_a_measured_one_costs_what_was_measured_and_a_failed_one_cannot_be_had() -> None:
    assert us(Known({"{}": Measurement(Status.OK, (2.0, 3.0, 4.0))}, closed=True)) == 3.0
    assert us(Known(closed=True, reason="crashed")) == math.inf
