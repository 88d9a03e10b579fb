"""The record store: what goes in comes out, from several processes, after kill -9, and never from a damaged file."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from layoutsearch.errors import LayoutSearchError
from layoutsearch.layout.facts import ConvFacts, KernelFacts, OperandFacts
from layoutsearch.measure.records import (
    KernelRecord,
    ModelRecord,
    RecordContext,
    RecordStore,
    WorkloadRecord,
    canonical_json,
)
from layoutsearch.measure.results import Measurement, Status

ROOT = Path(__file__).resolve().parents[2]
# A file of every format that was ever written; see the history in measure/records.py.
STORES = Path(__file__).parent / "stores"
FACTS = KernelFacts(
    "conv2d",
    ("add", "relu"),
    (OperandFacts((1, 16, 8, 8), "NCHW", "float32"), OperandFacts((32, 16, 3, 3), "OIHW", "float32", True)),
    (OperandFacts((1, 32, 8, 8), "NCHW", "float32"),),
    ConvFacts(1, 16, 32, (3, 3), (1, 1), (1, 1), 1, (8, 8), (8, 8)),
    (1, 1),
    589824,
)
CONTEXT = RecordContext("llvm -mcpu=x", "local", "cpu", 2, "0.27.0", "1")

WRITER = """
import sys
from test_record_store import CONTEXT, ok
from layoutsearch.measure.records import RecordStore
path, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with RecordStore(path) as store:
    written = 0
    while written < count or count < 0:
        store.add(ok(name, str(written)), ok(name, str(written) + "b"))
        written += 1
        if count < 0:
            print(written, flush=True)
