"""The choice for one operator: an immutable value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from layoutsearch.layout.layout import Layout

DIRECT = "direct"
WINOGRAD = {"winograd2": 2, "winograd4": 4}
"""Winograd's F(m x m, 3 x 3) by name, with m."""
EXTERN = ("onednn",)
"""External libraries: each is an optional extra, `layoutsearch.contrib.NAME`."""
ALGORITHMS = (DIRECT, *WINOGRAD, *EXTERN)
"""How a convolution may be computed."""


@dataclass(frozen=True)
class Candidate:
    """One way to run an operator.

    Attributes:
        data: layout of the (first) data operand.
        kernel: layout of the weights, None where there are none. Of Winograd's algorithms: of the weights after their
            transform, (O, I, m + 2, m + 2). Of an external library: OIHW, what it packs into a form of its own.
        out: layout of the result; other than `data` only for convolutions.
        algorithm: one of `ALGORITHMS`.
    """

    data: Layout
    kernel: Layout | None
    out: Layout
    algorithm: str = DIRECT

    @classmethod
    def of(cls, data: str, kernel: str | None = None, out: str | None = None, algorithm: str = DIRECT) -> Candidate:
        """Build from strings; `out` defaults to `data`.

        Raises:
            ValueError: not a layout, or no such algorithm.
        """
        if algorithm not in ALGORITHMS:
            raise ValueError(f"{algorithm!r} is not an algorithm; known are {', '.join(ALGORITHMS)}")
        return cls(Layout(data), Layout(kernel) if kernel else None, Layout(out or data), algorithm)

    @classmethod
    def uniform(cls, layout: Layout) -> Candidate:
        """The choice of a flexible operator."""
        return cls(layout, None, layout)

    def __str__(self) -> str:
        parts = [str(part) for part in (self.data, self.kernel, self.out) if part is not None]
        return ",".join(parts if self.algorithm == DIRECT else [*parts, self.algorithm])

    @property
    def winograd(self) -> int:
        """m of F(m x m, 3 x 3); 0 for the direct algorithm."""
        return WINOGRAD.get(self.algorithm, 0)

    @property
    def extern(self) -> str:
        """Name of the external library that computes it; empty for our own kernels."""
        return self.algorithm if self.algorithm in EXTERN else ""

    @classmethod
    def parse(cls, text: str) -> Candidate:
        """Inverse of `str`.

        Raises:
            ValueError: not two or three layouts, and perhaps an algorithm, separated by commas.
        """
        parts = text.split(",")
        if len(parts) == 4:
            return cls.of(*parts)
        if len(parts) == 3:
            return cls.of(parts[0], parts[1], parts[2])
        if len(parts) == 2:
            return cls.of(parts[0], None, parts[1])
        raise ValueError(
            f"{text!r} is not a candidate; expected DATA,OUT or DATA,KERNEL,OUT or DATA,KERNEL,OUT,ALGORITHM"
        )


def choice_text(choice: Candidate | None) -> str:
    """A kernel's choice in records, tables and messages: empty where it has none."""
    return str(choice) if choice is not None else ""


Assignment = Mapping[str, Candidate]
"""A candidate for every anchor and flexible operator, by bound variable of the canonical module."""
