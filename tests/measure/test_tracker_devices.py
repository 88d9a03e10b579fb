"""Devices behind a tracker: several at once, busy, unknown, stopped, and servers that are not ours."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from conftest import SIZE

from layoutsearch.errors import DeviceError
from layoutsearch.measure.device import Device
from layoutsearch.measure.farm import LocalFarm
from layoutsearch.measure.kernels import KernelCall, TensorSpec
from layoutsearch.measure.results import RunFailed, Status
from layoutsearch.measure.tracker import TrackerClient
from layoutsearch.targets import as_target, local_architecture, local_target

SPEC = TensorSpec((SIZE,))
ADD = KernelCall("add_one", (SPEC, SPEC))
SEGFAULT = KernelCall("segfault", (SPEC, SPEC))
HANG = KernelCall("hang", (SPEC, SPEC))


@pytest.fixture(scope="module")
def farm() -> Iterator[LocalFarm]:
    with LocalFarm(servers=2, threads=1, key="board", tracker=True) as farm:
        yield farm


@contextmanager
def process(*args: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python module in a process of its own, ended with all its children."""
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": root, "TVM_NUM_THREADS": "2"}
    child = subprocess.Popen([sys.executable, "-m", *args], env=env, stderr=subprocess.DEVNULL)
    try:
        yield child
    finally:
        for part in [*psutil.Process(child.pid).children(recursive=True), psutil.Process(child.pid)]:
            part.kill()
        child.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def wait_for_key(address: str, key: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            if TrackerClient(address).summary().free.get(key):
                return
        except RunFailed:
            pass
        assert time.monotonic() < deadline, f"{key} never came to {address}"
        time.sleep(0.1)


def test_two_boards_serve_two_clients_and_a_third_one_waits_in_vain(farm: LocalFarm, kernel_lib: str) -> None:
    with ExitStack() as stack:
        devices = [stack.enter_context(Device.remote(farm.tracker_address, "board", 1)) for _ in range(2)]
        for device in devices:
            assert device.time_kernels(kernel_lib, [ADD])[0].ok
            assert device.identity().key == "board"
        with pytest.raises(DeviceError, match="busy"):
            stack.enter_context(Device.remote(farm.tracker_address, "board", 1, acquire_s=0.5))
    with Device.remote(farm.tracker_address, "board", 1, acquire_s=10) as device:  # both are free again
        assert device.time_kernels(kernel_lib, [ADD])[0].ok


def test_faults_behind_a_tracker_are_typed_and_cost_no_board(farm: LocalFarm, kernel_lib: str) -> None:
    with Device.remote(farm.tracker_address, "board", 1, acquire_s=10) as device:
        results = device.time_kernels(kernel_lib, [SEGFAULT, ADD, HANG, ADD], timeout_s=1.0)
    assert [result.status for result in results] == [Status.CRASH, Status.OK, Status.TIMEOUT, Status.OK]
    deadline = time.monotonic() + 10
    while (free := TrackerClient(farm.tracker_address).summary().free["board"]) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert free == 2


def test_a_board_that_hangs_is_passed_over(farm: LocalFarm, kernel_lib: str) -> None:
    server = psutil.Process(farm.pids[0])
    server.suspend()
    try:
        with Device.remote(farm.tracker_address, "board", 1, acquire_s=10) as device:
            assert device.time_kernels(kernel_lib, [ADD])[0].ok
    finally:
        server.resume()


def test_an_unknown_key_names_the_keys_that_are_served(farm: LocalFarm) -> None:
    with pytest.raises(DeviceError, match="board") as caught, Device.remote(farm.tracker_address, "phone", 1):
        pass
    assert "'phone'" in str(caught.value)
    assert "\n" not in str(caught.value)
    pending = TrackerClient(farm.tracker_address).summary()
    assert "phone" not in pending.servers


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost:", ":9190", "host:port"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(DeviceError, match="HOST:PORT"):
        TrackerClient(address)


def test_no_tracker_fails_at_once() -> None:
    with (
        pytest.raises(DeviceError, match="no RPC tracker") as caught,
        Device.remote(f"127.0.0.1:{free_port()}", "a", 1),
    ):
        pass
    assert isinstance(caught.value, RunFailed)
    assert caught.value.status is Status.NO_TRACKER
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_what_is_no_tracker_does_not_block(answer: bytes | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = TrackerClient(f"127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.5)
        if answer is not None:
            threading.Thread(target=lambda: listener.accept()[0].sendall(answer), daemon=True).start()
        with pytest.raises(RunFailed) as caught:
            client.summary()
    assert caught.value.status is Status.NO_TRACKER


def test_a_tracker_that_goes_away_is_an_infrastructure_failure(kernel_lib: str) -> None:
    with (
        LocalFarm(servers=1, threads=1, key="board", tracker=True) as farm,
        Device.remote(farm.tracker_address, "board", 1) as device,
    ):
        psutil.Process(farm.pids[-1]).kill()
        results = device.time_kernels(kernel_lib, [ADD, SEGFAULT, ADD])
    assert results[0].ok  # the session goes on without it
    assert [result.status for result in results[1:]] == [Status.NO_TRACKER] * 2
    assert all(result.is_infrastructure for result in results[1:])


def test_a_server_finds_a_tracker_that_was_started_again(kernel_lib: str) -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    tracker = ("layoutsearch.measure.tracker", "--port", str(port))
    server = ("layoutsearch.measure.server", "--port", "0", "--tracker", address, "--key", "board", "--threads", "1")
    with process(*server):
        for _ in range(2):
            with process(*tracker):
                wait_for_key(address, "board")
                with Device.remote(address, "board", 1) as device:
                    assert device.time_kernels(kernel_lib, [ADD])[0].ok


def test_a_server_with_too_few_threads_is_refused(farm: LocalFarm) -> None:
    with (
        pytest.raises(DeviceError, match="1 threads, 64 were asked for"),
        Device.remote(farm.tracker_address, "board", 64),
    ):
        pass


@pytest.mark.slow
def test_code_for_another_instruction_set_is_refused(farm: LocalFarm) -> None:
    here = local_architecture()
    other = "x86_64" if here == "aarch64" else "aarch64"
    with Device.remote(farm.tracker_address, "board", 1, acquire_s=10) as device:
        device.check_target(local_target())
        with pytest.raises(DeviceError, match=f"'board' is {here} and cannot run code for {other}: give --rpc"):
            device.check_target(as_target({"kind": "llvm", "mtriple": f"{other}-linux-gnu"}))


def test_stock_tvm_servers_work_too(kernel_lib: str, model_libs: dict[str, str]) -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    local = ("--host", "127.0.0.1", "--port")
    with (
        process("tvm.exec.rpc_tracker", *local, str(port), "--port-end", str(port + 1)),
        process("tvm.exec.rpc_server", *local, "19500", "--port-end", "19600", "--tracker", address, "--key", "stock"),
    ):
        wait_for_key(address, "stock")
        with Device.remote(address, "stock", 1, acquire_s=3) as device:
            identity = device.identity()
            assert re.fullmatch(r"[\w.-]+", identity.cpu)  # what LLVM calls it
            assert (identity.features, identity.cores, identity.threads) == ((), 0, 1)
            assert not device.has_function("layoutsearch.server.identity")
            results = device.time_kernels(
                kernel_lib, [ADD, KernelCall("needs_1_thread", (SPEC, SPEC)), KernelCall("nothing", (SPEC, SPEC))]
            )
            assert [result.status for result in results] == [Status.OK, Status.OK, Status.ERROR]
            results = device.time_kernels(kernel_lib, [SEGFAULT])
            assert results[0].status in (Status.CRASH, Status.NO_DEVICE)  # a crash ends a stock server
