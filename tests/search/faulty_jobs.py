"""Build jobs as the real ones, with faults put into kernels of the layout NCHW8c."""

from __future__ import annotations

import os
import signal

from layoutsearch.search import jobs
from layoutsearch.search.jobs import BuiltKernels, KernelJob, PlanJob

FAULTS = r"""
#include <stdlib.h>
#include <tvm/ffi/c_api.h>
#define KERNEL(name, body) \
  extern "C" int __tvm_ffi_##name(void* self, const TVMFFIAny* args, int32_t n, TVMFFIAny* result) { body; return 0; }
"""


def export_faults(path: str, bodies: list[str]) -> None:
    """A library of kernels with these bodies, named as those of a job are."""
    import tvm

    names = [jobs.function_name(i) for i in range(len(bodies))]
    source = FAULTS + "\n".join(f"KERNEL({n}, {b})" for n, b in zip(names, bodies, strict=True))
    tvm.runtime._ffi_api.CSourceModuleCreate(source, "cc", names, []).export_library(path)


def build_kernels(job: KernelJob) -> BuiltKernels:
    """As the real job; the kernel from NCHW8c crashes in the compiler, the one to NCHW8c on the device."""
    if job.candidate.startswith("NCHW8c"):
        os.kill(os.getpid(), signal.SIGSEGV)
    built = jobs.build_kernels(job)
    if job.candidate.endswith("NCHW8c") and built.schedules:
        os.unlink(built.output)
        export_faults(built.output, ["*(volatile int*)8 = 1"] * len(built.schedules))
    return built


def build_plan(job: PlanJob) -> str:
    """No plan can be built."""
    raise RuntimeError("no plan today")
