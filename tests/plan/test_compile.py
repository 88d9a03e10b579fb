"""What compile writes runs with plain TVM, and compiling starts nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm

import layoutsearch
from layoutsearch.errors import PlanError, ToolchainError
from layoutsearch.plan.plan import LayoutPlan
from tests.models.plans import two_in_three_out
from tests.models.running import range_error, run_tvm

# layoutsearch is not importable: refused by name, should it be found at all.
LOADER = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "layoutsearch":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
import numpy as np
import tvm
from tvm import relax

machine = relax.VirtualMachine(tvm.runtime.load_module(sys.argv[1]), tvm.cpu())
inputs = np.load(sys.argv[2])
outputs = machine["main"](*(tvm.runtime.tensor(inputs[name]) for name in ("x", "x1")))
np.savez(sys.argv[3], *(out.numpy() for out in outputs))
assert not [name for name in sys.modules if name.startswith("layoutsearch")]
"""


def test_runs_where_layoutsearch_is_not_installed(module: tvm.IRModule, plan: LayoutPlan, tmp_path: Path) -> None:
    library = tmp_path / "out" / "model.so"
    layoutsearch.compile(module, plan, output=library)
    generator = np.random.default_rng(2)
    inputs = {"x": generator.normal(size=(1, 3, 16, 16)), "x1": generator.normal(size=(1, 16, 8, 8))}
    inputs = {name: value.astype("float32") for name, value in inputs.items()}
    np.savez(tmp_path / "inputs.npz", **inputs)
    done = subprocess.run(
        [sys.executable, "-c", LOADER, library, tmp_path / "inputs.npz", tmp_path / "outputs.npz"],
        capture_output=True, text=True, cwd=tmp_path, env={}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "outputs.npz") as found:
        outputs = [found[f"arr_{i}"] for i in range(3)]
    want = run_tvm(module, [inputs["x"], inputs["x1"]])
    assert [o.shape for o in outputs] == [(1, 8, 8), (1, 24, 4, 4), (1, 16)]
    assert max(range_error(got, w) for got, w in zip(outputs, want, strict=True)) < 1e-5


# What compiling may not do: start a process other than the linker, open a socket, or load what measures and searches.
WATCHER = """
import sys

started = []

def watch(event, args):
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
        started.append(str(args[0]))
    if event.startswith("socket.connect") or event == "socket.bind":
        raise AssertionError(event)

import layoutsearch
from layoutsearch.cli.main import cli

sys.addaudithook(watch)
cli(["compile", sys.argv[1], "--plan", sys.argv[2], "-o", sys.argv[3]], standalone_mode=False)
parts = tuple(f"layoutsearch.{part}" for part in ("search", "measure", "cost"))
forbidden = [m for m in sys.modules if m.startswith(parts)]
assert not forbidden, forbidden
assert len(started) == 1, started
print(started[0])
"""


def test_compiling_measures_nothing(module: tvm.IRModule, plan: LayoutPlan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    (tmp_path / "model.json").write_text(tvm.ir.save_json(module))
    arguments = [tmp_path / "model.json", tmp_path / "plan.json", tmp_path / "model.so"]
    done = subprocess.run([sys.executable, "-c", WATCHER, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model.so").stat().st_size > 0
    assert "g++" in done.stdout or "clang" in done.stdout or "cc" in done.stdout


def test_from_a_file_with_the_shapes_of_the_plan(module: tvm.IRModule, plan: LayoutPlan, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(tvm.ir.save_json(module))
    assert layoutsearch.compile(tmp_path / "model.json", plan) is not None


def test_other_inputs_are_named(plan: LayoutPlan) -> None:
    with pytest.raises(PlanError, match=r"plan's inputs \(x=1,3,16,16.*32"):
        layoutsearch.compile(two_in_three_out(size=32), plan)


def test_a_library_that_cannot_be_written(module: tvm.IRModule, plan: LayoutPlan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolchainError, match="cannot write") as caught:
        layoutsearch.compile(module, plan, output=tmp_path / "file" / "model.so")
    assert "\n" not in str(caught.value)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ToolchainError, match="cannot write"):
        layoutsearch.compile(module, plan, output=tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def test_a_plan_is_data_for_other_tools(plan: LayoutPlan) -> None:
    assert json.loads(json.dumps(plan.to_json(), allow_nan=False)) == plan.to_json()
