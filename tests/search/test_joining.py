"""When a plan gets its pairs of kernels: within the whole model, and in a whole run. No clock decides."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from layoutsearch.layout.space import parse_space
from layoutsearch.measure.records import RecordStore
from layoutsearch.plan.plan import LayoutPlan, PlanFusion
from layoutsearch.schedule import Schedule
from layoutsearch.search import pairs, variants
from layoutsearch.search.budget import Budget
from layoutsearch.search.finals import WholeTimes, plan_digest
from layoutsearch.search.joining import STAGE, Joining
from layoutsearch.search.pairs import PairTimes, PairWork, join_candidates
from layoutsearch.search.reporter import Silent
from layoutsearch.search.tune import TuneOptions, run_tune
from layoutsearch.search.variants import Variant
from layoutsearch.search.whole import Built
from tests.models import nets
from tests.plan.test_pairs import SPACE
from tests.search.pair_case import APART_US, CONTEXT, Case, schedule, text, took


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


def improved(case: Case, made: Joining, reserve_s: float = 0.0) -> dict[str, Variant]:
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


def test_a_model_with_depthwise_convolutions_keeps_time_for_pairs(case: Case, store: RecordStore) -> None:
    assert len(join_candidates(case.graph, case.nodes)) == 6
    assert joining(case, StubTimer(), StubWhole(1.0), store).wanted_s > 0


@pytest.mark.slow
def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ships has the pairs, says so, and a run that follows has nothing to measure. Every pair is called faster."""
    monkeypatch.setattr(pairs, "_LEAST_GAIN", -1e3)
    monkeypatch.setattr(pairs, "_ERRORS", 0.0)
    compared = variants.compare
    monkeypatch.setattr(variants, "compare", lambda *a, **k: replace(compared(*a, **k), accepted=True))
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