"""


def ok(workload: str, schedule: str = "{}", us: tuple[float, ...] = (2.0,), candidate: str = "NCHW16c") -> KernelRecord:
    return KernelRecord(CONTEXT, workload, candidate, schedule, Measurement(Status.OK, us, "", 0.5))


def writer(path: Path, name: str, count: int) -> subprocess.Popen[str]:
    folders = [str(ROOT), str(Path(__file__).parent)]
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name, str(count)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sub" / "records.db"


def test_records_come_back_as_they_were_after_reopening(path: Path) -> None:
    failed = KernelRecord(
        CONTEXT, "conv", "NHWC", "{}", Measurement(Status.TIMEOUT, (), "within 1 s", 1.0), 2, 3, False
    )
    with RecordStore(path) as store:
        store.add(ok("conv", us=(1.5, 2.5)), failed)
    with RecordStore(path) as store:
        first, second = store.records()
    assert first.created > 0
    assert replace(first, created=0.0) == ok("conv", us=(1.5, 2.5))
    assert replace(second, created=0.0) == failed


def test_lookup_finds_the_latest_of_exactly_that_kernel(path: Path) -> None:
    with RecordStore(path) as store:
        store.add(ok("conv", us=(9.0,)), ok("conv", us=(3.0,)), ok("conv", "other", us=(1.0,)))
        found = store.lookup(CONTEXT, "conv", "NCHW16c", "{}")
        assert found is not None
        assert found.measurement.samples_us == (3.0,)
        assert store.lookup(CONTEXT, "conv", "NHWC", "{}") is None
        assert store.lookup(CONTEXT, "conv", "NCHW16c", "{}", flush=False) is None
        for name, value in (("threads", 4), ("cpu", "b"), ("tvm", "1"), ("template", "2"), ("target", "c")):
            assert store.lookup(replace(CONTEXT, **{name: value}), "conv", "NCHW16c", "{}") is None


def test_best_takes_the_fastest_success_of_the_latest_measurements(path: Path) -> None:
    with RecordStore(path) as store:
        store.add(ok("conv", "a", (1.0,)), ok("conv", "a", (5.0,)), ok("conv", "b", (3.0,)))
        store.add(ok("conv", "c", (2.0,), candidate="NHWC"), ok("other", "d", (0.1,)))
        store.add(KernelRecord(CONTEXT, "conv", "NCHW", "e", Measurement(Status.CRASH, (), "SIGSEGV")))
        best, packed = store.best(CONTEXT, "conv"), store.best(CONTEXT, "conv", "NCHW16c")
        assert best is not None
        assert packed is not None
        assert (best.schedule, packed.schedule) == ("c", "b")
        assert store.best(CONTEXT, "conv", "NCHW") is None
        assert store.workloads(CONTEXT) == ("conv", "other")
        assert [record.schedule for record in store.records(CONTEXT, workload="other")] == ["d"]


def test_model_rounds_come_back_aligned(path: Path) -> None:
    record = ModelRecord(CONTEXT, "fingerprint", {"h1": (1.0, 2.0), "h2": (3.0, 4.0)}, created=7.0)
    with RecordStore(path) as store:
        store.add_models(record)
        assert list(store.models(CONTEXT, "fingerprint")) == [record]
        assert list(store.models(CONTEXT, "another")) == []


@pytest.mark.parametrize("status", [Status.NO_DEVICE, Status.NO_TRACKER])
def test_infrastructure_failures_are_not_recorded(path: Path, status: Status) -> None:
    lost = KernelRecord(CONTEXT, "conv", "NHWC", "{}", Measurement(status, (), "gone"))
    with RecordStore(path) as store:
        with pytest.raises(ValueError, match=status.value):
            store.add(ok("conv"), lost)
        assert list(store.records()) == []


def test_several_processes_write_at_once(path: Path) -> None:
    writers = [writer(path, f"writer{index}", 20) for index in range(4)]
    assert [process.wait(timeout=60) for process in writers] == [0] * 4
    for process in writers:
        assert process.stdout is not None
        process.stdout.close()
    with RecordStore(path) as store:
        for index in range(4):
            assert len(list(store.records(workload=f"writer{index}"))) == 40


def test_kill_9_loses_nothing_that_was_added(path: Path) -> None:
    with writer(path, "killed", -1) as process:
        assert process.stdout is not None
        for _ in range(20):
            announced = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        announced = max([announced, *(int(line) for line in process.stdout.read().split("\n")[:-1])])
    with RecordStore(path) as store:
        count = len(list(store.records(workload="killed")))
        assert count >= 2 * announced
        assert count % 2 == 0  # both records of an `add`, or none
        store.add(ok("after"))
        assert store.workloads() == ("after", "killed")


@pytest.mark.parametrize("kept", [50, 5000])
def test_a_truncated_file_is_refused_in_one_line(path: Path, kept: int) -> None:
    with RecordStore(path) as store:
        store.add(*[ok("conv", str(index)) for index in range(200)])
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(LayoutSearchError, match="damaged") as caught:
        RecordStore(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.stat().st_size == kept


def test_foreign_files_are_refused_and_left_alone(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("{'a': 'text file'}\n" * 100)
    with pytest.raises(LayoutSearchError, match=r"records\.db is damaged or is no record file"):
        RecordStore(path)
    assert path.read_text().startswith("{'a'")
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    with pytest.raises(LayoutSearchError, match="another program"):
        RecordStore(path)
    with pytest.raises(LayoutSearchError, match="unable to open"):
        RecordStore(path.parent)


def test_a_newer_schema_is_refused(path: Path) -> None:
    RecordStore(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(LayoutSearchError, match="schema 99"):
        RecordStore(path)


def test_canonical_json_ignores_the_order_of_keys() -> None:
    assert canonical_json({"b": 1, "a": [2, 3]}) == canonical_json({"a": [2, 3], "b": 1}) == '{"a":[2,3],"b":1}'


def test_workloads_come_back_as_they_were_described(path: Path) -> None:
    conv, pool = WorkloadRecord("conv", "conv2d 1x16", FACTS), WorkloadRecord("pool", "pool", replace(FACTS, conv=None))
    with RecordStore(path) as store:
        store.add_workloads(pool, conv)
        store.add_workloads()
        store.add_workloads(WorkloadRecord("pool", "max_pool2d", replace(FACTS, conv=None)))
    with RecordStore(path) as store:
        assert store.workload_records() == (conv, replace(pool, summary="max_pool2d"))
        assert store.workload_facts() == {"conv": FACTS, "pool": replace(FACTS, conv=None)}


def test_a_file_of_the_first_format_is_brought_up_to_date(path: Path) -> None:
    path.parent.mkdir()
    shutil.copy(STORES / "records_1.sqlite", path)
    with RecordStore(path) as store:
        first, second = store.records()
        assert first == replace(ok("conv", us=(1.5, 2.5)), created=7.0, warmup=1)
        assert second.measurement.status is Status.TIMEOUT
        (model,) = store.models(CONTEXT, "fingerprint")
        assert model == ModelRecord(CONTEXT, "fingerprint", {"h1": (1.0, 2.0), "h2": (3.0, 4.0)}, 9.0)
        assert store.workload_facts() == {}
        store.add(ok("conv", "new"))
        store.add_workloads(WorkloadRecord("conv", "conv2d", FACTS))
    with RecordStore(path) as store:
        assert len(list(store.records())) == 3
        assert store.workload_facts() == {"conv": FACTS}


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE kernels SET samples_us = '[1.0,'",
        "UPDATE kernels SET samples_us = '[-3.0]'",
        "UPDATE kernels SET samples_us = '[]'",
        "UPDATE kernels SET status = 'well'",
        "UPDATE models SET samples_us = '[1.0]'",
        "UPDATE workloads SET facts = '{}'",
    ],
)
def test_a_value_that_was_changed_in_the_file_is_one_line(path: Path, change: str) -> None:
    with RecordStore(path) as store:
        store.add(ok("w"))
        store.add_models(ModelRecord(CONTEXT, "m", {"a": (1.0,)}))
        store.add_workloads(WorkloadRecord("w", "a convolution", FACTS))
    database = sqlite3.connect(path)
    database.execute(change)
    database.commit()
    database.close()

    def read() -> None:
        with RecordStore(path) as store:
            list(store.records())
            list(store.models(CONTEXT, "m"))
            store.workload_records()

    with pytest.raises(LayoutSearchError, match="damaged") as caught:
        read()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
