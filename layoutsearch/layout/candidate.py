"""The choice for one operator: an immutable value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from layoutsearch.layout.layout import Layout
from layoutsearch.layout.scopes import GLOBAL, SCOPES

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
        scope: memory scope of the result, of what is fused behind the operator at least; one of `SCOPES`.
        weight_scope: memory scope of the weights.
    """

    data: Layout
    kernel: Layout | None
    out: Layout
    algorithm: str = DIRECT
    scope: str = GLOBAL
    weight_scope: str = GLOBAL

    @classmethod
    def of(
        cls,
        data: str,
        kernel: str | None = None,
        out: str | None = None,
        algorithm: str = DIRECT,
        scope: str = GLOBAL,
        weight_scope: str = GLOBAL,
    ) -> Candidate:
        """Build from strings; `out` defaults to `data`.

        Raises:
            ValueError: not a layout, or no such algorithm or scope.
        """
        if algorithm not in ALGORITHMS:
            raise ValueError(f"{algorithm!r} is not an algorithm; known are {', '.join(ALGORITHMS)}")
        for name in (scope, weight_scope):
            if name not in SCOPES:
                raise ValueError(f"{name!r} is not a memory scope; known are {', '.join(SCOPES)}")
        return cls(
            Layout(data), Layout(kernel) if kernel else None, Layout(out or data), algorithm, scope, weight_scope
        )

    @classmethod
    def uniform(cls, layout: Layout, scope: str = GLOBAL) -> Candidate:
        """The choice of a flexible operator."""
        return cls(layout, None, layout, scope=scope)

    @property
    def follower(self) -> Candidate:
        """The choice of what is fused behind an operator of this one: its result's layout and scope."""
        return Candidate.uniform(self.out, self.scope)

    @property
    def in_buffers(self) -> Candidate:
        """The same without textures."""
        return replace(self, scope=GLOBAL, weight_scope=GLOBAL)

    @property
    def has_textures(self) -> bool:
        """Whether a scope is another than that of a buffer."""
        return (self.scope, self.weight_scope) != (GLOBAL, GLOBAL)

    def __str__(self) -> str:
        parts = [str(part) for part in (self.data, self.kernel, self.out) if part is not None]
        parts += [self.algorithm] if self.algorithm != DIRECT else []
        scopes = (("scope", self.scope), ("weight_scope", self.weight_scope))
        return ",".join([*parts, *(f"{key}={scope}" for key, scope in scopes if scope != GLOBAL)])

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
            ValueError: not two or three layouts, and perhaps an algorithm and scopes, separated by commas.
        """
        parts = text.split(",")
        scopes = dict(part.split("=", 1) for part in parts if "=" in part)
        parts = [part for part in parts if "=" not in part]
        if not 2 <= len(parts) <= 4 or set(scopes) - {"scope", "weight_scope"}:
            raise ValueError(
                f"{text!r} is not a candidate; expected DATA,OUT or DATA,KERNEL,OUT or DATA,KERNEL,OUT,ALGORITHM, "
                "then perhaps scope=SCOPE and weight_scope=SCOPE"
            )
        if len(parts) == 2:
            return cls.of(parts[0], None, parts[1], **scopes)
        return cls.of(*parts, **scopes)


def choice_text(choice: Candidate | None) -> str:
    """A kernel's choice in records, tables and messages: empty where it has none."""
    return str(choice) if choice is not None else ""


Assignment = Mapping[str, Candidate]
"""A candidate for every anchor and flexible operator, by bound variable of the canonical module."""
