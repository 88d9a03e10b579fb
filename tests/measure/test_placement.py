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
from layoutsearch.measure.placement import spread_tvm, threads_now, usable_cores
import tvm
before, caches = threads_now(), describe_caches()
done = spread_tvm(int(sys.argv[1]))
own = [0, *sorted(threads_now() - before)]
threads = [sorted(os.sched_getaffinity(t)) for t in own]
print(json.dumps([done, threads, sorted(usable_cores()), caches == describe_caches()]))
"""
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def spread(threads: int, cores: list[int]) -> tuple[bool, list[list[int]], list[int], bool]:
    """Whether it was done, the cores of each thread, those of the process, and whether its caches stayed the same."""
    environment = {**os.environ, "TVM_NUM_THREADS": str(threads), "TVM_BIND_THREADS": "0"}
    command = [sys.executable, "-c", CODE, str(threads), json.dumps(cores)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return tuple(json.loads(done.stdout))  # type: ignore[return-value]


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores on Linux")
def test_as_many_threads_as_cores_get_one_each() -> None:
    for cores in {tuple(CORES[:2]), tuple(CORES[-2:])}:
        done, threads, process, same = spread(2, list(cores))
        assert done
        assert sorted(threads) == [[core] for core in cores]
        assert process == list(cores)
        assert same


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores on Linux")
@pytest.mark.parametrize(("threads", "count"), [(1, 1), (1, 2), (2, 1), (3, 2)])
def test_others_go_where_the_system_puts_them(threads: int, count: int) -> None:
    cores = CORES[:count]
    done, found, process, _ = spread(threads, cores)
    assert not done
    assert found == [cores] * threads
    assert process == cores
