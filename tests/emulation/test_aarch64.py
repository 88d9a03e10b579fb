"""Cross-compiled for AArch64 and run over RPC on an emulated board, as on a real one; see `board`.

Nothing here is about speed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

from layoutsearch.errors import ToolchainError
from layoutsearch.measure.device import Device
from layoutsearch.measure.kernels import KernelCall, TensorSpec
from layoutsearch.measure.results import Status
from layoutsearch.measure.tracker import TrackerClient
from layoutsearch.model.load import load
from layoutsearch.model.samples import sample_inputs
from layoutsearch.plan.compile import compile
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.targets import as_target, local_architecture
from layoutsearch.toolchain import export, require_toolchain
from tests.cli.running import SPACE, environment, last_json, run
from tests.emulation import board
from tests.models import nets
from tests.models.plans import make_plan
from tests.models.running import range_error, run_tvm
from tests.schedule.kernels import compile_kernel

KEY = "arm64"
SHIPPED = Path(__file__).resolve().parents[2] / "search_spaces" / "arm_neon.toml"
TARGET = as_target(json.loads(board.TARGET))
# Of an output's range; F(4x4,3x3) takes a tenth of it.
TOLERANCE = 1e-4
_START_S = 240
_AARCH64_ELF = 183
_LIMIT_S = 900

PINNED = """
[target]
match = { kind = "llvm", feature = "neon" }
blocks = [4, 8]

[[rule]]
name = "stem"
match = { op = "nn.conv2d", in_channels = 3 }
layouts = ["NCHW->NCHW8c"]

[[rule]]
name = "packed winograd"
match = { op = "nn.conv2d", in_channels = 16 }
layouts = ["NCHW8c->NCHW4c@winograd2"]

[[rule]]
name = "depthwise"
match = { op = "nn.conv2d", depthwise = true }
layouts = ["NCHW4c"]

[[rule]]
name = "winograd"
match = { op = "nn.conv2d", in_channels = 24 }
layouts = ["NHWC@winograd4"]

[[rule]]
name = "pointwise"
match = { op = "nn.conv2d", pointwise = true }
layouts = ["NCHW8c->NCHW4c"]

[[rule]]
name = "odd channels"
match = { op = "nn.conv2d", out_channels = 15 }
layouts = ["NHWC"]

[[rule]]
name = "transposed"
match = { op = "nn.conv2d_transpose" }
layouts = ["NHWC"]

[[rule]]
name = "everything else"
match = {}
layouts = ["NCHW", "NHWC", "NCHW{b}c"]
"""

pytestmark = pytest.mark.slow


def every_kind() -> tvm.IRModule:
    """Dense, depthwise, pointwise, grouped and transposed convolutions, to 15 and 9 channels at the end."""

    def body(n: nets.Net, x: relax.Expr) -> relax.Expr:
        x = n.conv_relu(n.conv_relu(x, 16), 24)
        x = n.conv_relu(n.conv_relu(n.relu(n.depthwise(x)), 40), 20, 1)
        x = n.conv_relu(n.conv_relu(x, 22, stride=2, groups=2), 15)
        y = relax.op.nn.conv2d_transpose(x, n.const((15, 9, 3, 3), 0.1), strides=2, padding=1, output_padding=1)
        return n.emit(relax.op.add(n.emit(y), n.const((1, 9, 1, 1), 0.1)))

    return nets.build((1, 3, 17, 22), body=body)


@contextmanager
def _started(command: list[str], log: Path) -> Iterator[int]:
    """A tracker or server, and the port it announces."""
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment(), start_new_session=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            said = process.stdout.readline().split()
            assert said, log.read_text()
            yield int(said[1])
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="module")
def tracker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a tracker that has the emulated board."""
    if local_architecture() == "aarch64":
        pytest.skip("this machine is AArch64 itself")
    root = board.place()
    if reason := board.why_missing(root):
        pytest.skip(reason)
    try:
        require_toolchain(TARGET)
    except ToolchainError as error:
        pytest.skip(str(error))
    logs = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        module = [sys.executable, "-m", "layoutsearch.measure.tracker", "--port", "0"]
        address = f"127.0.0.1:{stack.enter_context(_started(module, logs / 'tracker'))}"
        options = ("--port", "0", "--tracker", address, "--key", KEY, "--threads", "2")
        stack.enter_context(_started(board.serve(root, *options), logs / "server"))
        deadline = time.monotonic() + _START_S
        while not TrackerClient(address).summary().free.get(KEY):
            assert time.monotonic() < deadline, (logs / "server").read_text()
            time.sleep(0.2)
        yield address


@dataclass(frozen=True)
class Files:
    """A model on disk, its inputs, and what it gives on this machine without layoutsearch."""

    folder: Path
    model: Path
    inputs: list[np.ndarray]
    want: list[np.ndarray]

    def worst(self, got: tuple[np.ndarray, ...]) -> float:
        return max(range_error(g, w) for g, w in zip(got, self.want, strict=True))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("emulation")
    module = every_kind()
    model = folder / "every_kind.json"
    model.write_text(tvm.ir.save_json(module))
    loaded = load(module)
    inputs = sample_inputs(loaded.inputs, 3)
    return Files(folder, model, inputs, run_tvm(module, inputs))


