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

import psutil
import pytest

from layoutsearch.measure.results import DeviceFailed, RunFailed, Status
from layoutsearch.measure.session import connect

COMMAND = [sys.executable, "-m", "layoutsearch.measure.server", "--port", "0"]
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
