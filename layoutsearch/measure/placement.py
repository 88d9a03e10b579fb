"""One thread on each core, where a process runs kernels on all cores it may use.

Threads of TVM that wait for each other give up their core and take it again at once, so Linux sees no reason to part
two that began on one core: the process then takes twice as long until it ends. TVM's own binding (TVM_BIND_THREADS) is
no way out: it counts cores from 0, whatever the process may use, and leaves the calling thread where it is.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger("layoutsearch.server")

_TASKS = Path("/proc/self/task")
_process: frozenset[int] | None = None
"""Cores of the process, once its threads have one each."""


def usable_cores() -> frozenset[int]:
    """Cores that this process may use; empty where the system does not say."""
    if _process is not None:
        return _process
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def core_of_each(threads: int) -> list[int]:
    """A core for each of the threads that kernels run on, where there are as many as the process may use; else none.

    A thread that is bound does not get out of the way of what else runs on its core, and with cores to spare the system
    finds better ones.
    """
    cores = sorted(usable_cores())
    return cores if 1 < threads == len(cores) else []


def bind(core_of: dict[int, int]) -> bool:
    """Keep threads, by their identifiers (0 is the calling one), on a core each; the process keeps all of its cores.

    Returns:
        Whether it was done. Where the system forbids it, as containers may, a warning says so.
    """
    global _process
    cores = usable_cores()
    try:
        for thread, core in core_of.items():
            os.sched_setaffinity(thread, {core})
    except OSError as error:
        log.warning("warning: threads cannot be bound to cores (%s); two of them may share one", error)
        return False
    _process = cores
    return True


def bind_tvm(threads: int) -> bool:
    """Bind the threads that TVM's kernels have when this thread calls them, started here, by `core_of_each`.

    To be called before this thread has run anything of TVM's: which threads are TVM's is seen from their start.
    """
    import tvm_ffi

    cores, start = core_of_each(threads), tvm_ffi.get_global_func("runtime.NumThreads", allow_missing=True)
    if not cores or start is None:
        return False
    before = set(_TASKS.iterdir())
    start()
    workers = sorted(int(task.name) for task in set(_TASKS.iterdir()) - before)
    # The calling thread last: what fails before leaves it free.
    return len(workers) == threads - 1 and bind(dict(zip([*workers, 0], [*cores[1:], cores[0]], strict=True)))
