"""A thread on each core where kernels run on all of them, seen from outside, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

CODE = """
import json, os, sys
os.sched_setaffinity(0, json.loads(sys.argv[2]))
from layoutsearch.measure.caches import describe_caches
from layoutsearch.measure.placement import bind_tvm, usable_cores
import tvm
before, caches = set(os.listdir("/proc/self/task")), describe_caches()
if sys.argv[3] == "forbidden":
    def refuse(*args):
        raise PermissionError(1, "Operation not permitted")
    os.sched_setaffinity = refuse
done = bind_tvm(int(sys.argv[1]))
tvm.get_global_func("runtime.NumThreads")()
own = [0, *sorted(int(t) for t in set(os.listdir("/proc/self/task")) - before)]
threads = [sorted(os.sched_getaffinity(t)) for t in own]
print(json.dumps([done, threads, sorted(usable_cores()), caches == describe_caches()]))
"""
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="with one core there is nothing to tell apart")


def bound(threads: int, cores: list[int], how: str = "allowed") -> tuple[bool, list[list[int]], list[int], str]:
    """Whether it was done, the cores of each thread, those of the process, and what was said. Caches stay the same."""
    environment = {**os.environ, "TVM_NUM_THREADS": str(threads), "TVM_BIND_THREADS": "0"}
    command = [sys.executable, "-c", CODE, str(threads), json.dumps(cores), how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    placed, threads_of, process, same = json.loads(done.stdout)
    assert same
    return placed, threads_of, process, done.stderr


def test_as_many_threads_as_cores_get_one_each() -> None:
    done, threads, process, said = bound(2, CORES[-2:])
    assert done
    assert sorted(threads) == [[core] for core in CORES[-2:]]
    assert process == CORES[-2:]
    assert said == ""


@pytest.mark.parametrize(("threads", "count"), [(1, 1), (1, 2), (2, 1), (3, 2)])
def test_others_go_where_the_system_puts_them(threads: int, count: int) -> None:
    cores = CORES[:count]
    assert bound(threads, cores) == (False, [cores] * threads, cores, "")


def test_what_the_system_forbids_is_said() -> None:
    done, threads, process, said = bound(2, CORES[:2], "forbidden")
    assert (done, threads, process) == (False, [CORES[:2]] * 2, CORES[:2])
    assert "threads cannot be bound to cores ([Errno 1] Operation not permitted)" in said
