"""Gain against cost: each part is what the model says of it, and the cheaper way counts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layoutsearch.cost.model import CostModel
from layoutsearch.cost.overhead import Border, Estimate, Neighbor, change_of, difference, overhead
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.transform import TransformKey
from tests.cost.rows import CHOICES, TARGET, conv, kernel_rows, transform_rows

PLAIN, LAST, PACKED8, PACKED16, BOTH = CHOICES
FACTS = conv(64, 64, 28)
# Reads NCHW16c and makes NCHW8c, and the other way round.
TURNING = (BOTH, Candidate.of("NCHW16c", "OIHW16i8o", "NCHW8c"))


def key(source: str, target: str) -> TransformKey:
    return TransformKey((1, 64, 28, 28), "NCHW", "float32", Layout(source), Layout(target))


@pytest.fixture(scope="module")
def model() -> CostModel:
    names = ("alpha", "beta", "gamma")
    return CostModel.fit(
        [row for seed, name in enumerate(names) for row in kernel_rows(name, seed)],
        [row for seed, name in enumerate(names) for row in transform_rows(name, seed)],
        target=TARGET,
    )


def test_the_parts_are_what_the_model_predicts(model: CostModel) -> None:
    borders = [Border(key("NCHW", "NCHW16c")), Border(key("NCHW16c", "NCHW"))]
    gone = [key("NCHW", "NHWC")]
    found = overhead(model, FACTS, PLAIN, PACKED16, borders, gone)
    old, new = model.kernels([(FACTS, PLAIN), (FACTS, PACKED16)]).us
    there, back = model.transforms([b.key for b in borders]).us
    assert found.gain.us == pytest.approx(old - new)
    assert found.saved.us == pytest.approx(model.transforms(gone).us[0])
    assert found.cost.us == pytest.approx(there + back - found.saved.us)
    assert found.net.us == pytest.approx(found.gain.us - found.cost.us)
    assert found.net.sigma >= max(found.gain.sigma, found.cost.sigma) > 0
    text = str(found)
    assert text.startswith("NCHW,OIHW,NCHW -> NCHW16c,OIHW16i16o,NCHW16c: gains ")
    assert ", costs " in text
    assert "+- " in text
    assert "NCHW->NCHW16c" in text


def test_a_neighbor_takes_over_what_it_can(model: CostModel) -> None:
    wanted = key("NCHW8c", "NCHW16c")
    producer = Neighbor(FACTS, PACKED8, (*CHOICES, *TURNING))
    consumer = Neighbor(FACTS, PACKED16, (*CHOICES, *TURNING))
    alone = change_of(model, Border(wanted))
    assert alone.fused is None
    assert alone.best == alone.alone
    fused = change_of(model, Border(wanted, producer, consumer))
    # Both neighbors can read NCHW8c and make NCHW16c instead; the one that pays less for it does.
    options = [difference(model, FACTS, BOTH, now).us for now in (PACKED8, PACKED16)]
    assert fused.fused is not None
    assert fused.fused.us == pytest.approx(min(options))
    assert fused.best.us == min(fused.alone.us, fused.fused.us)
    assert "as NCHW8c,OIHW8i16o,NCHW16c" in fused.into
    assert str(fused).endswith("(alone)" if fused.best == fused.alone else f"(fused into {fused.into})")


def test_a_neighbor_that_would_need_yet_another_layout_takes_nothing_over(model: CostModel) -> None:
    producer = Neighbor(FACTS, PLAIN, (*CHOICES, *TURNING))
    assert change_of(model, Border(key("NCHW", "NCHW16c"), producer)).fused is None


def test_candidates_of_one_workload_are_told_apart_better_than_each_is_known(model: CostModel) -> None:
    """What is wrong with a workload as a whole is wrong with both candidates, and cancels."""
    predicted = model.kernels([(FACTS, PLAIN), (FACTS, LAST)])
    independent = math.hypot(*(predicted.us * predicted.sigma))
    found = difference(model, FACTS, PLAIN, LAST)
    assert 0 < found.sigma <= independent * (1 + 1e-9)
    assert difference(model, FACTS, PLAIN, PLAIN) == Estimate(0.0, 0.0)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(CHOICES), st.sampled_from(CHOICES))
def test_there_and_back_again_gains_nothing(model: CostModel, a: Candidate, b: Candidate) -> None:
    there, back = difference(model, FACTS, a, b), difference(model, FACTS, b, a)
    assert there.us == pytest.approx(-back.us)
    assert there.sigma == pytest.approx(back.sigma)
