"""Where oneDNN is not installed, tests of it are skipped; where it is, modules with its kernels are built and run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

from layoutsearch.contrib.onednn.library import require
from layoutsearch.errors import ToolchainError
from layoutsearch.materialize.library import link_input
from layoutsearch.materialize.lower import lower
from layoutsearch.plan.apply import schedule_kernels
from layoutsearch.plan.compile import build_executable
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.toolchain import export
from tests.models.running import native_target

THREADS = 2


def why_skipped() -> str:
    """Why oneDNN cannot be used here; empty where it can."""
    try:
        require()
    except ToolchainError as error:
        return str(error)
    return ""


needs_onednn = pytest.mark.skipif(bool(why_skipped()), reason=why_skipped() or "oneDNN is here")


def run_linked(module: tvm.IRModule, inputs: list[np.ndarray], folder: Path) -> list[np.ndarray]:
    """Outputs of a converted module, exported as a shared library and loaded again."""
    target = native_target()
    lowered = lower(module, target)
    scheduled, slow = schedule_kernels(lowered, {}, TargetInfo.from_target(target, THREADS))
    assert not slow
    path = folder / f"{len(list(folder.iterdir()))}.so"
    export(build_executable(scheduled, target), path, target, link_input(scheduled, target))
    result = relax.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())["main"](
        *(tvm.runtime.tensor(x) for x in inputs)
    )
    outputs = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    return [output.numpy() for output in outputs]
