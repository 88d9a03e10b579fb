"""Who proposes the next schedules of a kernel."""

from __future__ import annotations

import pytest

from layoutsearch.errors import LayoutSearchError
from layoutsearch.measure.records import canonical_json
from layoutsearch.measure.results import Measurement, Status
from layoutsearch.search.known import Known
from layoutsearch.search.tuners import NO_MORE, PROPOSALS, KernelTuner

OK = Measurement(Status.OK, (5.0,))


def known(*templates: str, spent: bool = False) -> Known:
    """Schedules of these templates, all different, that were tried."""
    tries = {
        canonical_json({"template": name, "version": 1, "params": {"n": i}}): OK for i, name in enumerate(templates)
    }
    return Known(tries, spent=spent)


@pytest.mark.parametrize(
    ("tuner", "have", "missing", "shares"),
    [
        ("template", known(), 4, (4, 0)),
        ("template", known("loops", spent=True), 3, (3, 0)),
        # The first shows what the kernel is.
        ("both", known(), 4, (1, 0)),
        ("metaschedule", known(), 4, (1, 0)),
        ("metaschedule", known("loops", spent=True), 3, (0, 3)),
        ("metaschedule", known("channels"), 3, (3, 0)),
        ("metaschedule", known("channels", spent=True), 3, (0, 0)),
        ("both", known("channels"), 1, (0, 1)),
        ("both", known("channels"), 3, (1, 2)),
        ("both", known("channels", "metaschedule"), 4, (2, 2)),
        ("both", known("channels", "channels", "channels", "metaschedule"), 2, (0, 2)),
        ("both", known("flat", spent=True), 3, (0, 3)),
        ("both", known("reshape", spent=True), 3, (0, 0)),
        ("both", known("stack", spent=True), 3, (0, 0)),
        ("both", known("flat", *["metaschedule"] * (PROPOSALS - 1), spent=True), 9, (0, 1)),
        ("both", known("flat", *["metaschedule"] * PROPOSALS, spent=True), 9, (0, 0)),
    ],
)
def test_shares(tuner: str, have: Known, missing: int, shares: tuple[int, int]) -> None:
    assert KernelTuner.named(tuner).shares(have, missing) == shares


def test_a_search_that_is_over_is_not_asked_again() -> None:
    have = known("channels", "metaschedule")
    assert KernelTuner.BOTH.goes_on(have)
    have.tries[NO_MORE] = Measurement(Status.BUILD_CRASH, (), "killed by SIGSEGV")
    assert not KernelTuner.BOTH.goes_on(have)
    assert KernelTuner.BOTH.shares(have, 2) == (2, 0)


def test_an_unknown_tuner() -> None:
    with pytest.raises(LayoutSearchError, match=r"--kernel-tuner 'ansor' is unknown; expected one of template, meta"):
        KernelTuner.named("ansor")
