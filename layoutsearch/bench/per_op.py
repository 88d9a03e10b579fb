"""`layoutsearch bench model --per-op`: each kernel within its model, against what the calibrated device can do."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import tvm

from layoutsearch.bench.compare import spread
from layoutsearch.bench.model import BUILD_S, check_runs_here, plan_job
from layoutsearch.cost.bounds import Bounds, Roof
from layoutsearch.cost.touched import extra_weight_bytes
from layoutsearch.errors import LayoutSearchError
from layoutsearch.layout.candidate import DIRECT
from layoutsearch.measure.builder import Builder
from layoutsearch.measure.calibrate import doubt, target_text
from layoutsearch.measure.device import Device
from layoutsearch.measure.in_situ import StepTimes, time_steps
from layoutsearch.measure.probes import build_peak
from layoutsearch.measure.profile import DeviceProfile, ProfileStore
from layoutsearch.model.samples import sample_inputs
from layoutsearch.plan.border import to_plan
from layoutsearch.plan.compile import load_for
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.plan.steps import PlanStep
from layoutsearch.schedule import TargetInfo
from layoutsearch.search.jobs import MARKED

POINTWISE, DEPTHWISE, DENSE, TRANSPOSED, OTHER = "pointwise", "depthwise", "dense 3x3", "transposed", "other"
PAIR = "depthwise and pointwise in one"
GROUPS = (POINTWISE, DEPTHWISE, PAIR, DENSE, TRANSPOSED, OTHER)
"""Kinds of kernels that plots tell apart."""
TRANSFORM = "transform"


@dataclass(frozen=True)
class KernelTime:
    """One call of a kernel.

    Attributes:
        step: its place in the model, from 0.
        function: its name in the library.
        ops: ids of its operators, root first; of a layout transform what it moves.
        kind: of the root, of both roots where two kernels became one; `transform` of a layout transform, empty where it
            is neither.
        group: one of `GROUPS`.
        layouts: candidate of the root, or the change of a transform; empty for a frozen operator.
        algorithm: of a convolution, else `direct`.
        flops: of the direct algorithm, whatever the kernel's is; a multiply-add counts two.
        weight_bytes: weights that it reads, as its algorithm stores them.
        activation_bytes: other tensors that it reads and writes.
        us: median within the model.
        spread: range of the middle half of the samples over the median.
        alone_us: what the plan says of the kernel timed alone; None where it does not.
        gflops: `flops` over `us`; None where it takes no measurable time.
        share_of_peak: of the calibrated peak, from 0; an algorithm that saves operations may exceed 1. None without a
            profile.
        share_of_reached: of what multiply-adds in registers reached between the runs, from 0; None without operations.
        roof: what bounds it within the model, whatever its schedule; None without a profile.
        in_place: what holds it where its operands lie, see `Bounds.kernel_in_place`; None without a profile, and for
            what is no kernel of operators.
    """

    step: int
    function: str
    ops: tuple[str, ...]
    kind: str
    group: str
    layouts: str
    algorithm: str
    flops: int
    weight_bytes: float
    activation_bytes: float
    us: float
    spread: float
    alone_us: float | None
    gflops: float | None
    share_of_peak: float | None
    share_of_reached: float | None
    roof: Roof | None
    in_place: Roof | None

    @property
    def share_in_place(self) -> float | None:
        """The part of `us` that what holds it in place accounts for."""
        return self.in_place.us / self.us if self.in_place is not None and self.us else None

    @property
    def share_of_roof(self) -> float | None:
        """The part of `us` that the bound accounts for; near 1 nothing is left to gain."""
        return self.roof.us / self.us if self.roof is not None and self.us else None

    @property
    def intensity(self) -> float:
        """Operations of the direct algorithm for each byte."""
        return self.flops / max(1.0, self.weight_bytes + self.activation_bytes)


@dataclass(frozen=True)
class PerOp:
    """A model in parts.

    Attributes:
        model: its name.
        threads: of a kernel.
        kernels: in the order in which they run.
        times: what was measured.
        profile: of the device; None where it is not calibrated.
        notes: what to tell about it, a line each.
    """

    model: str
    threads: int
    kernels: tuple[KernelTime, ...]
    times: StepTimes
    profile: DeviceProfile | None
    notes: tuple[str, ...]

    @property
    def reached_gflops(self) -> float | None:
        """Median of what multiply-adds in registers reached between the runs."""
        return statistics.median(self.times.peak_gflops) if self.times.peak_gflops else None

    @property
    def whole_us(self) -> float:
        """Median of the model without marks."""
        return statistics.median(self.times.whole_us)


def bench_per_op(
    model: str,
    plan_path: str,
    *,
    threads: int | None = None,
    starts: int = 3,
    rounds: int = 8,
    needs_profile: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> PerOp:
    """Time every kernel of a plan within the model, on this machine.

    Args:
        model: path of the model.
        plan_path: path of its plan.
        threads: of a kernel; the plan's by default.
        starts, rounds: see `time_steps`.
        needs_profile: whether a device that is not calibrated is an error.
        tell: is told how far it is.

    Raises:
        LayoutSearchError: the plan's kernels do not run in one sequence, or the device is not calibrated but must be.
        ProfileError: the device's profile cannot be read.
        PlanError: the plan does not belong to the model.
        RunFailed: the plan does not build or run.
    """
    plan = LayoutPlan.load(plan_path)
    check_runs_here(str(plan_path), plan)
    loaded = load_for(model, plan)
    count = threads or plan.threads
    path = str(Path(model).resolve())
    shapes = tuple((i.name, tuple(i.shape)) for i in loaded.inputs)
    with Device.local(count) as device, tempfile.TemporaryDirectory(prefix="layoutsearch-") as folder:
        profile, notes = _profile(device, plan)
        if profile is None and needs_profile:
            raise LayoutSearchError(notes[0])
        with Builder(workers=1) as builder:
            job = plan_job(path, shapes, plan, f"{folder}/plan.so")
            built = builder.submit(MARKED, job, 2 * BUILD_S).result().get()
        target = tvm.target.Target(dict(plan.target))
        probe = f"{folder}/peak.so"
        if built.steps is None:
            raise LayoutSearchError(
                f"per-operator times are not available for {loaded.name}: its main is no plain sequence of kernels "
                "(it returns an input or a view, or calls something else); leave --per-op out for the whole time"
            )
        times = time_steps(
            device,
            built.plain,
            built.marked,
            to_plan(plan, sample_inputs(loaded.inputs, 0)),
            steps=len(built.steps),
            starts=starts,
            rounds=rounds,
            peak=(probe, build_peak(TargetInfo.from_target(target, count), target, probe)),
            tell=tell,
        )
    return PerOp(loaded.name, count, kernel_times(built.steps, times, plan, profile), times, profile, notes)


def _profile(device: Device, plan: LayoutPlan) -> tuple[DeviceProfile | None, tuple[str, ...]]:
    """The profile of the device for the plan's target, and what to say of it."""
    identity, target = device.identity(), target_text(dict(plan.target))
    profile = ProfileStore().load(identity, target)
    if profile is not None:
        return profile, (f"{doubt(profile)}; calibrate again when it is idle",) if profile.is_doubtful else ()
    also = "" if target == target_text() else f" --target '{target}'"
    return None, (
        f"device {identity.key!r} ({identity.cpu}) is not calibrated for {identity.threads} threads and the plan's "
        f"target, so there are no shares of its peak: run layoutsearch device calibrate --threads {identity.threads}"
        + also,
    )


