"""What a run shows while it goes on: bars on a terminal, lines in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from layoutsearch.cli.progress import left_text, reporter_for
from layoutsearch.search.budget import Budget
from layoutsearch.search.reporter import Reporter


def _use(reporter: Reporter) -> None:
    reporter.stage("load", 1)
    reporter.step("model: 3 layout-sensitive ops")
    reporter.stage("kernels, first tries", 40)
    for i in range(40):
        reporter.step(f"conv2d [{i}]+add+relu 1x64x56x56 k64x64x3x3 -> 1x64x56x56 NCHW16c,OIHW16i16o,NCHW16c")
    reporter.best("uniform NCHW16c validated")
    reporter.note("conv2d [bold]: build_error: something")
    reporter.stage("whole models", 50)
    reporter.step("interleaved")


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_bars(width: int) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, color_system=None)
    with reporter_for(console, Budget(100.0), quiet=False) as reporter:
        _use(reporter)
    text = file.getvalue()
    for words in (
        "kernels, first tries",
        "40/40",
        "s left",
        "best:",
        "note: conv2d [bold]: build_error: something",
    ):
        assert words in text, words
    if width >= 80:
        assert "conv2d [39]" in text
        assert "best: uniform" in text
    final = text.split("\x1b[?25h")[0].splitlines()[-3:]
    assert len(final) == 3
    assert final[-1].lstrip("\x1b[2K\r").startswith("whole models")


def test_lines_in_a_log() -> None:
    file = io.StringIO()
    with reporter_for(Console(file=file, width=80), Budget(), quiet=False) as reporter:
        _use(reporter)
    lines = file.getvalue().splitlines()
    assert "\x1b" not in file.getvalue()
    assert lines[0] == "load 1/1  model: 3 layout-sensitive ops"
    assert lines[1].startswith("kernels, first tries 1/40  conv2d [0]")
    assert lines[2] == "note: conv2d [bold]: build_error: something"
    assert lines[3] == "whole models 1/50  best: uniform NCHW16c validated  interleaved"
    assert len(lines) == 4


def test_quiet() -> None:
    for terminal in (True, False):
        file = io.StringIO()
        with reporter_for(Console(file=file, force_terminal=terminal), Budget(), quiet=True) as reporter:
            _use(reporter)
        assert file.getvalue() == ""


def test_an_error_before_the_first_stage_leaves_the_terminal_alone() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True)

    def fail() -> None:
        with reporter_for(console, Budget(), quiet=False):
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert file.getvalue() == ""


def test_the_time_left_in_words() -> None:
    assert left_text(Budget()) == ""
    assert left_text(Budget(90.2)) == "90 s left"
    assert left_text(Budget(600.5)) == "10 min left"
    assert left_text(Budget(8 * 3600.0)) == "8.0 h left"
    assert left_text(Budget(1e-9)) == "0 s left"
