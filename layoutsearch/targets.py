"""This machine as a TVM target, and what a target can do."""

from __future__ import annotations

import os

import tvm


def local_target() -> tvm.target.Target:
    """The LLVM target of this machine's own CPU."""
    cpu = str(tvm.get_global_func("target.llvm_get_system_cpu")())
    return tvm.target.Target({"kind": "llvm", "mcpu": cpu})


def default_threads() -> int:
    """Cores this process may use. TVM's own default is half of that on x86."""
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def has_feature(target: tvm.target.Target, feature: str) -> bool:
    """Whether LLVM's features of `target` include `feature`; every AArch64 CPU has `neon`."""
    if target.kind.name != "llvm":
        return False
    triple = str(target.attrs.get("mtriple", "")) or str(tvm.get_global_func("target.llvm_get_system_triple")())
    arm = triple.startswith(("aarch64", "arm"))
    if feature == "neon":
        return arm
    return not arm and bool(tvm.get_global_func("target.target_has_feature")(feature, target))
