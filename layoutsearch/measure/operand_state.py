"""On the server: put the operands of a kernel where they are within a model, before each run that is timed.

Weights come from memory: they are flushed from all caches. Activations come from the kernel before, which ran on the
same threads but shared its work out in its own way: about half of what a thread reads was written by another core.
Timed with everything warm in the right core's cache, kernels of a real detector were a fifth faster than within it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

PREPARE = "layoutsearch.server.operand_state"
"""Global function of the server: positions of the cold arguments ("0,3" or "") -> name of a function to run before a
kernel, with the kernel's arguments."""
PROTOCOL = "operands1"
"""Names this way of timing; raised whenever the times it gives come to mean something else."""

_FLUSH = "cache_flush_cpu_non_first_arg"
# Pieces a thread of the kernel before wrote, alternating between threads.
_PIECES_PER_THREAD = 2
_LAMBDA = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def register() -> bool:
    """Offer `PREPARE` to clients; False where this TVM does not let us run something on its threads."""
    import tvm.base
    import tvm_ffi

    runtime = tvm.base._LOADED_LIBS.get("tvm_runtime")
    launch = getattr(runtime, "TVMBackendParallelLaunch", None)
    threads = tvm_ffi.get_global_func("runtime.NumThreads", allow_missing=True)
    flush = tvm_ffi.get_global_func(_FLUSH, allow_missing=True)
    if launch is None or threads is None or flush is None:
        return False
    made: set[str] = set()

    @tvm_ffi.register_global_func(PREPARE, override=True)
    def prepare(cold: str) -> str:
        name = f"{PREPARE}.{cold}"
        if name not in made:
            positions = [int(i) for i in cold.split(",") if i]
            tvm_ffi.register_global_func(name, _Preparation(launch, threads, flush, positions), override=True)
            made.add(name)
        return name

    return True


class _Preparation:
    """Flushes the cold arguments and rewrites the others, but for the last: the output."""

    def __init__(
        self, launch: Any, threads: Callable[[], int], flush: Callable[..., None], cold: Sequence[int]
    ) -> None:
        self._launch, self._threads, self._flush, self._cold = launch, threads, flush, frozenset(cold)
        self._spans: list[tuple[int, int]] = []
        self._count = 1
        self._callback = _LAMBDA(self._rewrite)
        # Through the C library of the process: the call lets go of the interpreter, so the threads do run together.
        self._move = ctypes.CDLL(None).memmove
        self._move.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def __call__(self, *args: Any) -> None:
        cold = [args[i] for i in sorted(self._cold) if i < len(args)]
        if cold:
            # TVM's own function spares its first argument.
            self._flush(args[0], *cold)
        warm = [a for i, a in enumerate(args[:-1]) if i not in self._cold]
        # Within a session these are borrowed views, which cannot be exported to numpy.
        sizes = [math.prod(a.shape) * (int(a.dtype.bits) // 8) for a in warm]
        self._spans = [(a.data_ptr(), size) for a, size in zip(warm, sizes, strict=True) if size]
        self._count = int(self._threads())
        if self._spans:
            self._launch(self._callback, None, ctypes.c_int(self._count))

    def _rewrite(self, task: int, _environment: int, _data: int) -> int:
        pieces = self._count * _PIECES_PER_THREAD
        for start, size in self._spans:
            step = -(-size // pieces)
            for piece in range(task, pieces, self._count):
                begin = piece * step
                length = min(step, size - begin)
                if length > 0:
                    # Onto itself: every line is written, no byte changes, no second buffer crowds the caches.
                    self._move(start + begin, start + begin, length)
        return 0
