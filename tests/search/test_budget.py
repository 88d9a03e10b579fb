"""Durations as users write them, and when a budget is over."""

from __future__ import annotations

import signal
import time

import pytest

from layoutsearch.errors import LayoutSearchError
from layoutsearch.search.budget import Budget, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90), ("8h", 28800), ("10m", 600), ("1h30m", 5400), ("2d", 172800), ("45", 45), ("0.5h", 1800),
        (" 5s ", 5), ("1h0m5s", 3605),
    ],
)  # fmt: skip
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "h8", "8 h", "5x", "-1s", "1e3", "0", "0s", "5 5", "5m5", "nan", "1:30"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(LayoutSearchError, match="--time-budget"):
        parse_duration(text)


def test_without_a_deadline() -> None:
    budget = Budget()
    assert budget.left_s == float("inf")
    assert not budget.over(1e9)


def test_a_deadline_and_what_is_kept_for_the_end() -> None:
    budget = Budget(1000.0)
    assert 990 < budget.left_s <= 1000
    assert not budget.over()
    assert budget.over(reserve_s=1001)
    assert Budget(1e-9).over()


def test_an_interrupt_is_seen_from_a_signal_handler() -> None:
    budget = Budget(1000.0)
    before = signal.signal(signal.SIGUSR1, lambda *_: budget.interrupt())
    try:
        signal.raise_signal(signal.SIGUSR1)
        time.sleep(0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert budget.interrupted
    assert budget.over()
