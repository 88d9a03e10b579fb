"""Kernels that fail, in the compiler or on the device, are records like others, and the run goes on."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from layoutsearch.errors import DeviceError, ToolchainError
from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidates import enumerate_candidates
from layoutsearch.layout.space import parse_space
from layoutsearch.measure.builder import BuildResult
from layoutsearch.measure.device import Device
from layoutsearch.measure.records import RecordContext, RecordStore
from layoutsearch.measure.results import Measurement, Status
from layoutsearch.model.canonicalize import canonicalize
from layoutsearch.search.budget import Budget
from layoutsearch.search.jobs import BuiltKernels, KernelJob
from layoutsearch.search.kernels import KernelLab
from layoutsearch.search.known import Request
from layoutsearch.search.reporter import NoteKeeper, Silent
from layoutsearch.search.workloads import KernelNode, kernel_nodes
from tests.cli.running import SPACE
from tests.models import nets
from tests.search.faulty_jobs import export_faults

ARGS = (((4,), "float32"),) * 6
CONTEXT = RecordContext("target", "local", "cpu", 1, "tvm", "templates")


@pytest.fixture(scope="module")
def node() -> KernelNode:
    canonical = canonicalize(nets.stem((1, 3, 16, 16)))
    graph = build_graph(canonical)
    nodes = kernel_nodes(canonical, graph, enumerate_candidates(graph, parse_space(SPACE, "test")))
    return next(n for n in nodes if len(n.choices) >= 2)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RecordStore]:
    with RecordStore(tmp_path / "records.sqlite") as store:
        yield store


class StubBuilder:
    """Answers each job from a function, at once."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.jobs: list[KernelJob] = []

    def submit(self, function: str, payload: KernelJob, timeout_s: float) -> Future[BuildResult]:
        self.jobs.append(payload)
        future: Future[BuildResult] = Future()
        future.set_result(self.answer(payload))
        return future


class StubDevice:
    """Times every kernel at the same speed, or fails in one way."""

    def __init__(self, measurement: Measurement | None = None) -> None:
        self.measurement = measurement or Measurement(Status.OK, (5.0, 5.0))
        self.timed = 0

    def time_kernels(self, path: str, calls: Sequence[Any], *, repeat: int) -> list[Measurement]:
        self.timed += len(calls)
        return [self.measurement] * len(calls)


def built(job: KernelJob, exhausted: bool = False) -> BuildResult:
    Path(job.output).touch()
    schedules = tuple(f'{{"n":{len(job.known) + i}}}' for i in range(job.count))
    return BuildResult(Status.OK, BuiltKernels(job.output, schedules, ARGS, (), exhausted))


def lab(
    device: Any, builder: Any, store: RecordStore, folder: Path, budget: Budget | None = None
) -> tuple[KernelLab, list[str]]:
    reporter = NoteKeeper(Silent())
    made = KernelLab(device, builder, store, CONTEXT, {"kind": "llvm"}, folder, budget or Budget(), reporter)
    return made, reporter.notes


def test_faults_on_a_real_device(node: KernelNode, store: RecordStore, tmp_path: Path) -> None:
    """Crashes and a hang among kernels that work: typed failures, and the rest are measured."""
    bodies = ["", "*(volatile int*)8 = 1", 'for (;;) asm volatile("")', "exit(3)", ""]

    def answer(job: KernelJob) -> BuildResult:
        export_faults(job.output, bodies)
        names = tuple(f'{{"n":{i}}}' for i in range(len(bodies)))
        return BuildResult(Status.OK, BuiltKernels(job.output, names, ARGS, (), True))

    with Device.local(threads=1) as device:
        device.time_kernels = functools.partial(device.time_kernels, timeout_s=1.0)  # type: ignore[method-assign]
        kernels, _ = lab(device, StubBuilder(answer), store, tmp_path)
        kernels.measure([Request(node.workload, node.choices[0], 5)])
    known = kernels.of(node.workload, node.choices[0])
    assert [m.status for m in known.tries.values()] == [
        Status.OK, Status.CRASH, Status.TIMEOUT, Status.CRASH, Status.OK,
    ]  # fmt: skip
    assert known.closed
    assert known.best_us < float("inf")
    assert kernels.failures == {"crash": 2, "timeout": 1}
    assert "SIGSEGV" in next(m.error for m in known.tries.values() if m.status is Status.CRASH)
    again, _ = lab(None, None, store, tmp_path)
    assert again.of(node.workload, node.choices[0]).tries.keys() == known.tries.keys()


