"""The cost model learns what it can learn, says how sure it is, and never reads a file of something else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from layoutsearch.cost.conformal import coverage
from layoutsearch.cost.model import KERNEL_PRIOR, CostModel, ModelIdentity, ModelMismatch
from layoutsearch.errors import LayoutSearchError
from layoutsearch.measure.records import RecordContext
from tests.cost.rows import TARGET, kernel_rows, transform_rows

MODELS = ("alpha", "beta", "gamma")


@pytest.fixture(scope="module")
def model() -> CostModel:
    kernels = [row for seed, name in enumerate(MODELS) for row in kernel_rows(name, seed)]
    transforms = [row for seed, name in enumerate(MODELS) for row in transform_rows(name, seed)]
    return CostModel.fit(kernels, transforms, target=TARGET, identity=ModelIdentity("cpu", "t1"))


def test_it_predicts_a_model_it_has_not_seen(model: CostModel) -> None:
    rows = kernel_rows("delta", 9, noise=0.0)
    found = model.kernels([(r.facts, r.choice) for r in rows])
    errors = np.log([r.us for r in rows]) - found.log_us
    assert np.median(np.abs(errors)) < 0.06
    changes = transform_rows("delta", 9, noise=0.0)
    log_us = model.transforms([r.key for r in changes]).log_us
    assert np.median(np.abs(np.log([r.us for r in changes]) - log_us)) < 0.06


def test_its_intervals_hold_about_as_often_as_they_say(model: CostModel) -> None:
    rows = [row for seed in range(20, 26) for row in kernel_rows("delta", seed)]
    found = model.kernels([(r.facts, r.choice) for r in rows])
    errors = np.log([r.us for r in rows]) - found.log_us
    assert 0.65 <= coverage(errors, found.sigma) <= 0.95
    low, high = found.interval(0.8)
    inside = np.mean([a <= r.us <= b for r, a, b in zip(rows, low, high, strict=True)])
    assert inside == pytest.approx(coverage(errors, found.sigma), abs=1e-9)


def test_equal_rows_give_an_equal_model(model: CostModel) -> None:
    rows = kernel_rows("alpha", 0) + kernel_rows("beta", 1)
    asked = [(r.facts, r.choice) for r in kernel_rows("delta", 9)]
    first, second = (CostModel.fit(rows, [], target=TARGET).kernels(asked) for _ in range(2))
    assert np.array_equal(first.log_us, second.log_us)
    assert np.array_equal(first.sigma, second.sigma)


def test_a_saved_model_answers_bit_for_bit(model: CostModel, tmp_path: Path) -> None:
    model.save(tmp_path / "model.json")
    again = CostModel.load(tmp_path / "model.json", ModelIdentity("cpu", "t1"))
    asked = [(r.facts, r.choice) for r in kernel_rows("delta", 9)]
    assert np.array_equal(model.kernels(asked).log_us, again.kernels(asked).log_us)
    assert np.array_equal(model.kernels(asked).sigma, again.kernels(asked).sigma)
    keys = [r.key for r in transform_rows("delta", 9)]
    assert np.array_equal(model.transforms(keys).log_us, again.transforms(keys).log_us)
    assert again.spread == model.spread
    assert again.rows == model.rows


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        (("schema",), "layoutsearch.cost/0", "schema"),
        (("features", "version"), 0, "feature schema"),
        (("features", "kernels"), ["log_flops"], "kernel features"),
        (("features", "transforms"), [], "transform features"),
        (("identity", "device"), "another cpu", "device"),
        (("identity", "templates"), "t2", "templates"),
    ],
)
def test_a_file_of_something_else_is_refused(
    model: CostModel, tmp_path: Path, path: tuple[str, ...], value: object, what: str
) -> None:
    file = tmp_path / "model.json"
    model.save(file)
    data = json.loads(file.read_text())
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file.write_text(json.dumps(data))
    with pytest.raises(ModelMismatch, match=f"other {what}.*fit it again") as caught:
        CostModel.load(file, ModelIdentity("cpu", "t1"))
    assert isinstance(caught.value, LayoutSearchError)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"schema": "layoutsearch.cost/1"}'])
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "model.json"
    file.write_text(text)
    with pytest.raises(ModelMismatch, match="fit it again") as caught:
        CostModel.load(file)
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelMismatch, match="cannot be read"):
        CostModel.load(tmp_path / "missing.json")


def test_few_rows_leave_the_prior_to_answer() -> None:
    rows = kernel_rows("alpha", 0)[:10]
    asked = [(r.facts, r.choice) for r in rows]
    none, few = CostModel.fit([], [], target=TARGET), CostModel.fit(rows, [], target=TARGET)
    assert none.is_prior == few.is_prior == (True, True)
    assert np.allclose(none.kernels(asked).sigma, KERNEL_PRIOR.spread.total)
    # Rows that ran twice as long as the base says move the prior, but not all the way.
    slow = [replace(r, us=2 * float(us)) for r, us in zip(rows, none.kernels(asked).us, strict=True)]
    moved = CostModel.fit(slow, [], target=TARGET).kernels(asked).us / none.kernels(asked).us
    assert np.all((moved > 1.2) & (moved < 2.0))


def test_nothing_asked_is_nothing_answered(model: CostModel) -> None:
    assert len(model.kernels([]).log_us) == len(model.transforms([]).log_us) == 0


def test_another_threads_target_or_template_is_another_identity() -> None:
    context = RecordContext("llvm -mcpu=x", "local", "cpu", 2, "0.27.0", "t1")
    own = ModelIdentity.of(context)
    assert own == ModelIdentity.of(replace(context, device="rack"))
    for name, value in (("threads", 4), ("cpu", "b"), ("tvm", "1"), ("template", "2"), ("target", "c")):
        assert ModelIdentity.of(replace(context, **{name: value})) != own
