"""Servers, trackers and build workers end with their owner, and keep nobody's output open."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from layoutsearch.errors import DeviceError
from layoutsearch.measure.farm import LocalFarm

ROOT = Path(__file__).resolve().parents[2]

# Prints the processes that it started, with a kernel that never returns in one of them, then ends in some way.
OWNER = """
import os, sys, threading, time
import psutil
from layoutsearch.measure.builder import Builder
from layoutsearch.measure.device import Device
from layoutsearch.measure.farm import LocalFarm
from layoutsearch.measure.kernels import KernelCall, TensorSpec

def main(way, lib):
    builder = Builder(workers=1, preload=())
    builder.submit("time:sleep", 600)
    with LocalFarm(servers=2, threads=1, tracker=True), Device.local(threads=1) as device:
        spec = TensorSpec((4096,))
        call = KernelCall("hang", (spec, spec))
        thread = threading.Thread(target=lambda: device.time_kernels(lib, [call], timeout_s=600), daemon=True)
        thread.start()
        while True:
            time.sleep(0.2)
            busy = [p for p in psutil.Process().children(recursive=True) if sum(p.cpu_times()[:2]) > 0.3]
            children = psutil.Process().children(recursive=True)
            if len(children) >= 6 and busy:
                break
        time.sleep(0.5)
        children = psutil.Process().children(recursive=True)
        print(*[f"{p.pid}:{p.create_time()}" for p in children], flush=True)
        if way == "sleep":
            time.sleep(600)
        if way == "exception":
            raise RuntimeError("on purpose")
        if way == "os_exit":
            os._exit(0)

main(*sys.argv[1:])
"""


def _alive(listed: str) -> list[psutil.Process]:
    """Those of the PID:CREATED processes that still run."""
    alive = []
    for item in listed.split():
        pid, created = item.split(":")
        try:
            process = psutil.Process(int(pid))
            if abs(process.create_time() - float(created)) < 0.01 and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
        except psutil.NoSuchProcess:
            pass
    return alive


def _assert_all_end(listed: str) -> None:
    assert len(listed.split()) >= 6, listed
    deadline = time.monotonic() + 10
    while _alive(listed) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _alive(listed)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("way", ["return", "exception", "os_exit"])
def test_nothing_is_left_and_a_pipe_does_not_hang(way: str, kernel_lib: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OWNER, way, kernel_lib], capture_output=True, text=True, timeout=60, env=_environment()
    )
    assert ("on purpose" in done.stderr) == (way == "exception"), done.stderr
    _assert_all_end(done.stdout)


def test_nothing_is_left_after_kill_9(kernel_lib: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, "sleep", kernel_lib], stdout=subprocess.PIPE, text=True, env=_environment()
    ) as owner:
        assert owner.stdout is not None
        listed = owner.stdout.readline()
        assert _alive(listed)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        _assert_all_end(listed)
        assert owner.stdout.read() == ""  # ends: nobody else holds the pipe


def test_an_exception_inside_the_block_stops_the_servers() -> None:
    pids: list[int] = []

    def use() -> None:
        with LocalFarm(servers=1, threads=1) as farm:
            pids.extend(farm.pids)
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        use()
    assert pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_farm_that_was_closed_says_so() -> None:
    with LocalFarm(servers=1, threads=1) as farm:
        assert farm.ensure() in farm.ports
    with pytest.raises(DeviceError, match="stopped"):
        farm.ensure()


def test_servers_share_no_core_where_there_are_enough() -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("one core")
    with LocalFarm(servers=2, threads=1) as farm:
        first, second = (os.sched_getaffinity(pid) for pid in farm.pids)
    assert len(first) == len(second) == 1
    assert not first & second


def test_a_server_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    with pytest.raises(DeviceError, match=r"layoutsearch\.measure\.server did not start") as caught, LocalFarm():
        pass
    assert "\n" not in str(caught.value)
