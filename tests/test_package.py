"""The package as it is imported: pins, public names, and what production has to load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import layoutsearch
from layoutsearch._pins import PINS, PinError, check_pins

ROOT = Path(__file__).resolve().parents[1]


def _python(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, [*paths, ROOT]))
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": path}
    )


def test_the_pins_hold_here() -> None:
    check_pins()


def test_the_pins_are_those_of_the_distribution() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert all(f'"{name}=={version}"' in text for name, version in PINS.items())


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"apache-tvm-ffi": "0.0.1"}, ["apache-tvm-ffi==0.0.1 is needed", "0.1.14.post1 is installed"]),
        ({"no-such-distribution": "1.0"}, ["no-such-distribution==1.0 is needed", "nothing is installed"]),
    ],
)
def test_a_broken_pin_says_what_to_run(pins: dict[str, str], words: list[str]) -> None:
    with pytest.raises(PinError) as caught:
        check_pins(pins)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words)
    assert f"pip install {next(iter(pins))}==" in message


def test_another_ffi_stops_the_import_before_it_can_crash(tmp_path: Path) -> None:
    info = tmp_path / "apache_tvm_ffi-0.1.15.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: apache-tvm-ffi\nVersion: 0.1.15\n")
    done = _python("import sys\ntry:\n import layoutsearch\nfinally:\n print('tvm' in sys.modules)", tmp_path)
    assert done.returncode == 1
    assert done.stdout.strip() == "False"
    last = done.stderr.strip().splitlines()[-1]
    assert "apache-tvm-ffi==0.1.14.post1 is needed, 0.1.15 is installed" in last
    assert "pip install" in last


def test_the_command_line_says_it_in_one_line(tmp_path: Path) -> None:
    info = tmp_path / "apache_tvm_ffi-0.1.15.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: apache-tvm-ffi\nVersion: 0.1.15\n")
    done = subprocess.run(
        [sys.executable, "-m", "layoutsearch", "explain", "plan.json"], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
    )  # fmt: skip
    assert done.returncode != 0
    assert "0.1.15 is installed" in done.stderr.strip().splitlines()[-1]


def test_public_names() -> None:
    for name in layoutsearch.__all__:
        assert getattr(layoutsearch, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'tun'"):
        _ = layoutsearch.tun


def test_importing_the_package_loads_nothing_heavy() -> None:
    done = _python("import sys, layoutsearch; print([m for m in ('tvm', 'numpy', 'onnx') if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


def test_applying_a_plan_loads_neither_search_nor_measuring() -> None:
    done = _python(
        "import sys, layoutsearch\n"
        "layoutsearch.ApplyPlan, layoutsearch.LayoutPlan, layoutsearch.compile, layoutsearch.pipeline\n"
        "parts = ('layoutsearch.search', 'layoutsearch.measure', 'layoutsearch.cost', 'sqlalchemy', 'scipy')\n"
        "print([m for m in sys.modules if m.startswith(parts)])"
    )
    assert done.stdout.strip() == "[]", done.stderr
