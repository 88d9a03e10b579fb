"""On the server: put a kernel where it is within a model, before each run that is timed.

Since a kernel ran last, all the others have: what they went over has pushed its code, its weights and the translations
of its pages out of the caches of its cores, so weights come from the nearest cache that holds all that an inference
goes over, its *footprint*, and from memory where none does. Activations come from the kernel before, on the same
threads. The memory of the result held others until a kernel or two ago. With channels last these were read by all
threads: convolutions split them by channels there, other kernels by pixels. The lines are shared then, and have to be
asked for before they are written. In other layouts all split by channels, and each core keeps to its own lines.

Timed within real models, call by call, kernels took what they take like this; with everything warm they took up to a
fifth less, with weights always from memory up to three times as much in a model of half a megabyte.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from layoutsearch.measure import vector_work
from layoutsearch.measure.caches import USUAL_LAST_BYTES, describe_caches, holds

PROTOCOL = "operands7"
"""Names this way of timing; raised whenever the times it gives come to mean something else."""
PREPARE = f"layoutsearch.server.{PROTOCOL}"
"""Global function of the server: (positions of the weights, "0,3" or ""; footprint of the model in bytes, 0 for more
than any cache holds; whether the lines of its result are shared; the library of the kernel) -> name of a function to
run before a kernel, with the kernel's arguments. Its name has the protocol: a board's server may be of another
layoutsearch, and records would not tell its times from ours."""

_FLUSH = "cache_flush_cpu_non_first_arg"
# Pages that each thread touches at most: more than translation buffers hold.
_PAGES, _PAGE_BYTES = 8192, 4096
_LINE_BYTES = 64
# Read by each thread at most, in units of a core's second cache.
_CACHE_SHARE = 2
_USUAL_SECOND_BYTES = 1 << 20
# Of its size, since the memory of a result was last in use: small tensors are still in the second cache then.
_KERNELS_SINCE_RESULT = 2
_LARGEST = 1 << 62
_LAMBDA = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def register() -> bool:
    """Offer `PREPARE` to clients; False where this TVM does not let us run something on its threads."""
    import tvm.base
    import tvm_ffi

    runtime = tvm.base._LOADED_LIBS.get("tvm_runtime")
    launch = getattr(runtime, "TVMBackendParallelLaunch", None)
    barrier = getattr(runtime, "TVMBackendParallelBarrier", None)
    threads = tvm_ffi.get_global_func("runtime.NumThreads", allow_missing=True)
    flush = tvm_ffi.get_global_func(_FLUSH, allow_missing=True)
    if launch is None or barrier is None or threads is None or flush is None:
        return False
    made: dict[str, _Preparation] = {}
    scratch: list[_Scratch] = []

    @tvm_ffi.register_global_func(PREPARE, override=True)
    def prepare(weights: str, footprint: int, shared: bool, library: Any) -> str:
        name = f"{PREPARE}.{weights}.{footprint}.{shared}"
        if name not in made:
            positions = [int(i) for i in weights.split(",") if i]
            made[name] = _Preparation((launch, barrier), threads, flush, scratch, positions, footprint, shared)
            tvm_ffi.register_global_func(name, made[name], override=True)
        made[name].work = vector_work.worker(library, int(threads()))
        return name

    return True


class _Preparation:
    """Does other work on all threads, flushes weights that come from memory, rewrites the result and the operands."""

    def __init__(
        self,
        pool: tuple[Any, Any],
        threads: Callable[[], int],
        flush: Callable[..., None],
        scratch: list[_Scratch],
        weights: Sequence[int],
        footprint: int,
        shared: bool,
    ) -> None:
        (self._launch, barrier), self._threads, self._scratch = pool, threads, scratch
        self._meet = ctypes.cast(barrier, ctypes.c_void_p)
        self._flush, self._footprint, self._shared = flush, footprint, shared
        self._weights = frozenset(weights)
        self._operands: list[np.ndarray] = []
        self._result = np.empty(0, np.uint8)
        self._count, self._reach, self._since_result = 1, 0, 0
        self._steps = tuple(_LAMBDA(step) for step in (self._write_result, self._read_result, self._write_operands))
        self.work: Callable[[], object] | None = None
        """Native code for all threads, as a kernel before would run."""

    def __call__(self, *args: Any) -> None:
        weights = [args[i] for i in sorted(self._weights) if i < len(args)]
        self._count = int(self._threads())
        # The threads of a kernel share its activations, and mostly its weights.
        self._reach = min((self._footprint or _LARGEST) // self._count, _CACHE_SHARE * _second_cache_bytes())
        if weights and not holds(shared_cache_bytes(self._count), self._footprint):
            # TVM's own function spares its first argument.
            self._flush(args[0], *weights)
        self._result = _bytes(args[-1])
        self._operands = [_bytes(args[i]) for i in range(len(args) - 1) if i not in self._weights]
        size = self._result.size + sum(span.size for span in self._operands)
        self._since_result = min(self._reach, _KERNELS_SINCE_RESULT * size // self._count)
        while len(self._scratch) < self._count:
            self._scratch.append(_Scratch())
        write_result, read_result, write_operands = self._steps
        between = (read_result,) if self._shared and self._count > 1 else ()
        for callback in (write_result, *between, write_operands):
            # All threads are through with one step before the next.
            self._launch(callback, None, ctypes.c_int(self._count))
        # The threads meet once more without the interpreter, as after any kernel: what they waited in is what they wait
        # in before the next. Kernels of some microseconds took a fifth longer right after Python.
        if self.work is None:
            self._launch(self._meet, None, ctypes.c_int(self._count))
        else:
            self.work()

    def _write_result(self, task: int, _environment: int, _data: int) -> int:
        self._scratch[task].touch(self._reach)
        self._rewrite(self._result, task)
        return 0

    def _read_result(self, task: int, _environment: int, _data: int) -> int:
        lines = self._share(self._result, (task + 1) % self._count)[::_LINE_BYTES]
        if lines.size:
            lines.max()
        return 0

    def _write_operands(self, task: int, _environment: int, _data: int) -> int:
        self._scratch[task].touch(self._since_result)
        for span in self._operands:
            self._rewrite(span, task)
        return 0

    def _share(self, span: np.ndarray, task: int) -> np.ndarray:
        """Of one thread."""
        step = -(-span.size // self._count)
        return span[task * step : (task + 1) * step]

    def _rewrite(self, span: np.ndarray, task: int) -> None:
        """Have one thread write its share of a tensor."""
        lines = self._share(span, task)
        # Every line is written, no byte changes, no second buffer crowds the caches; numpy lets go of the interpreter,
        # so the threads do run together. (`memmove` onto itself returns at once.)
        np.bitwise_or(lines, 0, out=lines)


def _bytes(tensor: Any) -> np.ndarray:
    """The memory of a tensor; within a session tensors are borrowed views, which cannot be exported to numpy."""
    size = math.prod(tensor.shape) * ((int(tensor.dtype.bits) + 7) // 8)
    return np.frombuffer((ctypes.c_uint8 * size).from_address(tensor.data_ptr()) if size else b"", np.uint8)


class _Scratch:
    """Memory of one thread, touched in place of what the other kernels of a model touch."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, _PAGES * _PAGE_BYTES)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._pages = np.frombuffer(memory, np.uint8)
        # Written once: memory that never was is all one page.
        self._lines = np.ones(_CACHE_SHARE * _second_cache_bytes() // 8, np.int64)

    def touch(self, reach: int) -> None:
        """Evict what the thread's core holds of a kernel, as going over `reach` bytes does."""
        self._pages[: min(_PAGES, reach // _PAGE_BYTES) * _PAGE_BYTES : _PAGE_BYTES] += 1
        self._lines[: reach // 8].sum()


@functools.cache
def _caches() -> tuple[dict[str, int], ...]:
    return tuple(describe_caches())


@functools.cache
def _second_cache_bytes() -> int:
    """Of one core; the usual size where the system does not tell."""
    found = [cache["bytes"] for cache in _caches() if cache["level"] == 2]
    return found[0] if found else _USUAL_SECOND_BYTES


def shared_cache_bytes(threads: int) -> int:
    """The caches of the last level that so many threads can count on, as a profile has them."""
    found = _caches()
    return found[-1]["bytes"] * min(found[-1]["count"], threads) if found else USUAL_LAST_BYTES
