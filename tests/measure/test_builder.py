"""The build pool: results, typed failures, and workers that are replaced."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import psutil
import pytest

from layoutsearch.measure.builder import Builder
from layoutsearch.measure.results import RunFailed, Status


@pytest.fixture(scope="module")
def builder() -> Iterator[Builder]:
    with Builder(workers=1, preload=("numpy",)) as builder:
        yield builder


def test_a_kernel_is_compiled_in_a_worker(builder: Builder, tmp_path: Path) -> None:
    path = tmp_path / "kernel.so"
    result = builder.submit("build_jobs:compile_kernel", str(path)).result()
    assert result.ok, result.error
    assert result.get() == path.stat().st_size > 0


def test_a_worker_stays_warm_and_apart(builder: Builder) -> None:
    first, second = (builder.submit("build_jobs:pid", None).result().get() for _ in range(2))
    assert first == second != psutil.Process().pid


def test_what_a_job_prints_does_not_disturb_its_result(builder: Builder) -> None:
    assert builder.submit("build_jobs:noisy", "value").result().get() == "value"


@pytest.mark.parametrize(
    ("function", "payload", "status", "words"),
    [
        ("raise_two_lines", None, Status.BUILD_ERROR, "ValueError: first line"),
        ("no_such_job", None, Status.BUILD_ERROR, "no_such_job"),
        ("unpicklable", None, Status.BUILD_ERROR, "pickle"),
        ("segfault", None, Status.BUILD_CRASH, "killed by SIGSEGV: about to die"),
        ("leave", 0, Status.BUILD_CRASH, "exited with code 0"),
        ("leave", 3, Status.BUILD_CRASH, "exited with code 3"),
        ("sleep", 60, Status.BUILD_TIMEOUT, "within 0.5 s"),
    ],
)
def test_a_failure_is_typed_and_the_next_job_works(
    builder: Builder, function: str, payload: object, status: Status, words: str
) -> None:
    failed = builder.submit(f"build_jobs:{function}", payload, timeout_s=0.5)
    after = builder.submit("build_jobs:add", (1, 2))
    result = failed.result()
    assert result.status is status
    assert words in result.error
    assert "\n" not in result.error
    with pytest.raises(RunFailed) as caught:
        result.get()
    assert caught.value.status is status
    assert after.result().get() == 3


def test_a_job_that_wants_too_much_memory_fails_alone() -> None:
    with Builder(workers=1, memory_bytes=1 << 30, preload=("numpy",)) as builder:
        result = builder.submit("build_jobs:allocate", 4 << 30).result()
        assert result.status is Status.BUILD_ERROR
        assert "allocate" in result.error
        assert builder.submit("build_jobs:allocate", 1000).result().get() == 1000


def test_closing_ends_what_runs_and_cancels_the_rest() -> None:
    with Builder(workers=1, preload=()) as builder:
        assert builder.submit("build_jobs:add", (1, 1)).result().ok
        running = builder.submit("build_jobs:sleep", 600, timeout_s=600)
        waiting = builder.submit("build_jobs:sleep", 600)
        while not running.running():
            pass
    assert running.result(timeout=1).status is Status.BUILD_CRASH
    with pytest.raises(CancelledError):
        waiting.result(timeout=1)
    with pytest.raises(RuntimeError, match="closed"):
        builder.submit("build_jobs:add", (1, 1))


def test_two_workers_work_at_the_same_time() -> None:
    with Builder(workers=2, preload=()) as builder:
        slow = builder.submit("build_jobs:sleep", 600, timeout_s=600)
        assert builder.submit("build_jobs:add", (2, 2)).result(timeout=60).get() == 4
        assert not slow.done()
