"""What a schedule needs to know of the machine: vector width, registers, caches, cores."""

from __future__ import annotations

from dataclasses import dataclass

import tvm


@dataclass(frozen=True)
class TargetInfo:
    """The machine as the templates see it.

    Attributes:
        isa: `avx512`, `avx2`, `sse`, `neon` or `generic`; `opencl` for GPUs, whose kernels run on work items.
        lanes: float32 elements of one vector register.
        registers: Number of vector registers.
        broadcast_operand: Whether a multiply-add takes a broadcast scalar from memory, needing no register for it.
        l1_bytes: Data cache of one core, first level.
        l2_bytes: Cache of one core, second level.
        threads: Threads the kernels run on.
    """

    isa: str
    lanes: int
    registers: int
    broadcast_operand: bool
    l1_bytes: int
    l2_bytes: int
    threads: int

    @classmethod
    def from_target(cls, target: tvm.target.Target, threads: int) -> TargetInfo:
        """Reads the instruction set from the features LLVM derives from `target`'s mcpu and mattr."""
        isa = _isa(target)
        lanes, registers, broadcast, l1, l2 = _BY_ISA[isa]
        return cls(isa, lanes, registers, broadcast, l1, l2, max(1, threads))


_BY_ISA = {
    "avx512": (16, 32, True, 32 << 10, 1 << 20),
    "avx2": (8, 16, False, 32 << 10, 256 << 10),
    "sse": (4, 16, False, 32 << 10, 256 << 10),
    "neon": (4, 32, True, 32 << 10, 256 << 10),
    "generic": (4, 16, False, 32 << 10, 256 << 10),
    "opencl": (4, 32, False, 32 << 10, 256 << 10),
}


def _isa(target: tvm.target.Target) -> str:
    if target.kind.name != "llvm":
        return "opencl" if target.kind.name == "opencl" else "generic"
    has = tvm.get_global_func("target.target_has_feature")
    triple = str(target.attrs.get("mtriple", "")) or str(tvm.get_global_func("target.llvm_get_system_triple")())
    if triple.startswith(("aarch64", "arm")):
        return "neon"
    if not triple.startswith(("x86_64", "i386", "i686")):
        return "generic"
    for feature, isa in (("avx512f", "avx512"), ("avx2", "avx2"), ("sse2", "sse")):
        if has(feature, target):
            return isa
    return "generic"
