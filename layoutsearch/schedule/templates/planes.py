"""Padded planes of the `flat` template: where the elements of an input lie in them, and which phases share one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from layoutsearch.schedule.contraction import Contraction, Phase
from layoutsearch.schedule.indexing import Expr


@dataclass(frozen=True)
class Margin:
    """One axis of the padded plane: input position p is stored at (p + `before`), every `step`-th in a part of its own.

    Attributes:
        before: Zeros in front.
        step: Number of interleaved parts.
        length: Positions of one part.
        extent: Positions of the input.
    """

    before: int
    step: int
    length: int
    extent: int

    @classmethod
    def of(cls, phases: tuple[Phase, ...], extent: int) -> Margin:
        """The smallest margin that holds every tap of every phase."""
        offsets = [p.offset0 + j * p.offset_step for p in phases for j in range(p.taps)] or [0]
        before, step = max(0, -min(offsets)), phases[0].in_step
        last = max((p.count - 1) + (max(offsets) + before) // step for p in phases)
        return cls(before, step, last + 1, extent)

    def part(self, phase: Phase, tap: Expr) -> tuple[Expr, Expr]:
        """(interleaved part, shift within it) of a tap: output q reads position q + shift of that part."""
        at = tap * phase.offset_step + (phase.offset0 + self.before)
        return (0, at) if self.step == 1 else (at % self.step, at // self.step)

    def inside(self, part: int) -> tuple[int, int]:
        """Positions [low, high) of a part that hold input; the others hold zero."""
        low = -(-max(0, self.before - part) // self.step)
        high = -(-(self.extent + self.before - part) // self.step)
        return min(low, self.length), max(min(low, self.length), min(high, self.length))

    def input(self, position: Expr, part: int) -> Expr:
        """Input position stored at a position of a part."""
        return position * self.step + (part - self.before)


Pair: TypeAlias = tuple[Phase, Phase]
"""A phase of the rows with one of the columns."""


def bundles(c: Contraction) -> list[list[Pair]]:
    """The phases, those together that read the same input (all of them where the kernel is as large as the stride)."""
    out: dict[tuple[tuple[int, ...], ...], list[Pair]] = {}
    for rows in c.rows:
        for columns in c.columns:
            key = tuple((p.count, p.in_step, p.taps, p.offset0, p.offset_step) for p in (rows, columns))
            out.setdefault(key, []).append((rows, columns))
    return list(out.values())


def alternating(phases: Sequence[Pair]) -> list[tuple[int, int]]:
    """Numbers of phases whose columns are the even and the odd ones of the same rows."""
    found = []
    for i, (rows, columns) in enumerate(phases):
        for j, (others, odd) in enumerate(phases):
            if (rows.start, columns.step, columns.start) == (others.start, 2, odd.start - 1):
                found.append((i, j))
    return found