def test_blocked_layouts_and_winograd_are_right_on_the_board(tracker: str, files: Files) -> None:
    space, plan_path, library = (files.folder / name for name in ("pinned.toml", "pinned.json", "pinned.so"))
    space.write_text(PINNED)
    plan = make_plan(every_kind(), TARGET, space=space)
    plan.save(plan_path)
    convolutions = [op for op in plan.ops if op.kind.startswith("conv")]
    chosen = [op.choice for op in convolutions if op.choice]
    assert len(chosen) == 8
    assert {op.kind for op in convolutions} >= {
        "conv2d", "conv2d_depthwise", "conv2d_pointwise", "conv2d_grouped", "conv2d_transpose",
    }  # fmt: skip
    assert {choice.algorithm for choice in chosen} == {"direct", "winograd2", "winograd4"}
    assert {str(choice.data) for choice in chosen} == {"NCHW", "NCHW4c", "NCHW8c", "NHWC"}

    done = run("compile", files.model, "--plan", plan_path, "--target", board.TARGET, "-o", library)
    assert done.returncode == 0, done.stderr
    assert int.from_bytes(library.read_bytes()[18:20], "little") == _AARCH64_ELF
    with Device.remote(tracker, KEY, 2) as device:
        assert files.worst(device.run_model(str(library), files.inputs, _LIMIT_S)) <= TOLERANCE

    done = run("check", files.model, "--plan", plan_path, "--rpc", tracker, "--device-key", KEY, "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    assert last_json(done.stdout)["ok"] is True


NETS = {
    "residual": nets.residual,
    "concat": nets.concat_branches,
    "pool": nets.conv_pool_conv,
    "grouped": nets.grouped,
    "transposed in two groups": lambda: nets.transposed(groups=2),
    "mean over channels": nets.channel_mean,
    "dense": nets.classifier,
}


@pytest.mark.parametrize("net", NETS)
def test_any_plan_of_the_shipped_space_is_right_on_the_board(tracker: str, tmp_path: Path, net: str) -> None:
    module = NETS[net]()
    loaded = load(module)
    inputs = sample_inputs(loaded.inputs, 3)
    want = run_tvm(module, inputs)
    with Device.remote(tracker, KEY, 2) as device:
        for seed in range(3):
            library = tmp_path / f"{seed}.so"
            compile(module, make_plan(module, TARGET, space=SHIPPED, seed=seed), output=library)
            got = device.run_model(str(library), inputs, _LIMIT_S)
            assert max(range_error(g, w) for g, w in zip(got, want, strict=True)) <= TOLERANCE


def test_tune_ends_with_a_plan_that_is_right(tracker: str, files: Files) -> None:
    space, out = files.folder / "few.toml", files.folder / "tuned"
    space.write_text(SPACE)
    where = ["--rpc", tracker, "--device-key", KEY]
    budget = ["--space", space, "--trials", 1, "--threads", 2, "--time-budget", "20s"]
    done = run("tune", files.model, "--target", board.TARGET, *where, *budget, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    result = last_json(done.stdout)
    assert result["failures"] == {}
    plan = LayoutPlan.load(out / "plan.json")
    assert plan.device["key"] == KEY
    # Not the host's name and instruction sets, which emulators show.
    assert plan.device["cpu"].startswith("aarch64 emulated") or plan.device["cpu"].startswith("arm ")
    assert not [feature for feature in plan.device["features"] if feature.startswith(("avx", "sse"))]

    library = files.folder / "tuned.so"
    done = run("compile", files.model, "--plan", out / "plan.json", "-o", library)
    assert done.returncode == 0, done.stderr
    with Device.remote(tracker, KEY, 2) as device:
        assert files.worst(device.run_model(str(library), files.inputs, _LIMIT_S)) <= TOLERANCE
    done = run("check", files.model, "--plan", out / "plan.json", *where, "--json")
    assert done.returncode == 0, done.stderr + done.stdout


def test_one_thread_of_two_and_a_kernel_that_crashes(tracker: str, files: Files) -> None:
    library = files.folder / "faults.so"
    kernels = {name: _kernel(call) for name, call in (("works", "fabsf"), ("dies", "abort"))}
    export(compile_kernel(kernels["works"], TARGET), library, TARGET)
    spec = TensorSpec((33,))
    with Device.remote(tracker, KEY, 1, acquire_s=60) as device:
        (fine,) = device.time_kernels(str(library), [KernelCall("main", (spec, spec))], timeout_s=60)
        assert fine.ok, fine.error
        export(compile_kernel(kernels["dies"], TARGET), library, TARGET)
        (died,) = device.time_kernels(str(library), [KernelCall("main", (spec, spec))], timeout_s=60)
        assert died.status is Status.CRASH
        assert "SIGABRT" in died.error
        assert device.identity().threads == 1


def _kernel(function: str) -> tvm.tirx.PrimFunc:
    """`function`, of the C library, of each of 33 numbers."""
    x = tvm.te.placeholder((33,), name="x")
    y = tvm.te.compute((33,), lambda i: tvm.tirx.call_extern("float32", function, x[i]), name="y")
    return tvm.te.create_prim_func([x, y])


def test_a_board_of_another_kind_than_the_target_is_refused(tracker: str, files: Files) -> None:
    done = run("tune", files.model, "--rpc", tracker, "--device-key", KEY, "--threads", 2, "--out", files.folder / "no")
    assert done.returncode == 2
    (line,) = [said for said in done.stderr.splitlines() if said.startswith("layoutsearch: ")]
    assert "aarch64" in line
    assert local_architecture() in line
    assert "--target" in line
