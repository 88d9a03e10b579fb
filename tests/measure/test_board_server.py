"""The server as it is started on a board, from the command line."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import tvm

from layoutsearch.measure.results import DeviceFailed, RunFailed, Status
from layoutsearch.measure.server_functions import LINK, file_identity
from layoutsearch.measure.session import connect

COMMAND = [sys.executable, "-m", "layoutsearch.measure.server", "--port", "0"]
SIZE = 4096  # floats of the kernels in `kernel_lib`
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}


@contextmanager
def started(*args: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server process and its port."""
    with subprocess.Popen([*COMMAND, *args], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as server:
        assert server.stdout is not None
        try:
            yield server, int(server.stdout.readline().split()[1])
        finally:
            server.kill()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_server_and_the_kernel_that_it_runs(how: signal.Signals, kernel_lib: str) -> None:
    with started("--threads", "1") as (server, port):
        session = connect("127.0.0.1", port, "", 60.0)
        (child,) = psutil.Process(server.pid).children()
        module = session.load(kernel_lib)
        threading.Timer(0.5, lambda: server.send_signal(how)).start()
        with pytest.raises(RunFailed) as caught, session.deadline(30.0):
            module["hang"]()
        del module
        session.close()
        assert caught.value.status is Status.CRASH
        assert server.wait(timeout=10) == (-signal.SIGKILL if how == signal.SIGKILL else 0)
        psutil.wait_procs([child], timeout=5)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_clients_with_another_key_or_protocol_are_refused_and_the_server_goes_on() -> None:
    with started("--key", "board") as (_, port):
        with pytest.raises(DeviceFailed, match="cannot find server that matches key"):
            connect("127.0.0.1", port, "phone", 60.0)
        with socket.create_connection(("127.0.0.1", port), 5) as stranger:
            stranger.sendall(b"GET / HT")
            assert stranger.recv(100) == b""
        session = connect("127.0.0.1", port, "board", 60.0)
        with session.deadline(5.0):
            assert session.function("layoutsearch.server.identity") is not None
        session.close()


def test_a_session_without_a_limit_is_never_asked_for() -> None:
    with pytest.raises(ValueError, match="time limit"):
        connect("127.0.0.1", 1, "", 0.0)


def test_an_address_that_others_reach_is_warned_about() -> None:
    for host, warned in (("0.0.0.0", True), ("127.0.0.1", False)):
        done = subprocess.run(
            [*COMMAND, "--host", host, "--die-with-parent"],
            input="",
            capture_output=True,
            text=True,
            timeout=60,
            env=ENVIRONMENT,
        )
        assert ("no authentication" in done.stderr) == warned
        assert done.returncode == 0


def test_a_server_on_the_machine_of_the_client_loads_the_file_that_is_there(
    kernel_lib: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tvm.rpc.RPCSession.upload", lambda *_: pytest.fail("the file was sent"))
    with started("--threads", "1") as (_, port):
        session = connect("127.0.0.1", port, "", 60.0)
        with session.deadline(30.0):
            # Twice, as two libraries.
            modules = [session.load(kernel_lib) for _ in range(2)]
            a, b = (tvm.runtime.tensor(np.zeros(SIZE, "float32"), device=session.cpu) for _ in range(2))
            for module in modules:
                module["add_one"](a, b)
                assert (b.numpy() == 1.0).all()
        del modules, module, a, b
        session.close()


def test_a_file_that_is_another_one_on_the_server_is_sent(kernel_lib: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with started("--threads", "1") as (_, port):
        session = connect("127.0.0.1", port, "", 60.0)
        with session.deadline(30.0):
            link = session.function(LINK)
            for other in ("", file_identity(kernel_lib) + "0", file_identity(__file__)):
                assert not link(kernel_lib, other, "linked.so")
            assert not link("/no/such/file.so", file_identity("/no/such/file.so"), "linked.so")
            monkeypatch.setattr("layoutsearch.measure.session.file_identity", lambda _: "that of the client")
            module = session.load(kernel_lib)
            a, b = (tvm.runtime.tensor(np.zeros(SIZE, "float32"), device=session.cpu) for _ in range(2))
            module["add_one"](a, b)
            assert (b.numpy() == 1.0).all()
        del link, module, a, b
        session.close()
