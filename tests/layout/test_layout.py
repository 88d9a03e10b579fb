"""The algebra of layout strings, by properties that hold for every layout."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.layout import Axis, Layout
from tests.layout.layouts import layouts_and_shapes


@given(layouts_and_shapes())
def test_shapes_round_trip(case: tuple[str, list[Layout], tuple[int, ...]]) -> None:
    primal, (layout,), shape = case
    physical = layout.physical_shape(shape, primal)
    assert len(physical) == layout.ndim
    assert math.prod(physical) == math.prod(shape)
    assert layout.logical_shape(physical, primal) == shape
    assert layout.divides(shape, primal)


@given(layouts_and_shapes())
def test_letters_round_trip(case: tuple[str, list[Layout], tuple[int, ...]]) -> None:
    primal, (layout,), _ = case
    letters = layout.over_letters(primal)
    assert Layout.from_letters(letters, primal) == layout
    assert Layout(letters).physical_shape((24,) * len(primal), "ABCDEFG"[: len(primal)]) == layout.physical_shape(
        (24,) * len(primal), primal
    )


@given(layouts_and_shapes(), st.data())
def test_contiguous_run_is_what_memory_shows(
    case: tuple[str, list[Layout], tuple[int, ...]], data: st.DataObject
) -> None:
    """Against the coordinates themselves: how far from the first element only one axis changes."""
    primal, (layout,), shape = case
    letter = data.draw(st.sampled_from(primal))
    physical = layout.physical_shape(shape, primal)
    grid = np.indices(physical)
    others = np.zeros(physical, int)
    own = np.zeros(physical, int)
    for axis, coordinate in zip(layout.axes, grid, strict=True):
        if axis.letter.upper() == letter:
            own += coordinate
        else:
            others += coordinate
    changed = np.flatnonzero(others.ravel())
    run = int(changed[0]) if changed.size else others.size
    assert layout.contiguous_run(shape, primal, letter) == run


@pytest.mark.parametrize(
    ("layout", "primal", "shape", "physical"),
    [
        ("NCHW16c", "NCHW", (1, 32, 7, 9), (1, 2, 7, 9, 16)),
        ("NHWC", "NCHW", (1, 32, 7, 9), (1, 7, 9, 32)),
        ("NCHW16c", "NHWC", (1, 7, 9, 32), (1, 2, 7, 9, 16)),
        ("OIHW8i16o", "OIHW", (32, 24, 3, 5), (2, 3, 3, 5, 8, 16)),
        ("NCHW3c", "NCHW", (2, 3, 4, 5), (2, 1, 4, 5, 3)),
    ],
)
def test_physical_shapes_of_known_layouts(
    layout: str, primal: str, shape: tuple[int, ...], physical: tuple[int, ...]
) -> None:
    assert Layout(layout).physical_shape(shape, primal) == physical


def test_parts_of_a_layout() -> None:
    layout = Layout("OIHW8i16o")
    assert layout.primal == "OIHW"
    assert layout.blocks == {"I": 8, "O": 16}
    assert (layout.block("i"), layout.block("O"), layout.block("H")) == (8, 16, 1)
    assert layout.axes[-1] == Axis("o", 16)
    assert layout.is_blocked
    assert not Layout("NHWC").is_blocked
    assert str(layout) == "OIHW8i16o"
    assert Layout("NCHW16c").over_letters("NCHW") == "ABCD16b"
    assert Layout("NHWC").over_letters("NCHW") == "ACDB"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a layout"),
        ("NC-HW", "is not a layout"),
        ("NCHW16", "is not a layout"),
        ("NCHWC", "names an axis twice"),
        ("NCHW4c8c", "names an axis twice"),
        ("NHW16c", "blocks C but has no axis C"),
        ("NCHWc", "needs a block size"),
        ("N16CHW", "needs a block size"),
        ("NCHW0c", "needs a block size"),
        ("NCHW{b}c", "is not a layout"),
    ],
)
def test_bad_layouts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(text)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="block 16 of NCHW16c does not divide C=24"):
        Layout("NCHW16c").physical_shape((1, 24, 2, 2), "NCHW")
    with pytest.raises(ValueError, match="has axes NCHW, the shape has OIHW"):
        Layout("NCHW").physical_shape((1, 2, 3, 4), "OIHW")
    assert not Layout("NCHW16c").divides((1, 24, 2, 2), "NCHW")
    assert not Layout("NCHW").divides((1, 24, 2, 2), "OIHW")


@pytest.mark.parametrize(
    "text", ["NCHW,OIHW,NHWC", "NCHW8c,OIHW8i16o,NCHW16c", "NHWC,NHWC", "NHWC,HWIO,NHWC,winograd4"]
)
def test_candidates_are_their_text(text: str) -> None:
    assert str(Candidate.parse(text)) == text


@pytest.mark.parametrize("text", ["NCHW", "a,b,c,d", "NHWC,HWIO,NHWC,fft", "NCHW,NCHW9", ""])
def test_text_that_is_no_candidate(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        Candidate.parse(text)
