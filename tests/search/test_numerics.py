"""What an algorithm with fewer multiplications loses, and that the limit keeps such candidates out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from layoutsearch.errors import SpaceError
from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidates import enumerate_candidates
from layoutsearch.layout.space import builtin_space, parse_space
from layoutsearch.model import canonicalize
from layoutsearch.search.numerics import algorithm_errors, winograd_error, within
from tests.models import nets


def weights(seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((48, 40, 3, 3)) / np.sqrt(360)).astype("float32")


def test_larger_tiles_lose_more() -> None:
    small, large = winograd_error(weights(), 2), winograd_error(weights(), 4)
    assert 1e-8 < small < 3e-6
    assert small < large < 3e-5


def test_the_error_is_of_the_operator_whatever_the_scale_of_its_weights() -> None:
    assert winograd_error(weights() * 1024, 4) == pytest.approx(winograd_error(weights(), 4), rel=1e-3)
    assert winograd_error(weights() * 0, 4) == 0.0


def test_the_limit_leaves_what_is_within_it() -> None:
    canonical = canonicalize(nets.residual())
    graph = build_graph(canonical)
    spaces = enumerate_candidates(graph, builtin_space("llvm", lambda feature: feature == "avx512f"))
    errors = algorithm_errors(canonical, graph, spaces)
    assert errors
    assert {algorithm for _, algorithm in errors} == {"winograd2", "winograd4"}
    between = max(e for (_, a), e in errors.items() if a == "winograd2") * 1.01
    left = {c.algorithm for space in within(spaces, errors, between).values() for c in space.candidates}
    assert left == {"direct", "winograd2"}
    assert within(spaces, errors, 1.0) == spaces
    name = next(iter(errors))[0]
    assert any("of the range" in why for _, why in within(spaces, errors, between)[name].refused)


def test_a_limit_that_leaves_nothing_is_an_error() -> None:
    canonical = canonicalize(nets.residual())
    graph = build_graph(canonical)
    text = """
[target]
match = { kind = "llvm" }
blocks = [8]
[[rule]]
name = "all"
match = {}
layouts = ["NHWC@winograd4", "NHWC"]
"""
    spaces = enumerate_candidates(graph, parse_space(text, "test"))
    errors = algorithm_errors(canonical, graph, spaces)
    only = {n: replace(s, candidates=tuple(c for c in s.candidates if c.winograd)) for n, s in spaces.items()}
    name = next(iter(errors))[0]
    with pytest.raises(SpaceError, match=f"rule 'all' leaves {name} no candidate within an error of 1e-12"):
        within({name: only[name]}, errors, 1e-12)
