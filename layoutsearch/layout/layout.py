"""Layout strings as values: the algebra of axis order and blocking.

A layout names the axes of a tensor in memory order, TVM's way: upper-case letters are (outer) axes, a number with a
lower-case letter is an inner block of the axis of that letter. `NCHW16c` holds a logical (N, C, H, W) tensor as
(N, C/16, H, W, 16). Logical shapes are always given in the order of the *primal* axes (`NCHW`, `OIHW`, `IOHW`, ...).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

_TOKEN = re.compile(r"(\d*)([A-Za-z])")


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a layout: `C` (outer, factor 1) or `16c` (inner, factor 16)."""

    letter: str
    factor: int = 1

    @property
    def is_inner(self) -> bool:
        """Whether this is the inner part of a blocked axis."""
        return self.letter.islower()


@dataclass(frozen=True)
class Layout:
    """An immutable layout such as `NCHW`, `NHWC`, `NCHW16c` or `OIHW8i16o`.

    Raises:
        ValueError: the string is not a layout (unknown token, an axis twice, an inner block without its outer axis).
    """

    name: str

    def __post_init__(self) -> None:
        tokens = _TOKEN.findall(self.name)
        if not tokens or "".join(f + a for f, a in tokens) != self.name:
            raise ValueError(f"{self.name!r} is not a layout; expected letters and blocks such as NCHW16c")
        letters = [a for _, a in tokens]
        if len(set(letters)) != len(letters):
            raise ValueError(f"layout {self.name!r} names an axis twice")
        for factor, letter in tokens:
            if letter.islower() and letter.upper() not in letters:
                raise ValueError(f"layout {self.name!r} blocks {letter.upper()} but has no axis {letter.upper()}")
            if letter.islower() != bool(factor) or factor == "0":
                raise ValueError(f"layout {self.name!r}: a lower-case axis needs a block size, an upper-case one none")

    def __str__(self) -> str:
        return self.name

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The axes in memory order."""
        return tuple(Axis(a, int(f) if f else 1) for f, a in _TOKEN.findall(self.name))

    @cached_property
    def primal(self) -> str:
        """The outer axes in the order they appear: `NHWC` for NHWC, `NCHW` for NCHW16c."""
        return "".join(a.letter for a in self.axes if not a.is_inner)

    @property
    def ndim(self) -> int:
        """Number of physical dimensions."""
        return len(self.axes)

    @cached_property
    def blocks(self) -> dict[str, int]:
        """Block size by primal axis, e.g. {"C": 16}."""
        return {a.letter.upper(): a.factor for a in self.axes if a.is_inner}

    @property
    def is_blocked(self) -> bool:
        """Whether any axis is split."""
        return bool(self.blocks)

    def block(self, letter: str) -> int:
        """Block size of a primal axis; 1 where it is not split."""
        return self.blocks.get(letter.upper(), 1)

    def divides(self, shape: Sequence[int], primal: str) -> bool:
        """Whether every block divides its extent of the logical `shape`, given in `primal` order."""
        extents = dict(zip(primal, shape, strict=True))
        return set(self.primal) == set(primal) and all(extents[a] % f == 0 for a, f in self.blocks.items())

    def physical_shape(self, shape: Sequence[int], primal: str) -> tuple[int, ...]:
        """Shape in memory of a logical `shape` given in `primal` order.

        Raises:
            ValueError: other axes than the layout's, or a block that does not divide its axis.
        """
        extents = dict(zip(primal, shape, strict=True))
        if set(extents) != set(self.primal):
            raise ValueError(f"layout {self.name} has axes {self.primal}, the shape has {primal}")
        out = []
        for axis in self.axes:
            if axis.is_inner:
                out.append(axis.factor)
                continue
            factor = self.block(axis.letter)
            if extents[axis.letter] % factor:
                raise ValueError(f"block {factor} of {self.name} does not divide {axis.letter}={extents[axis.letter]}")
            out.append(extents[axis.letter] // factor)
        return tuple(out)

    def logical_shape(self, shape: Sequence[int], primal: str) -> tuple[int, ...]:
        """Inverse of `physical_shape`."""
        extents: dict[str, int] = {}
        for extent, axis in zip(shape, self.axes, strict=True):
            key = axis.letter.upper()
            extents[key] = extents.get(key, 1) * extent
        return tuple(extents[a] for a in primal)

    def over_letters(self, primal: str) -> str:
        """The same layout over A, B, C, ... as ConvertLayout writes it: NCHW16c over NCHW is ABCD16b."""
        letters = {a: chr(ord("A") + i) for i, a in enumerate(primal)}
        return "".join(
            f"{a.factor}{letters[a.letter.upper()].lower()}" if a.is_inner else letters[a.letter] for a in self.axes
        )

    @classmethod
    def from_letters(cls, letters: str, primal: str) -> Layout:
        """Inverse of `over_letters`: ABCD16b over NCHW is NCHW16c."""
        names = {chr(ord("A") + i): a for i, a in enumerate(primal)}
        return cls(
            "".join(f + (names[a.upper()].lower() if a.islower() else names[a]) for f, a in _TOKEN.findall(letters))
        )

    def contiguous_run(self, shape: Sequence[int], primal: str, letter: str) -> int:
        """Number of consecutive elements in memory that differ only in axis `letter` (1 if another axis is last)."""
        physical = self.physical_shape(shape, primal)
        run = []
        for extent, axis in reversed(list(zip(physical, self.axes, strict=True))):
            if axis.letter.upper() != letter:
                if extent == 1:
                    continue
                break
            run.append(extent)
        return math.prod(run)
