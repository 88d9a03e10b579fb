"""Whatever a user can get wrong: exit code 2 and one line that says what, on standard error."""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.plan.schema import digests
from layoutsearch.targets import as_target, local_architecture
from tests.cli.running import environment, refused, run
from tests.models.plans import make_plan, two_in_three_out

Capture = pytest.CaptureFixture[str]


def _compile(files: Path, tmp_path: Path, model: str = "outputs.json", plan: object = "plan.json") -> list[object]:
    return ["compile", files / model, "--plan", files / str(plan), "-o", tmp_path / "model.so"]


@pytest.mark.parametrize("command", ["compile", "check"])
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("residual.json", ["x1"]),
        ("stem.json", ["x1"]),
        ("outputs_stride.json", ["x1", "8"]),
        ("outputs_wide.json", ["op conv2d", "the model changed"]),
    ],
)
def test_a_plan_of_another_model(
    files: Path, tmp_path: Path, capfd: Capture, command: str, model: str, words: list[str]
) -> None:
    args = [command, files / model, "--plan", files / "plan.json"]
    line = refused(capfd, *args, *(["-o", tmp_path / "m.so"] if command == "compile" else []))
    assert all(word in line for word in words), line
    assert not (tmp_path / "m.so").exists()


def test_another_target(files: Path, tmp_path: Path, capfd: Capture) -> None:
    line = refused(capfd, *_compile(files, tmp_path), "--target", "llvm -mcpu=core2")
    assert "mcpu" in line
    assert "core2" in line


@pytest.mark.parametrize("command", ["tune", "check", "calibrate", "bench model"])
def test_code_for_another_instruction_set_has_no_device_here(
    files: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    here = local_architecture()
    other = "x86_64" if here == "aarch64" else "aarch64"
    # Any linker: nothing is built.
    monkeypatch.setenv("LAYOUTSEARCH_CXX", sys.executable)
    target = json.dumps({"kind": "llvm", "mtriple": f"{other}-linux-gnu"})
    foreign = tmp_path / "foreign.json"
    make_plan(two_in_three_out(), as_target(json.loads(target))).save(foreign)
    args: dict[str, list[object]] = {
        "tune": ["tune", files / "stem.json", "--target", target, "--threads", 1, "--out", tmp_path / "out", "--quiet"],
        "check": ["check", files / "outputs.json", "--plan", foreign],
        "calibrate": ["device", "calibrate", "--target", target, "--threads", 1],
        "bench model": ["bench", "model", files / "outputs.json", "--plan", foreign, "--against", "tvm"],
    }
    line = refused(capfd, *args[command])
    assert here in line
    assert other in line
    assert ("--rpc" in line) == (command != "bench model")


def test_the_same_target_in_other_words(files: Path, tmp_path: Path, plan: LayoutPlan) -> None:
    done = run(*_compile(files, tmp_path), "--target", json.dumps(dict(plan.target)))
    assert done.returncode == 0, done.stderr


def _edit(files: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    data = json.loads((files / "plan.json").read_text())
    change(data)
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(data))
    return path


def _layout(data: dict[str, Any]) -> None:
    next(op for op in data["ops"] if op["data_layout"] == "NCHW8c")["data_layout"] = "NCHW4c"


def _schedule(data: dict[str, Any]) -> None:
    params = next(op["schedule"]["params"] for op in data["ops"] if op["schedule"] and op["schedule"]["params"])
    params[next(k for k, v in params.items() if isinstance(v, int))] += 1


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "'tool'": lambda d: d["tool"].update(tvm="0.26"),
    "'target'": lambda d: d["target"].update(mcpu="haswell"),
    "'device'": lambda d: d["device"].update(threads=9),
    "'model'": lambda d: d["model"].update(name="other"),
    "'ops'": _layout,
    "'ops' ": _schedule,
    "'transforms'": lambda d: d["transforms"][0].update(bytes=1),
    "'objective'": lambda d: d["objective"].update(gap=0.5),
    "'validation'": lambda d: d["validation"].update(speedup=3.0),
    "layoutsearch.plan/2": lambda d: d.update(schema="layoutsearch.plan/2"),
    "'objective' is a required property": lambda d: d.pop("objective"),
}


@pytest.mark.parametrize("named", EDITS)
@pytest.mark.parametrize("command", ["compile", "check", "explain"])
def test_an_edited_plan(files: Path, tmp_path: Path, capfd: Capture, command: str, named: str) -> None:
    path = _edit(files, tmp_path, EDITS[named])
    args: dict[str, list[object]] = {
        "compile": [files / "outputs.json", "--plan", path, "-o", tmp_path / "m.so"],
        "check": [files / "outputs.json", "--plan", path],
        "explain": [path],
    }
    assert named.strip() in refused(capfd, command, *args[command])


