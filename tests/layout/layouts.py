"""Hypothesis strategies for layouts and shapes."""

from __future__ import annotations

from hypothesis import strategies as st

from layoutsearch.layout.layout import Layout

PRIMALS = ("NCHW", "OIHW", "IOHW", "NHWC", "AB", "NCDHW")


@st.composite
def stored(draw: st.DrawFn, primal: str) -> tuple[Layout, dict[str, int]]:
    """A layout over the letters of `primal`, any of them blocked anywhere, and the blocks."""
    blocks = {a: draw(st.sampled_from([1, 2, 3, 4])) for a in primal if draw(st.booleans())}
    tokens = [*primal, *(f"{block}{letter.lower()}" for letter, block in blocks.items())]
    return Layout("".join(draw(st.permutations(tokens)))), blocks


@st.composite
def layouts_and_shapes(draw: st.DrawFn, count: int = 1) -> tuple[str, list[Layout], tuple[int, ...]]:
    """Primal axes, `count` layouts over them, and a logical shape that all their blocks divide."""
    primal = draw(st.sampled_from(PRIMALS))
    drawn = [draw(stored(primal)) for _ in range(count)]
    shape = []
    for letter in primal:
        extent = draw(st.integers(1, 2))
        for _, blocks in drawn:
            extent *= blocks.get(letter, 1)
        shape.append(extent)
    return primal, [layout for layout, _ in drawn], tuple(shape)
