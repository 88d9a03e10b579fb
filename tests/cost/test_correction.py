"""The correction of whole models: shared between models, their own after a few timings, honest about both."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layoutsearch.cost.conformal import coverage
from layoutsearch.cost.correction import Correction, WholeRow
from layoutsearch.cost.model import ModelMismatch
from layoutsearch.cost.whole import WHOLE_FEATURES, WholeShape, relative_to_best, whole_shape
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.transform import TransformKey
from tests.cost.rows import CHOICES, MACHINE, conv

NOISE = 0.01


def shape(rng: np.random.Generator, center: np.ndarray) -> WholeShape:
    values = np.clip(center + 0.05 * rng.standard_normal(7), 0.0, 1.0)
    additive = float(np.exp(8.0 + 2.0 * center[0] + 0.1 * rng.standard_normal()))
    return WholeShape(additive, math.log(additive), 0.1 * values[0], *map(float, values[1:5]), -1.0, *values[5:7])


def rows(model: str, seed: int, count: int = 30, own: float | None = None) -> list[WholeRow]:
    """Whole times: 4 % slower the more calls, 10 % of the transforms' share saved, and something of the model's own."""
    rng = np.random.default_rng([seed, 7])
    center = rng.uniform(0.2, 0.8, 7)
    own = 0.015 * rng.standard_normal() if own is None else own
    found = []
    for _ in range(count):
        s = shape(rng, center)
        log_ratio = 0.03 + 0.4 * s.calls_per_us - 0.1 * s.transform_share + own + NOISE * rng.standard_normal()
        found.append(WholeRow(s, s.additive_us * math.exp(log_ratio), model))
    return found


def errors(correction: Correction, of: list[WholeRow], model: str = "") -> tuple[np.ndarray, np.ndarray]:
    found = correction.predict([r.shape for r in of], model)
    return np.log([r.us for r in of]) - found.log_us, found.sigma


@pytest.fixture(scope="module")
def correction() -> Correction:
    return Correction.fit([row for seed in range(6) for row in rows(f"m{seed}", seed)])


def test_a_model_never_timed_is_closer_than_its_additive_time(correction: Correction) -> None:
    before, after = [], []
    for seed in range(20, 30):
        new = rows("new", seed)
        before += [math.log(r.us / r.shape.additive_us) for r in new]
        after += list(errors(correction, new)[0])
    assert np.median(np.abs(after)) < 0.8 * np.median(np.abs(before))


def test_its_own_timings_take_over(correction: Correction) -> None:
    new = rows("new", 40, own=0.15)
    spreads, sizes = [], []
    for known in (0, 1, 3, 8):
        error, sigma = errors(correction.updated(new[:known]), new[8:], "new")
        sizes.append(float(np.median(np.abs(error))))
        spreads.append(float(np.median(sigma)))
    assert sizes[0] > 0.08
    assert sizes[3] < 0.015
    assert sizes[0] > sizes[1] > sizes[3]
    assert spreads[0] > spreads[1] > spreads[2] > spreads[3]
    # What is known of one model says less of another.
    other, _ = errors(correction.updated(new[:8]), new[8:], "another")
    assert np.median(np.abs(other)) > 3 * sizes[3]


def test_its_spread_holds_for_models_never_timed(correction: Correction) -> None:
    error, sigma = zip(*(errors(correction, rows("new", seed, 5)) for seed in range(50, 90)), strict=True)
    assert 0.6 < coverage(np.concatenate(error), np.concatenate(sigma)) < 0.97


def test_without_any_timing_the_sum_stands_with_the_priors_spread() -> None:
    empty = Correction.fit([])
    new = rows("new", 1)
    found = empty.predict([r.shape for r in new])
    assert np.allclose(found.us, [r.shape.additive_us for r in new])
    assert np.all((found.sigma > 0.02) & (found.sigma < 0.3))
    error, _ = errors(empty.updated(new[:10]), new[10:], "new")
    assert np.median(np.abs(error)) < 0.02
    assert len(empty.predict([]).us) == 0


def test_a_saved_correction_answers_the_same_and_a_strange_one_is_refused(
    correction: Correction, tmp_path: Path
) -> None:
    file = tmp_path / "correction.json"
    correction.save(file)
    shapes = [r.shape for r in rows("new", 3)]
    assert np.allclose(Correction.load(file).predict(shapes).us, correction.predict(shapes).us, rtol=1e-12)
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, "features": list(WHOLE_FEATURES[1:])}))
    with pytest.raises(ModelMismatch, match="fit it again"):
        Correction.load(file)
    file.write_text("{}")
    with pytest.raises(ModelMismatch, match="fit it again"):
        Correction.load(file)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(CHOICES), st.floats(0.1, 1e4)), min_size=1, max_size=8), st.integers(0, 3))
def test_shares_are_shares_and_parts_add_up(parts: list[tuple], changes: int) -> None:
    facts = conv(64, 64, 28)
    key = TransformKey((1, 64, 28, 28), "NCHW", "float32", Layout("NCHW"), Layout("NHWC"))
    found = whole_shape([(facts, choice, us) for choice, us in parts], [(key, 3.0)] * changes, MACHINE)
    assert found.additive_us == pytest.approx(sum(us for _, us in parts) + 3.0 * changes)
    for name in ("transform_share", "memory_share", "short_share", "channels_last_share", "blocked_share"):
        assert 0.0 <= getattr(found, name) <= 1.0 + 1e-9
    assert found.calls_per_us == pytest.approx((len(parts) + changes) / found.additive_us)
    assert len(found.features) == len(WHOLE_FEATURES)


def test_shapes_are_relative_to_the_best_of_their_model() -> None:
    shapes = [r.shape for r in rows("m", 1)]
    found = relative_to_best(shapes)
    best = min(range(len(shapes)), key=lambda i: shapes[i].additive_us)
    assert found[best].features == (0.0,) * len(WHOLE_FEATURES)
    assert [s.additive_us for s in found] == [s.additive_us for s in shapes]
    for before, after in zip(shapes, found, strict=True):
        assert np.allclose(np.subtract(before.features, after.features), shapes[best].features)
    assert relative_to_best([]) == []
