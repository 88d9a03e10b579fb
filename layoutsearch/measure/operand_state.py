"""On the server: put a kernel where it is within a model, before each run that is timed.

Since a kernel ran last, all the others have: its code, its output and the translations of its pages have gone from the
caches of its cores. Weights come from memory: they are flushed from all caches. Activations come from the kernel
before, which ran on the same threads but shared its work out in its own way: about half of what a thread reads was
written by another core. Timed in a loop, with everything warm in the right core, kernels of a real detector were a
fifth faster than within it.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from layoutsearch.measure.caches import describe_caches

PREPARE = "layoutsearch.server.operand_state"
"""Global function of the server: positions of the cold arguments ("0,3" or "") -> name of a function to run before a
kernel, with the kernel's arguments."""
PROTOCOL = "operands2"
"""Names this way of timing; raised whenever the times it gives come to mean something else."""

_FLUSH = "cache_flush_cpu_non_first_arg"
# Pieces a thread of the kernel before wrote, alternating between threads.
_PIECES_PER_THREAD = 2
# Pages that each thread touches: more than translation buffers hold.
_PAGES, _PAGE_BYTES = 8192, 4096
# Read by each thread, in units of a core's second cache.
_CACHE_SHARE = 2
_USUAL_CACHE_BYTES = 1 << 20
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
    """Has other work done on all threads, flushes the cold arguments, rewrites the others but for the output."""

    def __init__(
        self, launch: Any, threads: Callable[[], int], flush: Callable[..., None], cold: Sequence[int]
    ) -> None:
        self._launch, self._threads, self._flush, self._cold = launch, threads, flush, frozenset(cold)
        self._spans: list[tuple[int, int]] = []
        self._scratch: list[_Scratch] = []
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
        while len(self._scratch) < self._count:
            self._scratch.append(_Scratch())
        self._launch(self._callback, None, ctypes.c_int(self._count))

    def _rewrite(self, task: int, _environment: int, _data: int) -> int:
        self._scratch[task].touch()
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


class _Scratch:
    """Memory of one thread, touched in place of what the other kernels of a model touch."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, _PAGES * _PAGE_BYTES)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._pages = np.frombuffer(memory, np.uint8)
        # Written once: memory that never was is all one page.
        self._lines = np.ones(_CACHE_SHARE * _second_cache_bytes() // 8, np.int64)

    def touch(self) -> None:
        """Evict what the thread's core holds of a kernel."""
        self._pages[::_PAGE_BYTES] += 1
        self._lines.sum()


@functools.cache
def _second_cache_bytes() -> int:
    """Of one core; the usual size where the system does not tell."""
    found = [cache["bytes"] for cache in describe_caches() if cache["level"] == 2]
    return found[0] if found else _USUAL_CACHE_BYTES
