"""The choice for one operator: an immutable value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from layoutsearch.layout.layout import Layout


@dataclass(frozen=True)
class Candidate:
    """One way to run an operator.

    Attributes:
        data: layout of the (first) data operand.
        kernel: layout of the weights, None where there are none.
        out: layout of the result; other than `data` only for convolutions.
    """

    data: Layout
    kernel: Layout | None
    out: Layout

    @classmethod
    def of(cls, data: str, kernel: str | None = None, out: str | None = None) -> Candidate:
        """Build from strings; `out` defaults to `data`."""
        return cls(Layout(data), Layout(kernel) if kernel else None, Layout(out or data))

    @classmethod
    def uniform(cls, layout: Layout) -> Candidate:
        """The choice of a flexible operator."""
        return cls(layout, None, layout)

    def __str__(self) -> str:
        return ",".join(str(part) for part in (self.data, self.kernel, self.out) if part is not None)

    @classmethod
    def parse(cls, text: str) -> Candidate:
        """Inverse of `str`.

        Raises:
            ValueError: not one, two or three layouts separated by commas.
        """
        parts = text.split(",")
        if len(parts) == 3:
            return cls.of(parts[0], parts[1], parts[2])
        if len(parts) == 2:
            return cls.of(parts[0], None, parts[1])
        raise ValueError(f"{text!r} is not a candidate; expected DATA,OUT or DATA,KERNEL,OUT")


def choice_text(choice: Candidate | None) -> str:
    """A kernel's choice in records, tables and messages: empty where it has none."""
    return str(choice) if choice is not None else ""


Assignment = Mapping[str, Candidate]
"""A candidate for every anchor and flexible operator, by bound variable of the canonical module."""
