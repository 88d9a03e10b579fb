"""The loops of kernels without a contraction: how many vector pieces they take, and about how many cycles.

Such a kernel runs along what is contiguous in its result, in whole vectors and then ever narrower pieces for the rest,
and repeats that for every tap of its window. Short runs pay the start of each piece, strided ones a gather.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from layoutsearch.cost.machine import Machine
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.facts import KernelFacts
from layoutsearch.layout.layout import Layout

# Cycles, as seen of the `loops` template on x86: they set the scale only, what is learned corrects them.
_PIECE = 10.0  # to start a piece within the loop over taps
_VECTOR = 1.2  # a contiguous vector
_GATHER = 10.0  # a vector whose elements lie apart
_INDEXED = 25.0  # a vector whose elements lie where an index says
_FOLD = 5.0  # to add up one lane of a partial result
_TAP = 3.0  # an accumulation whose loop over taps is innermost
_PARTIAL = 4  # vectors of partial results where a reduction runs along its contiguous axis

_POOLS = ("max_pool2d", "avg_pool2d")
_GLOBAL = ("adaptive_avg_pool2d", "mean", "sum", "max", "min")


@dataclass(frozen=True)
class Loops:
    """The loops of a kernel.

    Attributes:
        cycles: of all threads together.
        run: contiguous elements of the result that are walked at a time.
        pieces: starts of a piece for each run: one for all whole vectors, one for each narrower piece.
        gathers: whether the elements of a vector are read from apart.
    """

    cycles: float
    run: int
    pieces: int
    gathers: bool


def loops_of(facts: KernelFacts, choice: Candidate | None, machine: Machine) -> Loops:
    """The loops of a kernel without a contraction, under a candidate or in its original layout."""
    made = facts.results[0] if facts.results else None
    if made is None or not made.shape:
        return Loops(0.0, 1, 1, False)
    layout = choice.out if choice is not None else Layout(made.axes)
    elements, taps = math.prod(made.shape), math.prod(facts.window)
    last = layout.axes[-1]
    extents = dict(zip(made.axes, made.shape, strict=True))
    run = last.factor if last.is_inner else extents[last.letter]
    pixels_last = last.letter == "W"
    pixels = extents.get("H", 1) * extents.get("W", 1)
    if facts.kind in _GLOBAL and pixels == 1 and taps > 1:
        return _reduction(elements, taps, run, pixels_last, machine)
    gathers = pixels_last and (facts.kind == "resize2d" or (facts.kind in _POOLS and _strided(facts, extents)))
    if not gathers and pixels_last and taps == 1:
        run = pixels
    pieces = _pieces(run, machine.lanes)
    whole = run // machine.lanes
    if taps == 1 and facts.kind != "resize2d":
        # Elementwise: a load for every operand, an operation for each member, and a store.
        reads = len(facts.operands) + len(facts.epilogue) / 2 + 1
        each = 2.0 * pieces + whole * reads / 2
    else:
        apart = _GATHER if facts.kind in _POOLS else _INDEXED
        each = taps * (_PIECE * pieces + whole * (apart if gathers else _VECTOR))
    return Loops(elements / max(1, run) * each, run, pieces, gathers)


def _reduction(elements: int, taps: int, run: int, pixels_last: bool, machine: Machine) -> Loops:
    """A window as large as the image."""
    if not pixels_last:
        vectors = -(-run // machine.lanes)
        return Loops(elements / max(1, run) * taps * max(_TAP, 1.5 * vectors), run, _pieces(run, machine.lanes), False)
    vectors = taps // machine.lanes
    if vectors == 0:
        return Loops(elements * taps * _TAP, taps, taps, False)
    lanes = machine.lanes * min(_PARTIAL, vectors)
    return Loops(elements * (_FOLD * lanes + vectors * _VECTOR), taps, _pieces(taps, machine.lanes), False)


def _strided(facts: KernelFacts, extents: dict[str, int]) -> bool:
    data = facts.operands[0]
    width = dict(zip(data.axes, data.shape, strict=True)).get("W", 1)
    return width > extents.get("W", 1) + facts.window[1]


def _pieces(run: int, lanes: int) -> int:
    rest = run % lanes
    return int(run >= lanes) + bin(rest).count("1")