def kernel_times(
    steps: tuple[PlanStep, ...], times: StepTimes, plan: LayoutPlan, profile: DeviceProfile | None
) -> tuple[KernelTime, ...]:
    """What was measured and what is known of each step, in order."""
    # Shares are of what was found, not of what it might be at best.
    bounds = Bounds(profile, allowance=0.0) if profile is not None else None
    alone: dict[str, float | None] = {op.id: op.measured_us for op in plan.ops}
    alone |= {f"{t.tensor} {t.source}->{t.target}": t.us for t in plan.transforms}
    alone |= {f.first: f.measured_us for f in plan.fusions}
    kinds = {op.id: op.kind for op in plan.ops}
    reached = statistics.median(times.peak_gflops) if times.peak_gflops else 0.0
    found = []
    for number, (step, samples) in enumerate(zip(steps, times.steps_us, strict=True)):
        us, facts, key = statistics.median(samples), step.facts, step.transform
        flops, moved, known, share, roof, in_place = 0, 0, "", None, None, None
        if facts is not None:
            flops, moved, known = facts.flops, facts.read_bytes + facts.written_bytes, step.ops[0]
            if bounds is not None:
                roof = bounds.kernel_roof(facts, step.choice)
                in_place = bounds.kernel_in_place(facts, step.choice)
                share = bounds.share_of_peak(facts, us) if us else None
        elif key is not None:
            moved, known = 2 * key.bytes, f"{step.tensor} {key.candidate}"
            roof = bounds.transform_roof(key) if bounds is not None else None
        found.append(
            KernelTime(
                step=number,
                function=step.function,
                ops=step.ops or ((step.tensor,) if step.tensor else ()),
                kind=_kind(step, kinds),
                group=_group(step),
                layouts=str(step.choice) if step.choice is not None else key.candidate if key is not None else "",
                algorithm=step.choice.algorithm if step.choice is not None else DIRECT,
                flops=flops,
                weight_bytes=_weight_bytes(step),
                activation_bytes=moved,
                us=us,
                spread=spread(samples),
                alone_us=alone.get(known),
                gflops=flops / (us * 1e3) if us else None,
                share_of_peak=share,
                share_of_reached=flops / (us * 1e3 * reached) if us and reached and flops else None,
                roof=roof,
                in_place=in_place,
            )
        )
    return tuple(found)


def _weight_bytes(step: PlanStep) -> float:
    return step.facts.weight_bytes + extra_weight_bytes(step.facts, step.choice) if step.facts is not None else 0.0


def _kind(step: PlanStep, kinds: Mapping[str, str]) -> str:
    if step.facts is None:
        return TRANSFORM if step.transform is not None else ""
    return f"{step.facts.kind}+{kinds[step.second]}" if step.second else step.facts.kind


def _group(step: PlanStep) -> str:
    facts = step.facts
    if facts is None:
        return OTHER
    if step.second:
        return PAIR
    named = {
        "conv2d_pointwise": POINTWISE,
        "conv2d_depthwise": DEPTHWISE,
        "conv2d_transpose": TRANSPOSED,
        "conv2d": DENSE if facts.conv is not None and facts.conv.kernel == (3, 3) else OTHER,
    }
    return named.get(facts.kind, OTHER)
