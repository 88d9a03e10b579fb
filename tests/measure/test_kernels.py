"""Kernels on a local device: samples, typed failures, and a device that stays usable."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import SIZE

from layoutsearch.measure.device import Device
from layoutsearch.measure.kernels import KernelCall, TensorSpec
from layoutsearch.measure.results import Status

FLOATS = TensorSpec((SIZE,))
INDICES = TensorSpec((SIZE,), "int32")


def call(function: str) -> KernelCall:
    return KernelCall(function, (FLOATS, FLOATS))


def newest_child() -> psutil.Process:
    """The server of the device that was entered last."""
    return max(psutil.Process().children(), key=lambda child: child.create_time())


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device.local(threads=2) as device:
        yield device


def test_samples_are_positive_and_as_many_as_asked(device: Device, kernel_lib: str) -> None:
    first, second = device.time_kernels(kernel_lib, [call("add_one"), call("add_one")], repeat=5, warmup=3)
    for measurement in (first, second):
        assert measurement.ok
        assert len(measurement.samples_us) == 5
        assert all(sample > 0 for sample in measurement.samples_us)
        assert measurement.wall_s > 0


def test_integer_arguments_are_valid_indices(device: Device, kernel_lib: str) -> None:
    (measurement,) = device.time_kernels(kernel_lib, [KernelCall("gather", (FLOATS, INDICES, FLOATS))])
    assert measurement.ok, measurement.error


@pytest.mark.parametrize(
    ("function", "status", "words"),
    [
        ("segfault", Status.CRASH, "SIGSEGV"),
        ("abort_", Status.CRASH, "SIGABRT"),
        ("kill_itself", Status.CRASH, "SIGKILL"),
        ("exit_zero", Status.CRASH, "exited with code 0"),
        ("exit_one", Status.CRASH, "exited with code 1"),
        ("hang", Status.TIMEOUT, "within 1 s"),
        ("no_such_function", Status.ERROR, "no_such_function"),
    ],
)
def test_a_fault_is_typed_and_the_next_call_works(
    device: Device, kernel_lib: str, function: str, status: Status, words: str
) -> None:
    before, fault, after = device.time_kernels(
        kernel_lib, [call("add_one"), call(function), call("add_one")], timeout_s=1.0
    )
    assert before.ok
    assert fault.status is status
    assert words in fault.error
    assert "\n" not in fault.error
    assert not fault.is_infrastructure
    assert after.ok, after.error


def test_more_crashes_than_tvm_has_sessions(device: Device, kernel_lib: str) -> None:
    results = device.time_kernels(kernel_lib, [call("segfault")] * 20)  # two tries each; TVM has room for 32
    assert [result.status for result in results] == [Status.CRASH] * 20
    assert device.time_kernels(kernel_lib, [call("add_one")])[0].ok


@pytest.mark.parametrize(("size", "status"), [(0, Status.ERROR), (1000, Status.CRASH)])
def test_a_library_that_does_not_load_fails_every_call(
    device: Device, tmp_path: Path, kernel_lib: str, size: int, status: Status
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(Path(kernel_lib).read_bytes()[:size])
    results = device.time_kernels(str(broken), [call("add_one")] * 3)
    assert [result.status for result in results] == [status] * 3  # the loader of a truncated library gets SIGBUS
    assert "loading the library" in results[0].error
    assert device.time_kernels(kernel_lib, [call("add_one")])[0].ok


def test_a_hung_kernel_does_not_keep_its_process(kernel_lib: str) -> None:
    with Device.local(threads=1) as device:
        server = newest_child()
        assert device.time_kernels(kernel_lib, [call("hang")], timeout_s=0.5)[0].status is Status.TIMEOUT
        assert device.time_kernels(kernel_lib, [call("add_one")])[0].ok
        assert len(server.children()) == 1


def test_a_server_that_is_killed_is_started_again(kernel_lib: str) -> None:
    with Device.local(threads=1) as device:
        killer, after = device.time_kernels(kernel_lib, [call("kill_server"), call("add_one")], timeout_s=5.0)
        assert killer.status is Status.CRASH
        assert after.ok, after.error


def test_a_server_that_is_stopped_is_an_infrastructure_failure(kernel_lib: str) -> None:
    with Device.local(threads=1) as device:
        assert device.time_kernels(kernel_lib, [call("add_one")])[0].ok
        server = newest_child()
        device.session(1.0).close()
        server.suspend()
        try:
            first, second = device.time_kernels(kernel_lib, [call("add_one")] * 2)
        finally:
            server.resume()
        assert first.status is second.status is Status.NO_DEVICE
        assert first.is_infrastructure
        assert re.search(r"127\.0\.0\.1:\d+", first.error)
        assert device.time_kernels(kernel_lib, [call("add_one")])[0].ok


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_kernels_run_on_the_threads_that_were_asked_for_bound_where_they_are_as_many_as_cores(
    kernel_lib: str, threads: int
) -> None:
    calls = [call(f"needs_{count}_thread{'s' if count > 1 else ''}") for count in (1, 2, 3)]
    with Device.local(threads=threads) as device:
        results = device.time_kernels(kernel_lib, [*calls, call("needs_no_pinning")])
        identity = device.identity()
    cores = len(os.sched_getaffinity(0))
    free = not 1 < threads == cores
    assert [result.ok for result in results] == [threads == 1, threads == 2, threads == 3, free]
    assert identity.threads == threads
    # Those of the process, where its threads have one each too.
    assert identity.cores == cores
    assert identity.cpu not in ("", "unknown")


def test_wrong_counts_are_refused(device: Device, kernel_lib: str) -> None:
    with pytest.raises(ValueError, match="repeat and warmup"):
        device.time_kernels(kernel_lib, [call("add_one")], repeat=0)
