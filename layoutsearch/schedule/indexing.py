"""From logical coordinates to indices into a tensor of any layout, and back, on TIR expressions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from layoutsearch.layout.layout import Layout

Expr: TypeAlias = Any
"""A TIR expression, or a Python integer where the value is known."""


@dataclass(frozen=True)
class Split:
    """The coordinate `outer * width + lane` with 0 <= lane < width, kept apart.

    Where `width` divides the block of a layout the physical index is written without the lane in any division, so that
    a vectorised or unrolled lane stays visibly contiguous.
    """

    outer: Expr
    width: int
    lane: Expr

    @property
    def value(self) -> Expr:
        """The coordinate as one expression."""
        return self.outer * self.width + self.lane


Coordinate: TypeAlias = Any
"""An `Expr` or a `Split`."""


def flat(coordinate: Coordinate) -> Expr:
    """The coordinate as one expression."""
    return coordinate.value if isinstance(coordinate, Split) else coordinate


def physical_indices(layout: Layout, coordinates: Mapping[str, Coordinate]) -> list[Expr]:
    """Indices, in memory order, of the element at the logical `coordinates` (primal axis letter -> coordinate)."""
    out: list[Expr] = []
    for axis in layout.axes:
        letter = axis.letter.upper()
        coordinate, block = coordinates[letter], layout.block(letter)
        if block == 1:
            out.append(0 if axis.is_inner else flat(coordinate))
        elif isinstance(coordinate, Split) and block % coordinate.width == 0:
            pieces = block // coordinate.width
            if axis.is_inner:
                within = coordinate.outer % pieces if pieces > 1 else 0
                out.append(within * coordinate.width + coordinate.lane)
            else:
                out.append(coordinate.outer // pieces if pieces > 1 else coordinate.outer)
        else:
            value = flat(coordinate)
            out.append(value % block if axis.is_inner else value // block)
    return out


def logical_coordinates(layout: Layout, indices: Sequence[Expr]) -> dict[str, Expr]:
    """Inverse of `physical_indices`."""
    out: dict[str, Expr] = {}
    for axis, index in zip(layout.axes, indices, strict=True):
        letter = axis.letter.upper()
        part = index if axis.is_inner else index * layout.block(letter)
        out[letter] = out[letter] + part if letter in out else part
    return out


def static_shape(shape: Sequence[Expr]) -> list[int]:
    """The shape as Python integers."""
    return [int(s) for s in shape]
