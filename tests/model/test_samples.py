"""How far outputs are from those of the untouched module."""

from __future__ import annotations

import numpy as np
import pytest

from layoutsearch.model.samples import relative_error

INF, NAN = float("inf"), float("nan")


def error(got: list[float], want: list[float]) -> float:
    return relative_error([np.array(got, "float32")], [np.array(want, "float32")])


def test_it_is_of_the_range() -> None:
    assert error([1.0, 2.0, 5.5], [1.0, 2.0, 5.0]) == pytest.approx(0.125)


@pytest.mark.parametrize("other", [INF, -INF, NAN])
def test_what_is_no_finite_number_hides_no_difference(other: float) -> None:
    assert error([1.0, 3.5, other], [1.0, 3.0, other]) == pytest.approx(0.25)
    assert error([0.5, INF, -INF, other], [0.0, INF, -INF, other]) == pytest.approx(0.5)
    assert error([1.0, 3.0, other], [1.0, 3.0, 2.0]) == INF
    assert error([1.0, 3.0, 2.0], [1.0, 3.0, other]) == INF
    assert error([other, other], [other, other]) == 0.0


def test_infinities_of_another_sign_differ() -> None:
    assert error([INF, 1.0], [-INF, 1.0]) == INF


def test_another_shape_or_number_of_outputs_differs() -> None:
    assert error([1.0], [1.0, 2.0]) == INF
    assert relative_error([], [np.zeros(3, "float32")]) == INF
