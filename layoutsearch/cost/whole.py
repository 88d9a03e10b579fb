"""An assignment of a whole model as a few numbers: what decides how far its time is from the sum of its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from layoutsearch.cost.base import kernel_base
from layoutsearch.cost.machine import Machine
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.facts import KernelFacts
from layoutsearch.layout.transform import TransformKey

WHOLE_FEATURES = (
    "log_additive",
    "calls_per_us",
    "transform_share",
    "memory_share",
    "weights_share",
    "short_share",
    "activations_over_l2",
    "channels_last_share",
    "blocked_share",
)
"""Columns of a `WholeShape`."""

_SHORT_US = 20.0


@dataclass(frozen=True)
class WholeShape:
    """An assignment, in the additive model; after `relative_to_best` all but the first are differences.

    Attributes:
        additive_us: kernels and transforms added up.
        log_additive: its natural logarithm.
        calls_per_us: kernels and transforms in a microsecond: what every call costs counts that often.
        transform_share: share of the time in layout changes.
        memory_share: share in kernels that wait for bytes rather than compute.
        weights_share: weights at the nominal bandwidth of where they are, over the time.
        short_share: share in kernels of a few microseconds.
        activations_over_l2: log2 of a kernel's activations over the second caches, weighted by time.
        channels_last_share: share in kernels whose result has the channels last.
        blocked_share: share in kernels whose result is blocked.
    """

    additive_us: float
    log_additive: float
    calls_per_us: float
    transform_share: float
    memory_share: float
    weights_share: float
    short_share: float
    activations_over_l2: float
    channels_last_share: float
    blocked_share: float

    @property
    def features(self) -> tuple[float, ...]:
        """In the order of `WHOLE_FEATURES`."""
        return tuple(getattr(self, name) for name in WHOLE_FEATURES)


def relative_to_best(shapes: Sequence[WholeShape]) -> list[WholeShape]:
    """Shapes of one model's assignments less that of the one with the least additive time; additive times stay.

    What a feature does is learned from assignments of the same model. Models differ in all features at once, and there
    are fewer models than features: between them a slope is made up.
    """
    if not shapes:
        return []
    best = min(shapes, key=lambda s: s.additive_us)
    return [replace(s, **{name: getattr(s, name) - getattr(best, name) for name in WHOLE_FEATURES}) for s in shapes]


def whole_shape(
    kernels: Sequence[tuple[KernelFacts, Candidate | None, float]],
    transforms: Sequence[tuple[TransformKey, float]],
    machine: Machine,
) -> WholeShape:
    """The shape of an assignment.

    Args:
        kernels: every kernel of the model under its candidate with its microseconds, measured or predicted.
        transforms: the layout changes it pays for with theirs; equal ones repeat.
        machine: the device.
    """
    moved = sum(us for _, us in transforms)
    calls = len(kernels) + len(transforms)
    total = max(1e-9, sum(us for *_, us in kernels) + moved)
    shares = dict.fromkeys(("memory", "short", "last", "blocked"), 0.0)
    weights = over = 0.0
    for facts, choice, us in kernels:
        base = kernel_base(facts, choice, machine)
        shares["memory"] += us * (base.weights_us + base.activations_us > base.compute_us)
        shares["short"] += us * (us < _SHORT_US)
        if choice is not None:
            shares["last"] += us * (choice.out.axes[-1].letter == "C")
            shares["blocked"] += us * choice.out.is_blocked
        weights += facts.weight_bytes / machine.weights_gb_s(facts.footprint)
        activations = max(1, facts.read_bytes + facts.written_bytes)
        over += us * math.log2(activations / (machine.l2_bytes * machine.threads))
    return WholeShape(
        additive_us=total,
        log_additive=math.log(total),
        calls_per_us=calls / total,
        transform_share=moved / total,
        memory_share=shares["memory"] / total,
        weights_share=weights / 1e3 / total,
        short_share=shares["short"] / total,
        activations_over_l2=over / total,
        channels_last_share=shares["last"] / total,
        blocked_share=shares["blocked"] / total,
    )
