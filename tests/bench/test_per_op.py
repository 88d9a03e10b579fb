"""Kernels against a device: shares, bounds and groups from times that are given; tables, JSON and plots of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from layoutsearch.bench.per_op import DENSE, DEPTHWISE, OTHER, POINTWISE, TRANSPOSED, KernelTime, PerOp, kernel_times
from layoutsearch.bench.per_op_report import as_json, by_time, per_op_table, summary
from layoutsearch.bench.roofline import check_output, plot_roofline
from layoutsearch.errors import LayoutSearchError
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.facts import ConvFacts, KernelFacts, OperandFacts
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.transform import TransformKey
from layoutsearch.measure.in_situ import StepTimes
from layoutsearch.measure.profile import PROFILE_VERSION, DeviceProfile, MemoryLevel
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.plan.steps import PlanStep
from tests.models import nets
from tests.models.plans import make_plan
from tests.models.running import native_target

PROFILE = DeviceProfile(
    PROFILE_VERSION,
    "board",
    "cpu",
    (),
    2,
    {"float32": 100.0},
    (
        MemoryLevel("l1", 64 << 10, 400.0),
        MemoryLevel("l2", 1 << 20, 100.0),
        MemoryLevel("l3", 16 << 20, 40.0),
        MemoryLevel("memory", 0, 10.0),
    ),
    2.0,
    1.0,
    "2030-01-02",
    least_call_us=0.5,
)
CIN, COUT, H, W = 24, 40, 6, 10


def conv(kind: str, kernel: int, choice: Candidate) -> PlanStep:
    """A convolution of 24 to 40 channels on 6x10 pixels."""
    geometry = ConvFacts(1, CIN, COUT, (kernel, kernel), (1, 1), (1, 1), 1, (H, W), (H, W))
    weights = OperandFacts((COUT, CIN, kernel, kernel), "OIHW", "float32", True)
    facts = KernelFacts(
        kind,
        ("relu",),
        (OperandFacts((1, CIN, H, W), "NCHW", "float32"), weights),
        (OperandFacts((1, COUT, H, W), "NCHW", "float32"),),
        geometry,
        (1, 1),
        2 * H * W * CIN * COUT * kernel * kernel,
        footprint=1 << 16,
    )
    return PlanStep("fused", (f"{kind}:{kernel}", "relu:0"), choice, facts)


NHWC = Candidate.of("NHWC", "HWIO")
WINOGRAD = Candidate.of("NHWC", "HWIO", algorithm="winograd4")
MOVE = PlanStep(
    "move", tensor="x", transform=TransformKey((1, CIN, H, W), "NCHW", "float32", Layout("NCHW"), Layout("NHWC"))
)
STEPS = (
    conv("conv2d", 3, NHWC),
    conv("conv2d", 3, WINOGRAD),
    conv("conv2d_pointwise", 1, NHWC),
    conv("conv2d_depthwise", 3, NHWC),
    conv("conv2d_transpose", 2, NHWC),
    conv("conv2d", 5, NHWC),
    MOVE,
    PlanStep("alien"),
)


@pytest.fixture(scope="module")
def plan() -> LayoutPlan:
    return make_plan(nets.build((1, 8, 6, 10), body=lambda n, x: n.conv_relu(x, 12)), native_target())


def times(*us: float) -> StepTimes:
    return StepTimes(tuple((u, u, u) for u in us), (sum(us) * 1.1,), 0.4, (70.0, 80.0, 90.0))


def found(plan: LayoutPlan, profile: DeviceProfile | None, notes: tuple[str, ...] = ()) -> PerOp:
    taken = times(*(80.0 - n for n in range(len(STEPS))))
    return PerOp("net", 2, kernel_times(STEPS, taken, plan, profile), taken, profile, notes)


def test_rates_and_shares(plan: LayoutPlan) -> None:
    kernels = found(plan, PROFILE).kernels
    direct, winograd = kernels[:2]
    flops = 2 * H * W * CIN * COUT * 9
    assert direct.flops == winograd.flops == flops
    assert direct.gflops == pytest.approx(flops / 80e3)
    assert direct.share_of_peak == pytest.approx(flops / 80e3 / 100)
    assert direct.share_of_reached == pytest.approx(flops / 80e3 / 80)
    assert direct.roof is not None
    assert direct.roof.name == "compute"
    # What a call costs comes on top of the operations.
    assert direct.roof.us == pytest.approx(flops / 100e3 + 0.5)
    assert direct.share_of_roof == pytest.approx(direct.roof.us / 80)
    # Fewer products, more weights; the same operations in the rate.
    assert winograd.roof is not None
    assert winograd.roof.us < direct.roof.us
    assert winograd.weight_bytes == direct.weight_bytes * 36 / 9
    assert direct.activation_bytes == 4 * H * W * (CIN + COUT)


def test_groups(plan: LayoutPlan) -> None:
    kernels = found(plan, PROFILE).kernels
    assert [k.group for k in kernels] == [DENSE, DENSE, POINTWISE, DEPTHWISE, TRANSPOSED, OTHER, OTHER, OTHER]


def test_a_transform_moves_its_tensor_twice(plan: LayoutPlan) -> None:
    move = found(plan, PROFILE).kernels[6]
    assert (move.kind, move.layouts, move.ops) == ("transform", "NCHW->NHWC", ("x",))
    assert move.activation_bytes == 2 * 4 * CIN * H * W
    assert (move.flops, move.share_of_peak, move.share_of_reached) == (0, None, None)
    assert (move.in_place, move.share_in_place) == (None, None)
    assert move.roof is not None
    assert move.roof.name == "call"


def test_times_alone_are_those_of_the_plan(plan: LayoutPlan) -> None:
    root = next(op for op in plan.ops if op.fused_into is None)
    step = PlanStep("fused", (root.id,), root.choice, STEPS[0].facts)
    one, other = kernel_times((step, STEPS[0]), times(2.0, 3.0), plan, None)
    assert one.alone_us == root.measured_us == 1.5
    assert other.alone_us is None


def test_without_a_profile_there_are_times_only(plan: LayoutPlan) -> None:
    for kernel in found(plan, None).kernels:
        assert (kernel.share_of_peak, kernel.roof, kernel.share_of_roof) == (None, None, None)
        assert (kernel.in_place, kernel.share_in_place) == (None, None)
        assert kernel.us > 0


def test_json_and_table(plan: LayoutPlan) -> None:
    result = found(plan, PROFILE)
    data = json.loads(json.dumps(as_json(result)))
    assert [k["step"] for k in data["kernels"]] == list(range(len(STEPS)))
    assert data["sum_us"] == pytest.approx(result.times.sum_us)
    assert data["sum_over_whole"] == pytest.approx(1 / 1.1, abs=1e-4)
    assert data["profile"]["key"] == "board"
    assert per_op_table(result).row_count == len(STEPS)
    text = " ".join(summary(result))
    assert "direct convolution" in text
    assert "'board'" in text
    direct_only = replace(result, kernels=(result.kernels[0],))
    assert "Winograd" not in " ".join(summary(direct_only))


def test_the_longest_comes_first(plan: LayoutPlan) -> None:
    kernels = kernel_times(STEPS[:3], times(1.0, 3.0, 2.0), plan, None)
    result = replace(found(plan, None), kernels=kernels)
    assert [k.step for k in by_time(result)] == [1, 2, 0]


@pytest.mark.parametrize("name", ["plot.png", "plot.svg", "plot.PNG"])
def test_a_roofline_is_drawn(plan: LayoutPlan, tmp_path: Path, name: str) -> None:
    path = check_output(tmp_path / name)
    plot_roofline(found(plan, PROFILE), path)
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    "change", [lambda p: replace(p, levels=p.levels[-1:]), lambda p: replace(p, levels=p.levels * 2)]
)
def test_a_roofline_of_a_device_with_other_levels(
    plan: LayoutPlan, tmp_path: Path, change: Callable[[DeviceProfile], DeviceProfile]
) -> None:  # fmt: skip
    plot_roofline(found(plan, change(PROFILE)), tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").exists()


def test_a_roofline_of_kernels_that_compute_nothing(plan: LayoutPlan, tmp_path: Path) -> None:
    kernels: tuple[KernelTime, ...] = kernel_times((MOVE,), times(2.0), plan, PROFILE)
    plot_roofline(replace(found(plan, PROFILE), kernels=kernels), tmp_path / "plot.svg")


def test_a_roofline_without_a_profile_says_why(plan: LayoutPlan, tmp_path: Path) -> None:
    with pytest.raises(LayoutSearchError, match="run calibrate"):
        plot_roofline(found(plan, None, ("run calibrate",)), tmp_path / "plot.png")


@pytest.mark.parametrize(("name", "why"), [("plot.pdf", "ends in"), ("plot", "ends in"), ("no/plot.png", "no folder")])
def test_what_cannot_be_written_is_refused(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(LayoutSearchError, match=why):
        check_output(tmp_path / name)
