"""How pairs of kernels are built, timed and recorded. No clock decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

from layoutsearch.errors import DeviceError, ToolchainError
from layoutsearch.measure.builder import BuildResult
from layoutsearch.measure.kernels import KernelCall
from layoutsearch.measure.records import RecordStore
from layoutsearch.measure.results import Measurement, Status
from layoutsearch.schedule import pair
from layoutsearch.search import pair_lab
from layoutsearch.search.budget import Budget
from layoutsearch.search.jobs import function_name
from layoutsearch.search.pair_jobs import APART, BuiltPair, PairJob, build_pair
from layoutsearch.search.pair_lab import PairLab
from layoutsearch.search.pairs import PairTimes, chosen
from layoutsearch.search.reporter import NoteKeeper, Silent
from layoutsearch.search.setup import template_versions
from layoutsearch.targets import local_target
from tests.search.pair_case import CONTEXT, Case, schedule, text, took


class StubBuilder:
    """Answers each job from a function, at once."""

    def __init__(self, answer: Callable[[PairJob], BuildResult]) -> None:
        self.answer = answer
        self.jobs: list[PairJob] = []

    def submit(self, _function: str, payload: PairJob, _timeout_s: float) -> Future[BuildResult]:
        self.jobs.append(payload)
        future: Future[BuildResult] = Future()
        future.set_result(self.answer(payload))
        return future


def built(job: PairJob) -> BuildResult:
    """Three schedules of 1, 2 and 3 rows."""
    Path(job.output).touch()
    specs = (((1, 8), "float32"),) * 4
    value = BuiltPair(job.output, tuple(text(rows) for rows in (1, 2, 3)), specs, (specs[:3], specs[:3]), 0)
    return BuildResult(Status.OK, value)


class StubDevice:
    """Times by the name of a function: with three rows the pair takes 30 us, the two take 20 and 25."""

    US: Mapping[str, float] = {
        **{function_name(i): us for i, us in enumerate((34.0, 32.0, 30.0))},
        **dict(zip(APART, (20.0, 25.0), strict=True)),
    }

    def __init__(self, failing: Mapping[str, Status] | None = None) -> None:
        self.failing = failing or {}
        self.calls: list[tuple[KernelCall, ...]] = []

    def time_kernels(self, path: str, calls: Sequence[KernelCall], *, repeat: int = 7) -> list[Measurement]:
        self.calls.append(tuple(calls))
        rng = np.random.default_rng(len(self.calls))
        return [
            Measurement(self.failing[c.function], (), "failed")
            if c.function in self.failing
            else took(*(self.US[c.function] * rng.uniform(0.99, 1.01, size=repeat)))
            for c in calls
        ]


def lab(
    store: RecordStore, folder: Path, device: Any = None, builder: Any = None, budget: Budget | None = None
) -> tuple[PairLab, list[str]]:
    reporter = NoteKeeper(Silent())
    made = PairLab(device, builder, store, CONTEXT, {"kind": "llvm"}, folder, budget or Budget(), reporter)
    return made, reporter.notes


def test_the_one_kernel_is_timed_next_to_the_two(case: Case, store: RecordStore, tmp_path: Path) -> None:
    device, builder, works = StubDevice(), StubBuilder(built), case.works()
    times = lab(store, tmp_path, device, builder)[0].measure(works, 0.0)
    assert [job.output for job in builder.jobs if Path(job.output).exists()] == []
    names = [{c.function for c in calls} for calls in device.calls]
    assert all(set(APART) <= some for some in names)
    # Again the two fastest of the three only.
    assert {function_name(1), function_name(2), *APART} in names
    for work in works:
        assert set(times[work.key].joined) == {text(2), text(3)}
    assert {f.schedule for f in chosen(works, times)} == {schedule(3)}
    assert len(chosen(works, times)) == 3


def test_weights_are_cold_and_the_rest_is_fresh(case: Case, store: RecordStore, tmp_path: Path) -> None:
    device = StubDevice()
    work = case.works()[1]
    lab(store, tmp_path, device, StubBuilder(built))[0].measure([work], 0.0)
    by_name = {c.function: c for c in device.calls[0]}
    # Data, weights and bias; the tensor between, weights, bias and the residual.
    assert by_name[APART[0]].cold == (1, 2)
    assert by_name[APART[1]].cold == (1, 2)
    # Of the one: data, weights, bias, then weights, bias and the residual. The stub's first has two operands.
    assert by_name[function_name(0)].cold == (1, 2, 2, 3)
    assert all(c.footprint == work.first.workload.facts.footprint for c in by_name.values())


def test_a_later_run_starts_from_the_records(case: Case, store: RecordStore, tmp_path: Path) -> None:
    works = case.works()
    first = lab(store, tmp_path, StubDevice(), StubBuilder(built))[0].measure(works, 0.0)
    assert lab(store, tmp_path)[0].measure(works, 0.0) == first
    # Nothing that knows kernels sees them.
    assert list(store.records(CONTEXT)) == []
    of_pairs = "templates depthwise_pointwise1.0 pointwise_depthwise1.0"
    assert {record.context.template for record in store.records()} == {of_pairs}
    assert not any(name in template_versions() for name in pair.TEMPLATES)


def test_a_run_that_is_killed_has_a_pair_whole_or_not_at_all(
    case: Case, store: RecordStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying(StubDevice):
        def time_kernels(self, path: str, calls: Sequence[KernelCall], *, repeat: int = 7) -> list[Measurement]:
            if len(self.calls) == 6:
                raise KeyboardInterrupt
            return super().time_kernels(path, calls, repeat=repeat)

    monkeypatch.setattr(pair_lab, "_BATCH", 1)
    works = case.works()
    with pytest.raises(KeyboardInterrupt):
        lab(store, tmp_path, Dying(), StubBuilder(built))[0].measure(works, 0.0)
    assert {record.workload for record in store.records()} == {works[0].key}
    builder = StubBuilder(built)
    resumed = lab(store, tmp_path, StubDevice(), builder)[0].measure(works, 0.0)
    assert len(builder.jobs) == len(works) - 1
    assert set(resumed) == {work.key for work in works}
    assert chosen(works, resumed) == chosen(works, lab(store, tmp_path)[0].measure(works, 0.0))


def test_failures_are_records(case: Case, store: RecordStore, tmp_path: Path) -> None:
    works = case.works()[:2]
    answers = iter([
        BuildResult(Status.BUILD_CRASH, None, "killed by SIGSEGV"),
        BuildResult(Status.OK, BuiltPair("", (), (), ((), ()), 0, "the first of a pair is no depthwise convolution")),
    ])  # fmt: skip
    made, notes = lab(store, tmp_path, StubDevice(), StubBuilder(lambda _: next(answers)))
    times = made.measure(works, 0.0)
    assert times == {work.key: PairTimes() for work in works}
    assert any("SIGSEGV" in note for note in notes)
    assert lab(store, tmp_path)[0].measure(works, 0.0) == times


@pytest.mark.parametrize("name", [function_name(2), APART[1]])
def test_kernels_that_fail_on_the_device(case: Case, store: RecordStore, tmp_path: Path, name: str) -> None:
    works = case.works()[:1]
    device = StubDevice({name: Status.CRASH})
    times = lab(store, tmp_path, device, StubBuilder(built))[0].measure(works, 0.0)
    found = {fusion.schedule for fusion in chosen(works, times)}
    assert found == (set() if name in APART else {schedule(2)})
    assert lab(store, tmp_path)[0].measure(works, 0.0) == times


def test_neither_a_missing_linker_nor_a_missing_device_is_a_record(
    case: Case, store: RecordStore, tmp_path: Path
) -> None:
    missing = BuildResult(Status.BUILD_ERROR, None, "ToolchainError: no C compiler found")
    with pytest.raises(ToolchainError, match="no C compiler"):
        lab(store, tmp_path, StubDevice(), StubBuilder(lambda _: missing))[0].measure(case.works(), 0.0)
    gone = StubDevice(dict.fromkeys(StubDevice.US, Status.NO_DEVICE))
    with pytest.raises(DeviceError):
        lab(store, tmp_path, gone, StubBuilder(built))[0].measure(case.works(), 0.0)
    assert list(store.records()) == []


def test_no_time_no_measurement(case: Case, store: RecordStore, tmp_path: Path) -> None:
    builder = StubBuilder(built)
    made, _ = lab(store, tmp_path, StubDevice(), builder, Budget(100.0))
    assert made.measure(case.works(), 200.0) == {}
    assert builder.jobs == []
    budget = Budget()

    class Stopping(StubDevice):
        def time_kernels(self, path: str, calls: Sequence[KernelCall], *, repeat: int = 7) -> list[Measurement]:
            budget.interrupt()
            return super().time_kernels(path, calls, repeat=repeat)

    assert lab(store, tmp_path, Stopping(), StubBuilder(built), budget)[0].measure(case.works(), 0.0) == {}
    assert list(store.records()) == []


@pytest.mark.parametrize("which", [0, 1], ids=["pointwise first", "depthwise first"])
def test_what_is_built(case: Case, tmp_path: Path, store: RecordStore, which: int) -> None:
    """The real job: as many schedules as were asked for, and the two kernels as the plan has them."""
    work = case.works()[which]
    builder = StubBuilder(lambda _: BuildResult(Status.BUILD_ERROR, None, "not yet"))
    lab(store, tmp_path, None, builder)[0].measure([work], 0.0)
    target = dict(local_target().export())
    (job,) = builder.jobs
    job = replace(job, first=replace(job.first, target=target), second=replace(job.second, target=target), count=2)
    made = build_pair(job)
    library = tvm.runtime.load_module(made.output)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype("float32") for shape, _ in (*made.apart[0], *made.apart[1][1:])]
    arrays = [tvm.runtime.tensor(a) for a in arrays]
    first, second = arrays[: len(made.apart[0])], arrays[len(made.apart[0]) :]
    library[APART[0]](*first)
    library[APART[1]](first[-1], *second)
    want = second[-1].numpy().copy()
    assert len(made.schedules) == 2
    for i in range(2):
        out = tvm.runtime.tensor(np.full(want.shape, math.nan, "float32"))
        library[function_name(i)](*first[:-1], *second[:-1], out)
        assert np.abs(out.numpy() - want).max() <= 1e-5 * np.abs(want).max()
