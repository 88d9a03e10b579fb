"""TVM's own tests of ConvertLayout hold with our layout inference installed; the file is theirs and stays there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

VARIABLE = "LAYOUTSEARCH_TVM_TESTS"
FILE = "tests/python/relax/test_transform_convert_layout.py"
HOW = (
    f"{VARIABLE} is not set; get TVM's tests with `git clone --depth 1 --branch v0.27.0 https://github.com/apache/tvm` "
    f"and run again with {VARIABLE} set to the path of the clone (or of its {FILE})"
)
ROOT = Path(__file__).resolve().parents[2]
TESTS = 75


def suite() -> Path:
    given = os.environ.get(VARIABLE)
    if not given:
        pytest.skip(HOW)
    path = Path(given).resolve()
    path = path / FILE if path.is_dir() else path
    assert path.is_file(), f"{VARIABLE} names {given}, where there is no {FILE}"
    return path


@pytest.mark.slow
def test_convert_layout_of_tvm(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.materialize.inference_plugin",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-c", os.devnull, "--rootdir", str(tmp_path), f"--junitxml={report}", str(suite())]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    (found,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {key: int(found.attrib[key]) for key in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": TESTS, "failures": 0, "errors": 0, "skipped": 0}
