"""When a plan has its work shared out anew: within the whole model, on a device, and in a whole run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm

from layoutsearch.layout.space import parse_space
from layoutsearch.measure.builder import Builder
from layoutsearch.measure.device import Device
from layoutsearch.measure.records import RecordStore
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.search import sharing_out, variants
from layoutsearch.search.budget import Budget
from layoutsearch.search.finals import WholeTimes
from layoutsearch.search.parts_lab import PartsLab
from layoutsearch.search.reporter import NoteKeeper, Silent
from layoutsearch.search.sharing import BY_CHANNELS, Parts, way_of
from layoutsearch.search.sharing_out import STAGE, SharingOut
from layoutsearch.search.tune import TuneOptions, run_tune
from layoutsearch.search.whole import Built, ModelSource
from tests.models import nets
from tests.plan.test_pairs import SPACE
from tests.search.pair_case import CONTEXT, Case
from tests.search.test_joining import StubWhole
from tests.search.test_sharing import PLENTY, Knows, all_in


class StubParts:
    """Depthwise convolutions by channels are fast, all else by rows, and a change of ways costs nothing."""

    def __init__(self, case: Case, knows: int = 99) -> None:
        self.nodes, self.graph, self.knows = case.nodes, case.graph, knows
        self.asked = 0

    def parts(self, plans: Mapping[str, LayoutPlan], reserve_s: float) -> dict[str, Parts]:
        self.asked += len(plans)
        roots = [self.graph.by_name[node.root].id for node in self.nodes]
        return {label: Parts(tuple(roots), self._us(plan, roots)) for label, plan in list(plans.items())[: self.knows]}

    def _us(self, plan: LayoutPlan, roots: list[str]) -> tuple[float, ...]:
        ops = {op.id: op for op in plan.ops}
        fast = {op.id: (way_of(op.schedule) == BY_CHANNELS) == (op.kind == "conv2d_depthwise") for op in plan.ops}
        return tuple(10.0 if root not in ops or fast[root] else 20.0 for root in roots)


class Faster(StubWhole):
    """What is shared out anew takes `ratio` of the time."""

    def time(
        self, built: Mapping[str, Built], rounds: int, seed: int, starts: int = 1, finish: bool = False
    ) -> dict[str, tuple[float, ...]]:
        self.timed += 1
        rng = np.random.default_rng(seed)
        us = {label: 100.0 * (self.ratio if "anew" in label else 1.0) for label in built}
        return {label: tuple(us[label] * rng.uniform(0.995, 1.005, size=rounds)) for label in built}


def sharing(
    case: Case,
    parts: StubParts,
    whole: Faster,
    store: RecordStore,
    budget: Budget | None = None,
    cached_bytes: float = PLENTY,
) -> tuple[SharingOut, list[str]]:
    times = WholeTimes(store, CONTEXT, "model", "weights")
    reporter = NoteKeeper(Silent())
    made = SharingOut(parts, case.graph, case.nodes, Knows(), cached_bytes, whole, times, budget or Budget(), reporter)
    return made, reporter.notes


def improve(case: Case, made: SharingOut, reserve_s: float = 0.0) -> dict[str, variants.Variant]:
    plans = {"uniform NHWC": all_in(case.plan, "channels"), "assignment 1": all_in(case.plan, "panels")}
    return made.improve(plans, {label: Built(f"{label}.so", 1e-7) for label in plans}, 0, reserve_s)


def test_baseline_and_challenger_alike(case: Case, store: RecordStore) -> None:
    parts, whole = StubParts(case), Faster(0.9)
    made, _ = sharing(case, parts, whole, store)
    found = improve(case, made)
    assert set(found) == {"uniform NHWC", "assignment 1"}
    assert parts.asked == 12
    for label, outer in (("uniform NHWC", "channels"), ("assignment 1", "panels")):
        assert found[label].speedup == pytest.approx(1 / 0.9, rel=0.01)
        for op in found[label].plan.ops:
            if op.kind.startswith("conv2d") and op.schedule is not None:
                assert op.schedule["outer"] == (outer if op.kind == "conv2d_depthwise" else "rows")
    assert whole.timed == 1
    assert made.is_complete


def test_the_whole_model_has_the_last_word(case: Case, store: RecordStore) -> None:
    made, _ = sharing(case, StubParts(case), Faster(1.0), store)
    assert improve(case, made) == {}
    assert made.is_complete


def test_what_is_best_already_is_not_built_again(case: Case, store: RecordStore) -> None:
    whole = Faster(0.9)
    made, _ = sharing(case, StubParts(case), whole, store)
    best = improve(case, made)["uniform NHWC"].plan
    whole.plans.clear()
    assert made.improve({"best": best}, {"best": Built("best.so", 0.0)}, 0, 0.0) == {}
    assert whole.plans == {}


def test_a_resumed_run_reads_what_was_timed(case: Case, store: RecordStore) -> None:
    first = improve(case, sharing(case, StubParts(case), Faster(0.9), store)[0])
    whole = Faster(1.1)
    assert improve(case, sharing(case, StubParts(case), whole, store)[0]) == first
    assert whole.timed == 0
    assert len(list(WholeTimes(store, CONTEXT, "model", "weights").runs(STAGE))) == 1


def test_without_time_nothing_is_begun(case: Case, store: RecordStore) -> None:
    parts, whole = StubParts(case), Faster(0.9)
    made, notes = sharing(case, parts, whole, store, Budget(100.0))
    assert improve(case, made, 90.0) == {}
    assert not made.is_complete
    assert (parts.asked, whole.plans) == (0, {})
    assert any("--time-budget" in note for note in notes)


def test_where_kernels_cannot_be_timed_nothing_is_changed(case: Case, store: RecordStore) -> None:
    made, _ = sharing(case, StubParts(case, knows=0), Faster(0.9), store)
    assert improve(case, made) == {}
    # There is nothing to wait for.
    assert made.is_complete


def test_a_model_with_nothing_in_caches(case: Case, store: RecordStore) -> None:
    parts = StubParts(case)
    made, _ = sharing(case, parts, Faster(0.9), store, cached_bytes=1.0)
    assert improve(case, made) == {}
    assert parts.asked == 0


def parts_lab(module: tvm.IRModule, folder: Path, device: Device, builder: Builder, budget: Budget) -> PartsLab:
    (folder / "model.json").write_text(tvm.ir.save_json(module))
    source = ModelSource(str(folder / "model.json"), True, "1", ())
    inputs = [np.random.default_rng(0).normal(size=(1, 8, 22, 18)).astype("float32")]
    return PartsLab(device, builder, source, inputs, folder, budget, Silent())


def test_on_a_device(case: Case, tmp_path: Path) -> None:
    """Every kernel of both plans in order; nothing stays on disk; without time there is nothing."""
    plans = {"one": case.plan, "two": all_in(case.plan, "rows")}
    with Device.local(threads=1) as device, Builder(workers=2) as builder:
        lab = parts_lab(nets.inverted_residuals(), tmp_path, device, builder, Budget())
        found = lab.parts(plans, 0.0)
        roots = [case.graph.by_name[node.root].id for node in case.nodes]
        for label in plans:
            assert [root for root in found[label].roots if root in roots] == roots
            assert len(found[label].us) == len(found[label].roots)
            assert all(us >= 0 for us in found[label].us)
        assert [path.name for path in tmp_path.iterdir()] == ["model.json"]
        late = parts_lab(nets.inverted_residuals(), tmp_path, device, builder, Budget(1.0))
        assert late.parts(plans, 10.0) == {}


def test_a_model_that_is_no_sequence_of_kernels(tmp_path: Path) -> None:
    """It returns its input as well."""
    from tvm import relax

    module = nets.build((1, 8, 6, 10), body=lambda n, x: relax.Tuple([n.conv(n.conv(x, 16, 3), 24, 3), x]))
    case = Case(module, "NHWC", tmp_path)
    with Device.local(threads=1) as device, Builder(workers=1) as builder:
        assert parts_lab(module, tmp_path, device, builder, Budget()).parts({"one": case.plan}, 0.0) == {}


@pytest.mark.slow
def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ships is as was found best, here all by channels, and is right. Every variant is called faster."""
    compared = variants.compare
    monkeypatch.setattr(variants, "compare", lambda *a, **k: replace(compared(*a, **k), accepted=True))
    monkeypatch.setattr(sharing_out, "best_ways", lambda order, count, observed: tuple((BY_CHANNELS,) * count))
    space = parse_space(SPACE.format(layout="NHWC", block=8), "test")
    options = TuneOptions(space=space, trials=1, threads=2, time_budget_s=120.0, out=tmp_path / "out")
    result = run_tune(nets.inverted_residuals(), options)
    assert result.plan is not None
    assert {way_of(op.schedule) for op in result.plan.ops if op.kind.startswith("conv2d")} <= {BY_CHANNELS, None}
    assert result.plan.validation["max_rel_error"] < 1e-5
    assert LayoutPlan.load(tmp_path / "out" / "plan.json") == result.plan