def test_an_edited_plan_with_new_digests_is_still_checked(files: Path, tmp_path: Path, capfd: Capture) -> None:
    """Digests show accidents; what the plan says is checked against the model all the same."""

    def change(data: dict[str, Any]) -> None:
        data["transforms"].pop()
        data["digests"] = digests(data)

    path = _edit(files, tmp_path, change)
    line = refused(capfd, *_compile(files, tmp_path, plan=path))
    assert "transform" in line

    def illegal(data: dict[str, Any]) -> None:
        _layout(data)
        data["digests"] = digests(data)

    assert "op " in refused(capfd, *_compile(files, tmp_path, plan=_edit(files, tmp_path, illegal)))


def test_truncated_missing_and_foreign_plans(files: Path, tmp_path: Path, capfd: Capture) -> None:
    short = tmp_path / "short.json"
    short.write_text((files / "plan.json").read_text()[:-40])
    assert "not complete JSON" in refused(capfd, *_compile(files, tmp_path, plan=short))
    assert "No such file" in refused(capfd, *_compile(files, tmp_path, plan="none.json"))
    assert "is not a layout plan" in refused(capfd, "explain", files / "stem.json")
    assert "plan" in refused(capfd, "explain", files)


def _dynamic(path: Path) -> Path:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, "height", 8])
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "g",
        [value],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


@pytest.mark.parametrize("command", ["tune", "compile", "check"])
def test_models_that_cannot_be_read(files: Path, tmp_path: Path, capfd: Capture, command: str) -> None:
    rest: dict[str, list[object]] = {
        "tune": ["--quiet", "--out", tmp_path / "out"],
        "compile": ["--plan", files / "plan.json", "-o", tmp_path / "m.so"],
        "check": ["--plan", files / "plan.json"],
    }
    noise = tmp_path / "noise.onnx"
    noise.write_bytes(os.urandom(512))
    text = tmp_path / "text.json"
    text.write_text('{"nodes": 3}')
    for path, words in {
        tmp_path / "none.onnx": "no such file",
        noise: "noise.onnx",
        text: "text.json",
        tmp_path: "no such file",
    }.items():
        assert words in refused(capfd, command, path, *rest[command])


def test_shapes(files: Path, tmp_path: Path, capfd: Capture) -> None:
    model = _dynamic(tmp_path / "dynamic.onnx")
    line = refused(capfd, "tune", model, "--quiet")
    assert "x (batch,3,height,8)" in line
    assert "--shape x=" in line
    assert "no input" in refused(capfd, "tune", model, "--quiet", "--shape", "y=1,3,8,8")
    assert "dimensions" in refused(capfd, "tune", model, "--quiet", "--shape", "x=1,3")
    assert "NAME=" in refused(capfd, "tune", model, "--quiet", "--shape", "x:1,3,8,8")
    assert "NAME=" in refused(capfd, "tune", model, "--quiet", "--shape", "x=1,3,0,8")
    assert "extent 32" in refused(capfd, "tune", files / "stem.json", "--quiet", "--shape", "x=1,3,32,16")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("match = {}", 'match = { op = "nn.conv9d" }'), ["nn.conv9d"]),
        (("layouts", "layuots"), ["line 9", "layuots"]),
        (("NCHW{b}c", "NCHW{q}c"), ["NCHW{q}c"]),
        (("[8]", "[eight]"), ["not valid TOML", "line 4"]),
        (("match = {}", 'match = { op = "nn.relu" }'), ["no rule matches"]),
    ],
)
def test_search_spaces(files: Path, tmp_path: Path, capfd: Capture, change: tuple[str, str], words: list[str]) -> None:
    path = tmp_path / "space.toml"
    path.write_text((files / "space.toml").read_text().replace(*change))
    line = refused(capfd, "tune", files / "stem.json", "--space", path, "--quiet", "--out", tmp_path / "out")
    assert all(word in line for word in ["space.toml", *words]), line


@pytest.mark.parametrize("budget", ["soon", "8 hours", "-5s", "0s", "5x", ""])
def test_time_budgets(files: Path, tmp_path: Path, capfd: Capture, budget: str) -> None:
    line = refused(capfd, "tune", files / "stem.json", "--time-budget", budget, "--out", tmp_path / "out", "--quiet")
    assert "--time-budget" in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--trials", "0"], ["--trials"]),
        (["--threads", "none"], ["--threads"]),
        (["--no-such-option"], ["--no-such-option"]),
        (["--target", "nonsense"], ["--target", "nonsense"]),
        (["--target", "llvm -mcpu=nonsense"], ["nonsense"]),
        (["--target", "llvm -mcpu"], ["-mcpu"]),
        (["--target", '{"kind": "llvm"'], ["--target", "JSON"]),
        (["--target", '{"kind": 5}'], ["--target"]),
        (["--target", "opencl"], ["search space", "opencl"]),
        (["--space", "/nonexistent/space.toml"], ["/nonexistent/space.toml"]),
        (["--rpc", "127.0.0.1:9190"], ["--rpc", "--device-key"]),
        (["--device-key", "board"], ["--rpc", "--device-key"]),
        (["--rpc", "nowhere", "--device-key", "board"], ["nowhere", "HOST:PORT"]),
        (["--rpc", "127.0.0.1:1", "--device-key", "board"], ["127.0.0.1:1"]),
        (["--resume"], ["--resume", "no run"]),
    ],
)
def test_options(files: Path, tmp_path: Path, capfd: Capture, options: list[str], words: list[str]) -> None:
    line = refused(capfd, "tune", files / "stem.json", "--quiet", "--out", tmp_path / "out", *options)
    assert all(word in line for word in words), line


