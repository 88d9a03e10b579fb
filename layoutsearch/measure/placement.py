"""One thread on each core, where a process runs kernels on all cores it may use.

Threads of TVM that wait for each other give up their core and take it again at once, so Linux sees no reason to part
two that began on one core: the process then takes twice as long until it ends. TVM's own binding (TVM_BIND_THREADS) is
no way out: it counts cores from 0, whatever the process may use, and leaves the calling thread where it is.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

_TASKS = Path("/proc/self/task")


_process: frozenset[int] | None = None
"""Cores of the process, once its threads have one each."""


def usable_cores() -> frozenset[int]:
    """Cores that this process may use; empty where the system does not say."""
    if _process is not None:
        return _process
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def threads_now() -> frozenset[int]:
    """Identifiers of this process's threads; empty where the system does not say."""
    return frozenset(int(task.name) for task in _TASKS.iterdir()) if _TASKS.is_dir() else frozenset()


def spread_threads(threads: int, workers: Collection[int]) -> bool:
    """Give the calling thread and each of `workers` a core of its own.

    Args:
        threads: that kernels run on, the calling one among them.
        workers: identifiers of the others.

    Returns:
        Whether it was done: only where there is one thread for every core that may be used. A thread that is bound does
        not get out of the way of what else runs on its core, and with cores to spare the system finds better ones.
        False also where the system forbids it.
    """
    cores = sorted(usable_cores())
    if not 1 < threads == len(cores) == len(workers) + 1:
        return False
    global _process
    try:
        for core, thread in zip(cores, [0, *sorted(workers)], strict=True):
            os.sched_setaffinity(thread, {core})
    except OSError:  # a container may forbid it
        return False
    _process = frozenset(cores)
    return True


def spread_tvm(threads: int) -> bool:
    """The same for the threads that TVM's kernels have when this thread calls them; starts them where it must.

    To be called before this thread has run anything of TVM's: which threads are TVM's is seen from their start.
    """
    import tvm_ffi

    before = threads_now()
    count = tvm_ffi.get_global_func("runtime.NumThreads", allow_missing=True)
    if count is None:
        return False
    count()
    return spread_threads(threads, threads_now() - before)
