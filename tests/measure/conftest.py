"""Tiny kernels and models, among them some that crash, leave or never return."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import tvm
from tvm import relax, te

SIZE = 4096

FAULTS = r"""
#include <dlpack/dlpack.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <tvm/ffi/c_api.h>
#include <unistd.h>

struct Group { void* sync; int32_t num_task; };
extern "C" int TVMBackendParallelLaunch(int (*task)(int, Group*, void*), void* data, int tasks);
static int count(int id, Group* group, void* data) {
  if (id == 0) *(int*)data = group->num_task;
  return 0;
}
static int threads() {
  int seen = 0;
  TVMBackendParallelLaunch(count, &seen, 0);
  return seen;
}
static int cores(pid_t process) {
  cpu_set_t set;
  sched_getaffinity(process, sizeof(set), &set);
  return CPU_COUNT(&set);
}

#define KERNEL(name, body) \
  extern "C" int __tvm_ffi_##name(void* self, const TVMFFIAny* args, int32_t n, TVMFFIAny* result) { body; return 0; }
KERNEL(segfault, *(volatile int*)8 = 1)
KERNEL(abort_, abort())
KERNEL(exit_zero, exit(0))
KERNEL(exit_one, _exit(1))
KERNEL(kill_itself, raise(SIGKILL))
KERNEL(hang, for (;;) { asm volatile(""); })
KERNEL(kill_server, { kill(getppid(), SIGKILL); for (;;) sleep(1); })
KERNEL(needs_1_thread, if (threads() != 1) abort())
KERNEL(needs_2_threads, if (threads() != 2) abort())
KERNEL(needs_3_threads, if (threads() != 3) abort())
KERNEL(needs_no_pinning, { threads(); if (cores(0) != cores(getppid())) abort(); })
"""
FAULT_NAMES = [line.split("(")[1].split(",")[0] for line in FAULTS.splitlines() if line.startswith("KERNEL(")]


def _faults() -> tvm.runtime.Module:
    return tvm.runtime._ffi_api.CSourceModuleCreate(FAULTS, "cc", FAULT_NAMES, [])


@pytest.fixture(scope="session")
def kernel_lib(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library with `add_one` (two tensors of SIZE floats), `gather` (floats, int32 indices, floats) and faults."""
    a = te.placeholder((SIZE,), name="a")
    add = te.compute((SIZE,), lambda i: a[i] + 1.0, name="add")
    index = te.placeholder((SIZE,), dtype="int32", name="index")
    gather = te.compute((SIZE,), lambda i: a[index[i]], name="gather")
    functions = {
        "add_one": te.create_prim_func([a, add]).with_attr("global_symbol", "add_one"),
        "gather": te.create_prim_func([a, index, gather]).with_attr("global_symbol", "gather"),
    }
    module = tvm.compile(tvm.IRModule(functions), target="llvm").mod
    module.import_module(_faults())
    path = tmp_path_factory.mktemp("kernels") / "kernels.so"
    module.export_library(str(path))
    return str(path)


def _export_model(path: Path, offset: float, extern: str | None = None) -> str:
    """x + offset and its relu, through an external function where one is named."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 16), "float32"))
    with builder.function("main", [x]):
        y = builder.emit(relax.op.add(x, relax.const(np.full((4, 16), offset, "float32"))))
        if extern:
            y = builder.emit(
                relax.call_dps_packed(extern, relax.Tuple([y]), out_ty=relax.TensorType((4, 16), "float32"))
            )
        builder.emit_func_output(relax.Tuple([y, relax.Tuple([relax.op.nn.relu(y)])]))
    executable = relax.build(builder.get(), target="llvm")
    if extern:
        executable.mod.import_module(_faults())
    executable.export_library(str(path))
    return str(path)


@pytest.fixture(scope="session")
def model_libs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Exported models: `one` and `two` add 1 and 2; `segfault` and `hang` do that."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "one": _export_model(folder / "one.so", 1.0),
        "two": _export_model(folder / "two.so", 2.0),
        "segfault": _export_model(folder / "segfault.so", 1.0, "segfault"),
        "hang": _export_model(folder / "hang.so", 1.0, "hang"),
    }


@pytest.fixture(scope="module", autouse=True)
def _no_process_left() -> Iterator[None]:
    """Every test file ends with the helper processes that it began with."""
    before = {child.pid for child in psutil.Process().children()}
    yield
    left = [child for child in psutil.Process().children() if child.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=5)
    assert not alive, f"left running: {alive}"
