"""What another layout for one operator gains, and what the layout changes at its borders cost: gains x, costs y, +- z.

A layout change costs what its kernel takes when it stands alone. Where a neighbor has a candidate that reads (or
writes) the other layout itself, the change is fused into it and costs what that candidate takes more than the one the
neighbor has now; that is often less, since the tensor is not moved once more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from layoutsearch.cost.model import CostModel
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.facts import KernelFacts
from layoutsearch.layout.transform import TransformKey


@dataclass(frozen=True)
class Estimate:
    """Microseconds, more or less: `sigma` is one standard deviation."""

    us: float
    sigma: float

    def __add__(self, other: Estimate) -> Estimate:
        """The sum of two whose errors are independent."""
        return Estimate(self.us + other.us, math.hypot(self.sigma, other.sigma))

    def __sub__(self, other: Estimate) -> Estimate:
        return Estimate(self.us - other.us, math.hypot(self.sigma, other.sigma))


@dataclass(frozen=True)
class Neighbor:
    """The kernel on the other side of a layout change.

    Attributes:
        facts: what it computes.
        choice: the candidate that it has.
        choices: those that it may have.
    """

    facts: KernelFacts
    choice: Candidate
    choices: tuple[Candidate, ...]


@dataclass(frozen=True)
class Border:
    """A layout change that appears with the new layout, with the kernels that could take it over.

    Attributes:
        key: tensor, layout it is made in, layout that is wanted.
        producer: what makes the tensor in `key.source`; None for a model input, or what cannot take it over.
        consumer: what reads the tensor in `key.target`; None where several do.
    """

    key: TransformKey
    producer: Neighbor | None = None
    consumer: Neighbor | None = None


@dataclass(frozen=True)
class Change:
    """A layout change as predicted.

    Attributes:
        key: of what.
        alone: as a kernel of its own.
        fused: taken over by a neighbor; None where none can.
        into: which neighbor, and with which candidate; empty where none can.
    """

    key: TransformKey
    alone: Estimate
    fused: Estimate | None = None
    into: str = ""

    @property
    def best(self) -> Estimate:
        """The cheaper way."""
        return self.fused if self.fused is not None and self.fused.us < self.alone.us else self.alone

    def __str__(self) -> str:
        how = f"fused into {self.into}" if self.fused is not None and self.best is self.fused else "alone"
        return f"{self.key.candidate} {_us(self.best.us)} ({how})"


@dataclass(frozen=True)
class Overhead:
    """Another layout for one operator, weighed.

    Attributes:
        before, after: its candidates.
        gain: what its own kernel gets faster by; negative if it gets slower.
        changes: the layout changes that appear at its borders.
        saved: what the layout changes that disappear cost now.
    """

    before: Candidate
    after: Candidate
    gain: Estimate
    changes: tuple[Change, ...]
    saved: Estimate

    @property
    def cost(self) -> Estimate:
        """Of the layout changes that appear, each in its cheaper way, less those that disappear."""
        total = Estimate(-self.saved.us, self.saved.sigma)
        for change in self.changes:
            total = total + change.best
        return total

    @property
    def net(self) -> Estimate:
        """What the model gets faster by as a whole."""
        return self.gain - self.cost

    def __str__(self) -> str:
        parts = f" [{'; '.join(map(str, self.changes))}]" if self.changes else ""
        return (
            f"{self.before} -> {self.after}: gains {_us(self.gain.us)}, costs {_us(self.cost.us)}, "
            f"+- {_us(self.net.sigma)}{parts}"
        )


def overhead(
    model: CostModel,
    facts: KernelFacts,
    before: Candidate,
    after: Candidate,
    appearing: Sequence[Border] = (),
    disappearing: Sequence[TransformKey] = (),
) -> Overhead:
    """Weigh moving an operator from one candidate to another.

    Args:
        model: predicts all of it.
        facts: the operator's kernel.
        before: the candidate it has.
        after: the one it would have.
        appearing: layout changes that its new layouts need, each tensor and wanted layout once.
        disappearing: layout changes that its present layouts need and the new ones do not.
    """
    return Overhead(
        before,
        after,
        difference(model, facts, before, after),
        tuple(change_of(model, border) for border in appearing),
        _total(model, disappearing),
    )


def difference(model: CostModel, facts: KernelFacts, before: Candidate, after: Candidate) -> Estimate:
    """Time of a kernel under `before` less that under `after`.

    The part of the error that the candidates of a workload share scales both, so it counts with the difference only.
    """
    if before == after:
        return Estimate(0.0, 0.0)
    predicted = model.kernels([(facts, before), (facts, after)])
    old, new = predicted.us
    share = model.spread.share
    shared = math.sqrt(share) * float(np.mean(predicted.sigma)) * (old - new)
    own = math.sqrt(1 - share) * math.hypot(old * predicted.sigma[0], new * predicted.sigma[1])
    return Estimate(float(old - new), math.hypot(shared, own))


def change_of(model: CostModel, border: Border) -> Change:
    """Predict a layout change, alone and fused into whichever neighbor takes it over for less."""
    alone = _total(model, [border.key])
    best: Estimate | None = None
    into = ""
    for role, neighbor in (("producer", border.producer), ("consumer", border.consumer)):
        for candidate in _taking_over(border.key, role, neighbor):
            assert neighbor is not None
            extra = difference(model, neighbor.facts, candidate, neighbor.choice)
            if best is None or extra.us < best.us:
                best, into = extra, f"the {role} as {candidate}"
    return Change(border.key, alone, best, into)


def _taking_over(key: TransformKey, role: str, neighbor: Neighbor | None) -> list[Candidate]:
    """Candidates of a neighbor that make (or read) the other layout and keep to their own on the other side."""
    if neighbor is None:
        return []
    if role == "producer":
        wanted = replace(neighbor.choice, out=key.target)
    else:
        wanted = replace(neighbor.choice, data=key.source)
    return [c for c in neighbor.choices if (c.data, c.out) == (wanted.data, wanted.out) and c != neighbor.choice]


def _total(model: CostModel, keys: Sequence[TransformKey]) -> Estimate:
    predicted = model.transforms(keys)
    return Estimate(float(predicted.us.sum()), float(np.sqrt(((predicted.us * predicted.sigma) ** 2).sum())))


def _us(value: float) -> str:
    return f"{value / 1e3:.2f} ms" if abs(value) >= 1e3 else f"{value:.1f} us"
