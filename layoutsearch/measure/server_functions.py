"""Functions that a session of our server offers beyond TVM's own."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from pathlib import Path

from layoutsearch.measure import marks, operand_state
from layoutsearch.measure.caches import available_bytes, describe_caches
from layoutsearch.measure.placement import bind_tvm, usable_cores

IDENTITY = "layoutsearch.server.identity"
LINK = "layoutsearch.server.link"
_FEATURES = re.compile(r"^(sse4_[12]|avx.*|fma|f16c|bmi[12]|amx.*|vnni|asimd.*|neon|sve.*|i8mm|bf16|fphp|vfpv4)$")


def register(folder: str) -> None:
    """Register what a client may call; uploads go to and come from `folder`. Kernels get a core for each thread."""
    import tvm_ffi
    from tvm.runtime.module import load_module

    bind_tvm(int(os.environ.get("TVM_NUM_THREADS", "0")))

    @tvm_ffi.register_global_func("tvm.rpc.server.workpath", override=True)
    def workpath(path: str) -> str:
        return os.path.join(folder, path)

    @tvm_ffi.register_global_func("tvm.rpc.server.load_module", override=True)
    def load(path: str) -> object:
        return load_module(os.path.join(folder, path))

    linked: set[str] = set()

    @tvm_ffi.register_global_func(LINK, override=True)
    def link(path: str, told: str, name: str) -> bool:
        if not told or file_identity(path) != told:
            return False
        # The loader takes two names of one file for one library, so what is loaded twice is two files.
        place = shutil.copyfile if told in linked else os.symlink
        place(path, os.path.join(folder, name))
        linked.add(told)
        return True

    @tvm_ffi.register_global_func(IDENTITY, override=True)
    def identity() -> str:
        return json.dumps(describe_cpu())

    operand_state.register()
    marks.register()


def file_identity(path: str) -> str:
    """What only the same file on the same machine has, as long as nobody writes to it; empty where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return f"{os.path.realpath(path)} {found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}"


def describe_cpu() -> dict[str, object]:
    """CPU name, instruction sets that matter to kernels, cores that this process may use, their caches, free memory."""
    info: dict[str, str] = {}
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            info.setdefault(name.strip(), value.strip())
    part = " ".join(filter(None, [info.get("CPU implementer"), info.get("CPU part")]))
    cpu = info.get("model name") or (f"arm {part}" if part else "") or platform.processor() or platform.machine()
    flags = (info.get("flags") or info.get("Features") or "").split()
    machine = platform.machine()
    if machine.lower().startswith(("aarch64", "arm")) and "flags" in info:
        # An emulator shows the host's CPU, and what was measured on it must not pass for the host's.
        cpu, flags = f"{machine} emulated on {cpu}", []
    return {
        "cpu": cpu,
        "features": sorted(filter(_FEATURES.match, flags)),
        "cores": len(usable_cores()) or os.cpu_count(),
        "caches": describe_caches(),
        "memory": available_bytes(),
    }
