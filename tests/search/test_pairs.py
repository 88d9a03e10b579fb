"""Pairs of kernels: which there are, how they are timed and recorded, and when a plan gets them. No clock decides."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from layoutsearch.errors import DeviceError, ToolchainError
from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidates import enumerate_candidates
from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.layout.space import load_space, parse_space
from layoutsearch.measure.builder import BuildResult
from layoutsearch.measure.kernels import KernelCall
from layoutsearch.measure.records import RecordContext, RecordStore, canonical_json
from layoutsearch.measure.results import Measurement, Status
from layoutsearch.model.canonicalize import canonicalize
from layoutsearch.plan.plan import LayoutPlan, PlanFusion
from layoutsearch.schedule import Schedule
from layoutsearch.search import joining as joining_module
from layoutsearch.search import pair_lab, pairs
from layoutsearch.search.budget import Budget
from layoutsearch.search.finals import WholeTimes, plan_digest
from layoutsearch.search.jobs import function_name
from layoutsearch.search.joining import STAGE, Joined, Joining
from layoutsearch.search.pair_jobs import APART, BuiltPair, PairJob, build_pair
from layoutsearch.search.pair_lab import PairLab
from layoutsearch.search.pairs import PairTimes, PairWork, chosen, join_candidates, pairs_of
from layoutsearch.search.reporter import NoteKeeper, Silent
from layoutsearch.search.setup import template_versions
from layoutsearch.search.tune import TuneOptions, run_tune
from layoutsearch.search.whole import Built
from layoutsearch.search.workloads import KernelNode, kernel_nodes
from layoutsearch.targets import local_target
from tests.models import nets
from tests.models.plans import make_plan
from tests.models.running import native_target
from tests.plan.test_pairs import SPACE

CONTEXT = RecordContext("target", "local", "cpu", 2, "tvm", "templates")


def schedule(rows: int) -> Schedule:
    return Schedule.make("depthwise_pointwise", rows=rows, tile=4, vectors=1, dw_tile=3, dw_vectors=1)


def text(rows: int) -> str:
    return canonical_json(schedule(rows).to_json())


def took(*us: float) -> Measurement:
    return Measurement(Status.OK, us)


class Case:
    """A model with a plan in one layout."""

    def __init__(self, module: tvm.IRModule, layout: str, folder: Path) -> None:
        path = folder / "space.toml"
        path.write_text(SPACE.format(layout=layout, block=8))
        canonical = canonicalize(module)
        self.graph: LayoutGraph = build_graph(canonical)
        spaces = enumerate_candidates(self.graph, load_space(path))
        self.nodes: tuple[KernelNode, ...] = kernel_nodes(canonical, self.graph, spaces)
        plan = make_plan(module, native_target(), space=path)
        # Equal kernels of a plan have equal schedules, which are drawn here.
        first: dict[str, Schedule | None] = {}
        self.plan: LayoutPlan = replace(
            plan,
            ops=tuple(
                replace(op, schedule=first.setdefault(op.workload, op.schedule)) if op.schedule else op
                for op in plan.ops
            ),
        )

    def works(self, plan: LayoutPlan | None = None) -> list[PairWork]:
        return pairs_of(plan or self.plan, self.graph, self.nodes)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(nets.inverted_residuals(), "NHWC", tmp_path_factory.mktemp("case"))


# Which pairs there are.


def test_equal_pairs_are_measured_once(case: Case) -> None:
    works = case.works()
    assert [len(work.ops) for work in works] == [2, 1]
    kinds = {op.id: op.kind for op in case.plan.ops}
    for first, second in (pair for work in works for pair in work.ops):
        assert (kinds[first], kinds[second]) == ("conv2d_depthwise", "conv2d_pointwise")
    assert len({work.key for work in works}) == 2


def test_the_key_is_of_the_kernels_apart_too(case: Case) -> None:
    first = case.works()[0].ops[0][0]
    other = Schedule.make("channels", tile=2, vectors=1, reduce="taps_outer", outer="rows")
    ops = tuple(replace(op, schedule=other) if op.id == first else op for op in case.plan.ops)
    keys = {work.key for work in case.works(replace(case.plan, ops=ops))}
    assert len(keys) == 3
    assert len(keys & {work.key for work in case.works()}) == 2


def test_no_pairs_without_channels_innermost(tmp_path: Path) -> None:
    assert Case(nets.inverted_residuals(), "NCHW", tmp_path).works() == []
    assert len(Case(nets.inverted_residuals(), "NCHW{b}c", tmp_path).works()) == 2


def test_no_pair_across_a_transform(case: Case) -> None:
    from layoutsearch.layout.candidate import Candidate

    blocked = {
        op.id: Candidate.of("NCHW8c", "OIHW8i8o") for op in case.plan.ops if op.kind == "conv2d_pointwise" and op.choice
    }
    ops = tuple(replace(op, choice=blocked.get(op.id, op.choice)) for op in case.plan.ops)
    assert case.works(replace(case.plan, ops=ops)) == []


@pytest.mark.parametrize(
    "body",
    [
        lambda n, x: relax.Tuple([n.conv(y := n.depthwise(n.conv(x, 16, 1)), 24, 1), n.conv(y, 8, 3)]),
        lambda n, x: relax.Tuple([n.conv(y := n.depthwise(n.conv(x, 16, 1)), 24, 1), y]),
        lambda n, x: n.conv(n.depthwise(n.conv(x, 16, 1)), 24, 1, stride=2),
        lambda n, x: n.conv(n.depthwise(n.conv(x, 16, 1)), 24, 3),
        lambda n, x: n.conv(n.conv(n.conv(x, 16, 1), 16, 3), 24, 1),
        lambda n, x: n.emit(relax.op.nn.max_pool2d(n.depthwise(n.conv(x, 16, 1)), 2)),
    ],
    ids=["read twice", "an output", "strided", "3x3", "dense", "no second"],
)
def test_no_pair(body: Callable[..., relax.Expr], tmp_path: Path) -> None:
    assert Case(nets.build((1, 8, 8, 10), body=body), "NHWC", tmp_path).works() == []


def test_a_model_with_depthwise_convolutions_keeps_time_for_pairs(case: Case, store: RecordStore) -> None:
    assert len(join_candidates(case.graph, case.nodes)) == 3
    assert joining(case, StubTimer(), StubWhole(1.0), store).wanted_s > 0


# Which are taken.

APART_US = (took(10.0, 10.2, 9.8, 10.0), took(30.0, 30.3, 29.7, 30.0))


@pytest.mark.parametrize(
    ("joined", "wanted"),
    [
        ({1: took(35.0, 35.2, 34.9, 35.1), 2: took(33.0, 33.2, 32.8, 33.1)}, 2),
        ({1: took(39.9, 40.1, 39.8, 40.0)}, None),  # no gain
        ({1: took(39.5, 39.5, 39.5, 39.5)}, None),  # less than is worth it
        ({1: took(20.0, 60.0, 22.0, 45.0)}, None),  # within its own spread
        ({1: Measurement(Status.CRASH, (), "died"), 2: took(33.0, 33.2, 32.8, 33.1)}, 2),
        ({1: Measurement(Status.CRASH, (), "died")}, None),
        ({}, None),
    ],
)
def test_a_pair_is_taken_where_it_is_clearly_faster(
    case: Case, joined: dict[int, Measurement], wanted: int | None
) -> None:
    works = case.works()
    times = {works[0].key: PairTimes(APART_US, {text(rows): m for rows, m in joined.items()})}
    found = chosen(works, times)
    assert [(f.first, f.second) for f in found] == (list(works[0].ops) if wanted else [])
    for fusion in found:
        assert fusion.schedule == schedule(wanted or 0)
        assert fusion.measured_us == pytest.approx(33.025)
        assert fusion.apart_us == pytest.approx(40.0)


def test_no_pair_where_one_of_the_two_fails(case: Case) -> None:
    works = case.works()
    broken = (APART_US[0], Measurement(Status.TIMEOUT, (), "hangs"))
    assert chosen(works, {works[0].key: PairTimes(broken, {text(1): took(1.0, 1.0)})}) == ()
    assert chosen(works, {}) == ()


# The lab.


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


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RecordStore]:
    with RecordStore(tmp_path / "records.sqlite") as store:
        yield store


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
    work = case.works()[0]
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
    assert {record.context.template for record in store.records()} == {"templates depthwise_pointwise1.0"}
    assert "depthwise_pointwise" not in template_versions()


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
    assert len(builder.jobs) == 1
    assert set(resumed) == {work.key for work in works}
    assert chosen(works, resumed) == chosen(works, lab(store, tmp_path)[0].measure(works, 0.0))


def test_failures_are_records(case: Case, store: RecordStore, tmp_path: Path) -> None:
    works = case.works()
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


def test_what_is_built(case: Case, tmp_path: Path, store: RecordStore) -> None:
    """The real job: as many schedules as were asked for, and the two kernels as the plan has them."""
    work = case.works()[0]
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


# Within the model.


class StubTimer:
    """Knows the first pair of a plan to be faster as one kernel."""

    def __init__(self, knows: int = 99) -> None:
        self.asked: list[str] = []
        self.knows = knows

    def measure(self, works: Sequence[PairWork], reserve_s: float) -> dict[str, PairTimes]:
        self.asked += [work.key for work in works]
        faster = PairTimes(APART_US, {text(1): took(30.0, 30.1, 29.9, 30.0)})
        slower = PairTimes(APART_US, {text(1): took(50.0, 50.1, 49.9, 50.0)})
        return {work.key: slower if i else faster for i, work in enumerate(works[: self.knows])}


class StubWhole:
    """Plans with pairs take `ratio` of the time of those without."""

    weights, once_s = "weights", 0.0

    def __init__(self, ratio: float, fails: bool = False) -> None:
        self.ratio, self.fails = ratio, fails
        self.plans: dict[str, LayoutPlan] = {}
        self.timed = 0

    def build(self, plans: Mapping[str, LayoutPlan]) -> dict[str, Built]:
        self.plans.update(plans)
        return {} if self.fails else {label: Built(f"{label}.so", 1e-7) for label in plans}

    def time(
        self, built: Mapping[str, Built], rounds: int, seed: int, starts: int = 1, finish: bool = False
    ) -> dict[str, tuple[float, ...]]:
        self.timed += 1
        rng = np.random.default_rng(seed)
        us = {label: 100.0 * (self.ratio if "with pairs" in label else 1.0) for label in built}
        return {label: tuple(us[label] * rng.uniform(0.995, 1.005, size=rounds)) for label in built}


def joining(
    case: Case, timer: StubTimer, whole: StubWhole, store: RecordStore, budget: Budget | None = None
) -> Joining:
    times = WholeTimes(store, CONTEXT, "model", "weights")
    return Joining(timer, case.graph, case.nodes, whole, times, budget or Budget(), Silent())


def improved(case: Case, made: Joining, reserve_s: float = 0.0) -> dict[str, Joined]:
    stem = next(op for op in case.plan.ops if op.kind == "conv2d")
    other = replace(stem, schedule=Schedule.make("channels", tile=1, vectors=1, reduce="taps_inner", outer="rows"))
    ops = tuple(other if op is stem else op for op in case.plan.ops)
    plans = {"uniform NHWC": case.plan, "assignment 1": replace(case.plan, ops=ops)}
    return made.improve(plans, {label: Built(f"{label}.so", 1e-7) for label in plans}, 0, reserve_s)


def test_baseline_and_challenger_alike_get_their_pairs(case: Case, store: RecordStore) -> None:
    timer, whole = StubTimer(), StubWhole(0.9)
    made = joining(case, timer, whole, store)
    found = improved(case, made)
    assert set(found) == {"uniform NHWC", "assignment 1"}
    for joined in found.values():
        assert [(f.first, f.second) for f in joined.plan.fusions] == list(case.works()[0].ops)
        assert joined.speedup == pytest.approx(1 / 0.9, rel=0.01)
        assert joined.built.path.endswith("with pairs.so")
        assert np.median(joined.samples) == pytest.approx(90.0, rel=0.01)
    assert whole.timed == 1
    assert made.is_complete


@pytest.mark.parametrize("ratio", [1.0, 1.05])
def test_the_whole_model_has_the_last_word(case: Case, store: RecordStore, ratio: float) -> None:
    made = joining(case, StubTimer(), StubWhole(ratio), store)
    assert improved(case, made) == {}
    assert made.is_complete


def test_a_resumed_run_reads_what_was_timed(case: Case, store: RecordStore) -> None:
    first = improved(case, joining(case, StubTimer(), StubWhole(0.9), store))
    whole = StubWhole(1.1)
    again = improved(case, joining(case, StubTimer(), whole, store))
    assert again == first
    assert whole.timed == 0
    assert len(list(WholeTimes(store, CONTEXT, "model", "weights").runs(STAGE))) == 1


def test_what_does_not_build_is_left_out(case: Case, store: RecordStore) -> None:
    whole = StubWhole(0.9, fails=True)
    assert improved(case, joining(case, StubTimer(), whole, store)) == {}
    assert whole.timed == 0


def test_without_time_nothing_is_begun(case: Case, store: RecordStore) -> None:
    timer, whole = StubTimer(), StubWhole(0.9)
    made = joining(case, timer, whole, store, Budget(100.0))
    assert improved(case, made, 90.0) == {}
    assert not made.is_complete
    assert (timer.asked, whole.plans) == ([], {})


def test_pairs_that_there_was_no_time_for_are_tried_by_the_next_run(case: Case, store: RecordStore) -> None:
    made = joining(case, StubTimer(knows=1), StubWhole(0.9), store)
    assert len(improved(case, made)) == 2
    assert not made.is_complete


def test_a_model_without_pairs(tmp_path: Path, store: RecordStore) -> None:
    timer = StubTimer()
    made = joining(Case(nets.residual(), "NHWC", tmp_path), timer, StubWhole(0.9), store)
    assert improved(Case(nets.residual(), "NHWC", tmp_path), made) == {}
    assert timer.asked == []
    assert made.wanted_s == 0.0


@pytest.mark.slow
def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ships has the pairs, says so, and a run that follows has nothing to measure. Every pair is called faster."""
    monkeypatch.setattr(pairs, "_LEAST_GAIN", -1e3)
    monkeypatch.setattr(pairs, "_ERRORS", 0.0)
    compared = joining_module.compare
    monkeypatch.setattr(joining_module, "compare", lambda *a, **k: replace(compared(*a, **k), accepted=True))
    space = parse_space(SPACE.format(layout="NHWC", block=8), "test")
    # Too short to calibrate the device, long enough for all else.
    options = TuneOptions(space=space, trials=1, threads=1, time_budget_s=120.0, out=tmp_path / "out")
    result = run_tune(nets.depthwise_separable(), options)
    assert result.plan is not None
    assert len(result.plan.fusions) == 1
    assert "1 pairs of kernels" in result.note
    assert LayoutPlan.load(tmp_path / "out" / "plan.json") == result.plan
    assert LayoutPlan.load(tmp_path / "out" / "uniform" / "NHWC.json").fusions == result.plan.fusions
    assert result.plan.validation["plan_us"]["rounds"] == 36
    assert result.plan.validation["max_rel_error"] < 1e-5
    again = run_tune(nets.depthwise_separable(), options)
    assert again.plan == result.plan


def test_digests_of_plans(case: Case) -> None:
    """Those without pairs are as before there were pairs, or what was timed would be timed again."""
    before = [(op.id, op.choice, op.schedule) for op in case.plan.ops]
    assert plan_digest(case.plan) == hashlib.sha256(repr(before).encode()).hexdigest()[:20]
    first, second = case.works()[0].ops[0]
    digests = {plan_digest(replace(case.plan, fusions=(PlanFusion(first, second, schedule(n)),))) for n in (1, 2)}
    assert len({*digests, plan_digest(case.plan)}) == 3
    timed = PlanFusion(first, second, schedule(1), 1.0, 2.0)
    assert plan_digest(replace(case.plan, fusions=(timed,))) in digests
    assert pairs.chosen([], {}) == ()
