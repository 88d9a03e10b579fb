"""The demo's download: one wheel, nothing else, and a line when it fails."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from layoutsearch import demo
from layoutsearch.errors import ModelError


def serve(monkeypatch: pytest.MonkeyPatch, members: dict[str, bytes] | None, stderr: str = "") -> list[list[str]]:
    """Let `pip download` leave a wheel of these members behind, or fail; returns the commands it was given."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if members is not None:
            target = Path(command[command.index("--dest") + 1]) / "their-1-py3-none-any.whl"
            with zipfile.ZipFile(target, "w") as wheel:
                for name, content in members.items():
                    wheel.writestr(name, content)
        return subprocess.CompletedProcess(command, int(members is None), "", stderr)

    monkeypatch.setattr(demo.subprocess, "run", run)
    return commands


def test_models_are_taken_out_of_the_wheel_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    members = {f"rapidocr/models/{name}": name.encode() for name in demo.MODELS} | {"rapidocr/run.py": b"exit(1)"}
    commands = serve(monkeypatch, members)
    path = demo.fetch_demo_model(tmp_path / "models")
    assert path == tmp_path / "models" / demo.DETECTOR
    assert path.read_bytes() == demo.DETECTOR.encode()
    assert demo.fetch_demo_model(tmp_path / "models", demo.CLASSIFIER).read_bytes() == demo.CLASSIFIER.encode()
    assert len(commands) == 1
    assert {"--no-deps", demo.WHEEL} <= set(commands[0])
    assert sorted(entry.name for entry in path.parent.iterdir()) == sorted(demo.MODELS)


def test_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serve(monkeypatch, None, "WARNING: retrying\nERROR: No matching distribution found\n")
    assert demo.main(["--out", str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert "No matching distribution found" in output.err
    assert list(tmp_path.iterdir()) == []


def test_wheel_without_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    serve(monkeypatch, {"rapidocr/models/other.onnx": b""})
    with pytest.raises(ModelError, match=r"holds no .*other\.onnx"):
        demo.fetch_demo_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_main_prints_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / demo.DETECTOR).write_bytes(b"already here")
    commands = serve(monkeypatch, None)
    assert demo.main(["--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / demo.DETECTOR)
    assert commands == []