def test_commands_without_what_they_need(files: Path, capfd: Capture) -> None:
    assert "--plan" in refused(capfd, "compile", files / "stem.json")
    assert "MODEL" in refused(capfd, "tune")
    assert "nonsense" in refused(capfd, "nonsense")
    assert "--device-key" in refused(
        capfd, "check", files / "outputs.json", "--plan", files / "plan.json", "--rpc", "127.0.0.1:1"
    )


def test_places_that_cannot_be_written(files: Path, tmp_path: Path, capfd: Capture) -> None:
    (tmp_path / "file").write_text("")
    line = refused(capfd, "tune", files / "stem.json", "--quiet", "--out", tmp_path / "file" / "out")
    assert "--out" in line
    assert str(tmp_path / "file" / "out") in line
    args = ["compile", files / "outputs.json", "--plan", files / "plan.json", "-o", tmp_path / "file" / "model.so"]
    assert "cannot write" in refused(capfd, *args)


@pytest.mark.parametrize("damage", ["text", "torn", "foreign"])
def test_a_damaged_record_store(files: Path, tmp_path: Path, capfd: Capture, damage: str) -> None:
    records = tmp_path / "records.sqlite"
    if damage == "text":
        records.write_text("not a database, and long enough to be none " * 100)
    elif damage == "torn":
        from layoutsearch.measure.records import RecordStore

        with RecordStore(records):
            pass
        data = bytearray(records.read_bytes())
        data[4096:] = os.urandom(len(data) - 4096)
        records.write_bytes(data)
    else:
        import sqlite3

        with sqlite3.connect(records) as connection:
            connection.execute("CREATE TABLE other (x)")
        connection.close()
    args = ["--records", records, "--space", files / "space.toml", "--quiet", "--out", tmp_path / "out"]
    line = refused(capfd, "tune", files / "stem.json", *args)
    assert str(records) in line
    assert "record file" in line


def _without_compiler(tmp_path: Path, **extra: str) -> dict[str, str]:
    empty = tmp_path / "bin"
    empty.mkdir()
    found = environment(PATH=str(empty), **extra)
    return {k: v for k, v in found.items() if k not in ("CC", "CXX")}


@pytest.mark.parametrize("command", ["tune", "compile", "check"])
def test_no_c_compiler(files: Path, tmp_path: Path, command: str) -> None:
    rest: dict[str, list[object]] = {
        "tune": ["--out", tmp_path / "out"],
        "compile": ["--plan", files / "plan.json", "-o", tmp_path / "m.so"],
        "check": ["--plan", files / "plan.json"],
    }
    hidden = "import sys; sys.modules['ziglang'] = None"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    env = _without_compiler(tmp_path)
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    done = run(command, files / "outputs.json", *rest[command], env=env)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "no C compiler found" in line
    assert "apt install gcc" in line
    assert "layoutsearch[zig]" in line


def test_zig_links_where_there_is_no_c_compiler(files: Path, tmp_path: Path) -> None:
    """A package of that name that hands its arguments to the compiler of this machine, and says that it was asked."""
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler to stand in for zig")
    package = tmp_path / "ziglang"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import os, subprocess, sys\n"
        "assert sys.argv[1] == 'cc'\n"
        f"open({str(tmp_path / 'asked')!r}, 'w').close()\n"
        f"path = {os.environ['PATH']!r}\n"
        f"sys.exit(subprocess.call([{compiler!r}, *sys.argv[2:]], env={{**os.environ, 'PATH': path}}))\n"
    )
    env = _without_compiler(tmp_path)
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    done = run(*_compile(files, tmp_path), env=env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "asked").exists()
    assert (tmp_path / "model.so").read_bytes()[:4] == b"\x7fELF" or sys.platform != "linux"


def test_a_linker_that_fails_is_one_line(files: Path, tmp_path: Path) -> None:
    fake = tmp_path / "bad-c++"
    fake.write_text("#!/bin/sh\necho something >&2\necho cannot find -lgomp >&2\nexit 1\n")
    fake.chmod(0o755)
    done = run(*_compile(files, tmp_path), env=environment(CXX=str(fake)))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "cannot find -lgomp" in line
    assert not (tmp_path / "model.so").exists()


def test_a_copy_of_the_plan_is_as_good(files: Path, plan: LayoutPlan) -> None:
    assert LayoutPlan.from_json(copy.deepcopy(plan.to_json())) == plan


@pytest.mark.parametrize("command", ["tune", "check"])
def test_a_limit_that_nothing_compares_with(files: Path, tmp_path: Path, capfd: Capture, command: str) -> None:
    args = {
        "tune": ["tune", files / "stem.json", "--out", tmp_path / "out"],
        "check": ["check", files / "outputs.json", "--plan", files / "plan.json"],
    }
    assert "--max-rel-error" in refused(capfd, *args[command], "--max-rel-error", "nan")
    assert not (tmp_path / "out").exists()
