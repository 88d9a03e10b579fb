"""Run the command line: in a process of its own, or in this one where only its words matter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from layoutsearch.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
MODULE = [sys.executable, "-m", "layoutsearch.cli.main"]

# Few candidates, so that tuning takes seconds.
SPACE = """
[target]
match = { kind = "llvm" }
blocks = [8]

[[rule]]
name = "everything"
match = {}
layouts = ["NCHW", "NCHW{b}c"]
"""


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **extra}


def command(*args: object) -> list[str]:
    return [*MODULE, *map(str, args)]


def run(*args: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`layoutsearch ARGS` to its end."""
    return subprocess.run(
        command(*args), capture_output=True, text=True, timeout=300, env=dict(env) if env else environment()
    )


def last_json(text: str) -> dict[str, Any]:
    """The object on the last line of standard output."""
    found = json.loads(text.rstrip("\n").splitlines()[-1])
    assert isinstance(found, dict)
    return found


def call(capfd: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """`layoutsearch ARGS` in this process: exit code, standard output, standard error."""
    capfd.readouterr()
    code = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["layoutsearch", *map(str, args)])
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
    out, err = capfd.readouterr()
    return code, out, err


def refused(capfd: pytest.CaptureFixture[str], *args: object) -> str:
    """The one line on standard error of a command that must be refused with exit code 2."""
    code, out, err = call(capfd, *args)
    assert code == 2, (code, out, err)
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("layoutsearch: ")
    return lines[0]
