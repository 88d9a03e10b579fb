"""Schedules that MetaSchedule proposes for the project's kernels: built, right, recorded, and resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidate import choice_text
from layoutsearch.layout.candidates import enumerate_candidates
from layoutsearch.layout.space import parse_space
from layoutsearch.measure.builder import Builder, BuildResult
from layoutsearch.measure.device import Device
from layoutsearch.measure.records import RecordContext, RecordStore
from layoutsearch.measure.results import Measurement, Status
from layoutsearch.model.canonicalize import canonicalize
from layoutsearch.plan.apply import target_json
from layoutsearch.schedule import Schedule, apply
from layoutsearch.search.budget import Budget
from layoutsearch.search.jobs import KERNELS, BuiltKernels, KernelJob, lowered_kernel
from layoutsearch.search.kernels import KernelLab
from layoutsearch.search.known import Known, Request
from layoutsearch.search.proposals import PROPOSE, ProposalJob, propose
from layoutsearch.search.reporter import NoteKeeper, Silent
from layoutsearch.search.tuners import NO_MORE, KernelTuner, is_proposed
from layoutsearch.search.workloads import KernelNode, kernel_nodes
from tests.cli.running import SPACE
from tests.models.plans import two_in_three_out
from tests.models.running import native_target
from tests.schedule import kernels as k

TARGET = target_json(native_target())
CONTEXT = RecordContext("target", "local", "cpu", 2, "tvm", "templates")
ARGS = (((4,), "float32"),) * 6


@pytest.fixture(scope="module")
def nodes() -> dict[str, KernelNode]:
    """A convolution with a template, and a pooling without one."""
    canonical = canonicalize(two_in_three_out())
    graph = build_graph(canonical)
    found = kernel_nodes(canonical, graph, enumerate_candidates(graph, parse_space(SPACE, "test")))
    kinds = {node.workload.facts.kind: node for node in found}
    return {"conv": kinds["conv2d"], "pool": kinds["max_pool2d"]}


def job(node: KernelNode, output: Path) -> KernelJob:
    w = node.workload
    return KernelJob(
        w.module_json, w.axes, w.members, choice_text(node.choices[0]), TARGET, 2, (), 4, str(output)
    )  # fmt: skip


def lab(device: Any, builder: Any, store: RecordStore, folder: Path, tuner: KernelTuner) -> tuple[KernelLab, list[str]]:
    reporter = NoteKeeper(Silent())
    made = KernelLab(device, builder, store, CONTEXT, TARGET, folder, Budget(), reporter, tuner=tuner)
    return made, reporter.notes


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RecordStore]:
    with RecordStore(tmp_path / "records.sqlite") as store:
        yield store


@pytest.mark.slow
@pytest.mark.parametrize("which", ["conv", "pool"])
def test_proposals_are_new_and_right(nodes: dict[str, KernelNode], which: str, tmp_path: Path) -> None:
    kernel = job(nodes[which], tmp_path / "k.so")
    first = propose(ProposalJob(kernel, (), 5))
    assert len(set(first)) == len(first) == 5
    assert propose(ProposalJob(kernel, (), 5)) == first
    # Nine measured ones are enough for a cost model.
    second = propose(ProposalJob(kernel, (), 9))
    measured = tuple((text, 10.0 + i if i != 3 else float("inf")) for i, text in enumerate(second))
    more = propose(ProposalJob(kernel, measured, 3))
    assert len(more) == 3
    assert not set(more) & set(second)
    func = lowered_kernel(kernel)
    draw = np.random.default_rng(0)
    shapes = [tuple(int(s) for s in p.ty.shape) for p in func.params[:-1]]
    inputs = [draw.normal(size=s).astype("float32") for s in shapes]
    want = k.run(apply(func, _template(func), k.INFO), inputs)[0]
    for text in (first[0], more[0]):
        k.close(k.run(apply(func, Schedule.from_json(json.loads(text)), k.INFO), inputs)[0], want, 1e-5)


def _template(func: Any) -> Schedule:
    return k.candidates(func, k.INFO)[0]


@pytest.mark.slow
def test_a_race_on_a_device_is_recorded_and_known_again(
    nodes: dict[str, KernelNode], store: RecordStore, tmp_path: Path
) -> None:
    requests = [Request(node.workload, node.choices[0], 4) for node in nodes.values()]
    with Device.local(threads=2) as device, Builder(workers=2, preload=("layoutsearch.search.jobs",)) as builder:
        kernels, notes = lab(device, builder, store, tmp_path, KernelTuner.BOTH)
        kernels.measure(requests)
        kernels.refine([replace(r, tries=2) for r in requests], 9)
    assert notes == []
    for request in requests:
        known = kernels.of(request.workload, request.choice)
        assert not known.closed
        assert len(known.tries) == 4
        assert sum(map(is_proposed, known.tries)) in (2, 3)
        assert all(m.ok for m in known.tries.values())
    again, _ = lab(None, None, store, tmp_path, KernelTuner.BOTH)
    again.measure(requests)
    assert again.measured == 0
    for request in requests:
        assert again.of(request.workload, request.choice) == kernels.of(request.workload, request.choice)


class Stub:
    """Builds and proposes at once; `proposal` and `build` may fail."""

    def __init__(self, template: str = "loops") -> None:
        self.template = template
        self.asked: list[int] = []
        self.broken: set[str] = set()
        self.failure: BuildResult | None = None
        self.supply = 100

    def submit(self, function: str, payload: Any, timeout_s: float) -> Future[BuildResult]:
        future: Future[BuildResult] = Future()
        future.set_result(self._propose(payload) if function == PROPOSE else self._build(payload))
        assert function in (PROPOSE, KERNELS)
        return future

    def _propose(self, payload: ProposalJob) -> BuildResult:
        self.asked.append(payload.count)
        if self.failure is not None:
            return self.failure
        done = len(payload.measured)
        count = min(payload.count, self.supply - done)
        return BuildResult(Status.OK, tuple(_named("metaschedule", done + i) for i in range(count)))

    def _build(self, payload: KernelJob) -> BuildResult:
        if self.broken & set(payload.only):
            return BuildResult(Status.BUILD_CRASH, None, "killed by SIGSEGV")
        Path(payload.output).touch()
        names = payload.only or (_named(self.template, 0),)
        return BuildResult(Status.OK, BuiltKernels(payload.output, names, ARGS, (), not payload.only))


class Clock:
    """Times every kernel alike."""

    def time_kernels(self, path: str, calls: Sequence[Any], *, repeat: int) -> list[Measurement]:
        return [Measurement(Status.OK, (5.0, 5.0))] * len(calls)


def _named(template: str, number: int) -> str:
    return f'{{"params":{{"n":{number}}},"template":"{template}","version":1}}'


def measured(stub: Stub, node: KernelNode, store: RecordStore, folder: Path, tries: int, tuner: str) -> Known:
    kernels, _ = lab(Clock(), stub, store, folder, KernelTuner.named(tuner))
    kernels.measure([Request(node.workload, node.choices[0], tries)])
    return kernels.of(node.workload, node.choices[0])


def test_generic_loops_are_tuned_on_by_metaschedule(
    nodes: dict[str, KernelNode], store: RecordStore, tmp_path: Path
) -> None:
    stub = Stub()
    known = measured(stub, nodes["pool"], store, tmp_path, 5, "metaschedule")
    assert [is_proposed(s) for s in known.tries] == [False, True, True, True, True]
    assert not known.closed
    # What a run with templates knew is no reason to stop, and the other way round.
    assert measured(Stub(), nodes["pool"], store, tmp_path, 5, "template").closed
    assert not measured(stub, nodes["pool"], store, tmp_path, 6, "metaschedule").closed
    assert stub.asked == [4, 1]


def test_kernels_with_a_template_are_left_to_it(
    nodes: dict[str, KernelNode], store: RecordStore, tmp_path: Path
) -> None:
    stub = Stub("channels")
    assert measured(stub, nodes["conv"], store, tmp_path, 5, "metaschedule").closed
    assert stub.asked == []


def test_a_search_that_finds_no_more(nodes: dict[str, KernelNode], store: RecordStore, tmp_path: Path) -> None:
    stub = Stub()
    stub.supply = 2
    known = measured(stub, nodes["pool"], store, tmp_path, 9, "both")
    assert known.closed
    assert known.reason == ""
    assert known.tries[NO_MORE].status is Status.INFEASIBLE
    assert sum(m.ok for m in known.tries.values()) == 3


def test_a_search_that_crashes_leaves_the_template(
    nodes: dict[str, KernelNode], store: RecordStore, tmp_path: Path
) -> None:
    stub = Stub()
    stub.failure = BuildResult(Status.BUILD_CRASH, None, "killed by SIGSEGV")
    known = measured(stub, nodes["pool"], store, tmp_path, 4, "both")
    assert known.closed
    assert known.tries[NO_MORE] == Measurement(Status.BUILD_CRASH, (), "killed by SIGSEGV")
    assert known.best_us < float("inf")


def test_a_proposal_that_crashes_the_compiler_is_a_record_of_its_own(
    nodes: dict[str, KernelNode], store: RecordStore, tmp_path: Path
) -> None:
    stub = Stub()
    stub.broken = {_named("metaschedule", 1)}
    known = measured(stub, nodes["pool"], store, tmp_path, 4, "both")
    assert sorted(m.status for m in known.tries.values()) == [Status.BUILD_CRASH, *[Status.OK] * 3]
    assert not known.closed
