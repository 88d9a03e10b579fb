"""Rows out of a record store: the best of the latest, of one context, of workloads that are described."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from layoutsearch.cost.model import ModelIdentity
from layoutsearch.cost.train import Rows, fit_from, load_or_fit, rows_of_store
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.transform import TransformKey
from layoutsearch.measure.records import KernelRecord, RecordContext, RecordStore, WorkloadRecord
from layoutsearch.measure.results import Measurement, Status
from tests.cost.rows import TARGET, conv, kernel_rows, transform_rows

CONTEXT = RecordContext("llvm", "local", "cpu", 2, "0.27", "t1")
FACTS = conv(32, 64, 14)
PACKED = Candidate.of("NCHW16c", "OIHW16i16o")
KEY = TransformKey((1, 32, 14, 14), "NCHW", "float32", Layout("NCHW"), Layout("NHWC"))


def record(workload: str, candidate: str, schedule: str, *us: float, context: RecordContext = CONTEXT) -> KernelRecord:
    measurement = Measurement(Status.OK, us) if us else Measurement(Status.CRASH, (), "SIGSEGV")
    return KernelRecord(context, workload, candidate, schedule, measurement)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RecordStore]:
    with RecordStore(tmp_path / "records.sqlite") as store:
        store.add_workloads(
            WorkloadRecord("w1", "conv", FACTS), WorkloadRecord("w2", "conv", replace(FACTS, conv=None))
        )
        yield store


def test_the_best_schedule_of_each_candidate_by_its_latest_measurement(store: RecordStore) -> None:
    store.add(
        record("w1", str(PACKED), "a", 2.0, 1.0, 2.0, 2.0, 9.0),
        record("w1", str(PACKED), "b", 1.0),
        record("w1", str(PACKED), "b", 3.0),
        record("w1", str(PACKED), "c", 0.5),
        record("w1", str(PACKED), "c"),
        record("w1", "NCHW,OIHW,NCHW", "a"),
        record("w1", str(PACKED), "a", 0.1, context=replace(CONTEXT, threads=1)),
        record("w2", "", "a", 7.0),
        record("undescribed", "", "a", 7.0),
        record(KEY.workload, KEY.candidate, "a", 5.0),
    )
    rows = rows_of_store(store, CONTEXT, "resnet")
    assert [(r.workload, r.choice, r.us, r.tries, r.model) for r in rows.kernels] == [
        ("w1", PACKED, 2.0, 2, "resnet"),
        ("w2", None, 7.0, 1, "resnet"),
    ]
    assert rows.kernels[0].facts == FACTS
    assert [(r.key, r.us) for r in rows.transforms] == [(KEY, 5.0)]


def test_a_saved_model_is_loaded_and_a_strange_one_fitted_again(tmp_path: Path) -> None:
    path, identity = tmp_path / "models" / "cost.json", ModelIdentity("cpu", "t1")
    rows = [Rows(tuple(kernel_rows(name, i, 6)), tuple(transform_rows(name, i, 6))) for i, name in enumerate("abc")]
    first, why = load_or_fit(path, identity, rows, target=TARGET)
    assert "cannot be read" in why
    again, why = load_or_fit(path, identity, [], target=TARGET)
    assert why == ""
    asked = [(r.facts, r.choice) for r in kernel_rows("d", 9)]
    assert np.array_equal(first.kernels(asked).log_us, again.kernels(asked).log_us)
    other, why = load_or_fit(path, ModelIdentity("cpu", "t2"), rows[:1], target=TARGET)
    assert "templates" in why
    assert other.rows != first.rows
    assert load_or_fit(path, ModelIdentity("cpu", "t2"), [], target=TARGET)[1] == ""


def test_no_rows_at_all_leave_the_prior() -> None:
    assert fit_from([], target=TARGET).is_prior == (True, True)
