"""The check that requested is achieved can fail: on other layouts, other shapes, or without an operator."""

from __future__ import annotations

import pytest

from layoutsearch.errors import MaterializeError
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.candidates import nearest
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.rules import initial_assignment
from layoutsearch.materialize.convert import materialize
from layoutsearch.materialize.verify import calls_by_name, find_mismatches, verify_layouts
from tests.materialize.cases import Case
from tests.models import nets


@pytest.fixture(scope="module")
def case() -> Case:
    return Case.of(nets.conv_pool_conv())


def uniform(case: Case, layout: str) -> dict[str, Candidate]:
    return {n: nearest(s.candidates, Layout(layout)) for n, s in case.spaces.items()}


def test_the_canonical_module_is_in_its_own_layouts(case: Case) -> None:
    verify_layouts(case.module, case.graph, initial_assignment(case.graph))


def test_another_layout_is_seen_in_every_operator(case: Case) -> None:
    found = find_mismatches(case.module, case.graph, uniform(case, "NHWC"))
    assert {m.op for m in found} == set(case.spaces)
    assert "conv2d_0: data_layout is NCHW, requested NHWC" in [str(m) for m in found]
    assert "relu_0: shape of result 0 in NHWC is (1, 16, 12, 16), requested (1, 12, 16, 16)" in [str(m) for m in found]


def test_one_operator_that_differs_is_the_one_that_is_named(case: Case) -> None:
    wanted = uniform(case, "NCHW8c")
    done = {**wanted, "max_pool2d_0": Candidate.of("NCHW4c")}
    module = materialize(case.module, case.graph, done).module
    assert {m.op for m in find_mismatches(module, case.graph, wanted)} == {"max_pool2d_0"}
    with pytest.raises(MaterializeError, match=r"max_pool2d_0: layout is NCHW4c, requested NCHW8c \(and \d more\)"):
        verify_layouts(module, case.graph, wanted)


def test_an_operator_that_is_gone(case: Case) -> None:
    other = Case.of(nets.stem())
    found = find_mismatches(other.module, case.graph, initial_assignment(case.graph))
    assert ("max_pool2d_0", "gone") in [(m.op, m.achieved) for m in found]


def test_operators_keep_their_names(case: Case) -> None:
    """The name of a bound variable ties the converted operator to its node."""
    module = materialize(case.module, case.graph, uniform(case, "NCHW16c")).module
    assert calls_by_name(module).keys() >= case.graph.by_name.keys()