def test_a_compiler_that_crashes_closes_the_candidate_alone(
    node: KernelNode, store: RecordStore, tmp_path: Path
) -> None:
    bad, good = node.choices[:2]

    def answer(job: KernelJob) -> BuildResult:
        if job.candidate == str(bad):
            return BuildResult(Status.BUILD_CRASH, None, "killed by SIGSEGV")
        return built(job)

    builder = StubBuilder(answer)
    kernels, notes = lab(StubDevice(), builder, store, tmp_path)
    kernels.measure([Request(node.workload, bad, 3), Request(node.workload, good, 3)])
    assert kernels.of(node.workload, bad).closed
    assert "SIGSEGV" in kernels.of(node.workload, bad).reason
    assert len(kernels.of(node.workload, good).tries) == 3
    assert [job.count for job in builder.jobs if job.candidate == str(bad)] == [3, 1]
    assert any("build_crash" in note for note in notes)
    assert kernels.failures == {"build_crash": 1}


def test_one_schedule_of_several_that_crashes_the_compiler(
    node: KernelNode, store: RecordStore, tmp_path: Path
) -> None:
    """The first alone is tried before the candidate is given up."""

    def answer(job: KernelJob) -> BuildResult:
        return built(job) if job.count == 1 else BuildResult(Status.BUILD_TIMEOUT, None, "no result within 120 s")

    kernels, _ = lab(StubDevice(), StubBuilder(answer), store, tmp_path)
    kernels.measure([Request(node.workload, node.choices[0], 3)])
    known = kernels.of(node.workload, node.choices[0])
    assert not known.closed
    assert len(known.tries) == 1


@pytest.mark.parametrize("status", [Status.NO_DEVICE, Status.NO_TRACKER])
def test_a_device_that_is_gone_ends_the_run_and_is_not_recorded(
    node: KernelNode, store: RecordStore, tmp_path: Path, status: Status
) -> None:
    device = StubDevice(Measurement(status, (), "nobody answers"))
    kernels, _ = lab(device, StubBuilder(built), store, tmp_path)
    with pytest.raises(DeviceError, match="nobody answers"):
        kernels.measure([Request(node.workload, node.choices[0], 2)])
    assert not list(store.records())


def test_a_missing_linker_ends_the_run_and_is_not_recorded(
    node: KernelNode, store: RecordStore, tmp_path: Path
) -> None:
    """A record of it would outlive the linker's installation."""
    failure = BuildResult(Status.BUILD_ERROR, None, "ToolchainError: no C compiler found")
    kernels, _ = lab(StubDevice(), StubBuilder(lambda _: failure), store, tmp_path)
    with pytest.raises(ToolchainError, match="no C compiler found"):
        kernels.measure([Request(node.workload, node.choices[0], 2)])
    assert not list(store.records())


def test_what_is_known_is_not_measured_again(node: KernelNode, store: RecordStore, tmp_path: Path) -> None:
    first, _ = lab(StubDevice(), StubBuilder(built), store, tmp_path)
    first.measure([Request(node.workload, choice, 2) for choice in node.choices])
    assert first.measured == 2 * len(node.choices)
    builder = StubBuilder(built)
    second, _ = lab(StubDevice(), builder, store, tmp_path)
    second.measure([Request(node.workload, choice, 2) for choice in node.choices])
    assert second.measured == 0
    assert builder.jobs == []
    second.measure([Request(node.workload, node.choices[0], 3)])
    assert second.measured == 1
    assert [len(job.known) for job in builder.jobs] == [2]


def test_a_stop_finishes_the_measurement_in_flight_only(node: KernelNode, store: RecordStore, tmp_path: Path) -> None:
    budget = Budget()

    class Stopping(StubDevice):
        def time_kernels(self, path: str, calls: Sequence[Any], *, repeat: int) -> list[Measurement]:
            budget.interrupt()
            return super().time_kernels(path, calls, repeat=repeat)

    device = Stopping()
    kernels, _ = lab(device, StubBuilder(built), store, tmp_path, budget)
    kernels.measure([Request(node.workload, choice, 2) for choice in node.choices])
    assert kernels.measured == device.timed == 2
    assert len(list(store.records())) == 2


def test_workloads_are_described_in_the_store_whether_measured_now_or_before(
    node: KernelNode, store: RecordStore, tmp_path: Path
) -> None:
    first, _ = lab(StubDevice(), StubBuilder(built), store, tmp_path)
    first.measure([Request(node.workload, c, 1) for c in node.choices])
    assert store.workload_facts() == {node.workload.key: node.workload.facts}
    with RecordStore(tmp_path / "older.sqlite") as older:
        older.add(*store.records())
        second, _ = lab(StubDevice(), StubBuilder(built), older, tmp_path)
        second.measure([Request(node.workload, c, 1) for c in node.choices])
        assert second.measured == 0
        assert older.workload_facts() == store.workload_facts()
