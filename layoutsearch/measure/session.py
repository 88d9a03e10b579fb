"""One RPC session with a deadline on everything, and failures that have a type.

TVM's client blocks in C++ without a time limit. The way out is our own hand on its socket: shutting it down makes
the call raise. Only sockets of this session are touched.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from tvm import rpc
from tvm.error import RPCError, RPCSessionTimeoutError

from layoutsearch.measure.results import DeviceFailed, RunFailed, Status, one_line
from layoutsearch.measure.server import CRASH_MARK
from layoutsearch.measure.server_functions import LINK, file_identity

CONNECT_S = 5.0
CPU = "cpu"
_MAX_MODULES = 500
_MAX_BYTES = 1 << 30
_UPLOAD_BYTES_S = 4e6
_connecting = threading.Lock()


class Session:
    """A connected session. Tensors, modules and functions taken from it must be dropped before `close`.

    TVM has room for 32 sessions in a process and frees the place of one when the last reference is gone.
    """

    def __init__(self, remote: Any, sock: socket.socket, limit_s: float) -> None:
        self._remote = remote
        self._sock = sock
        self._expires = time.monotonic() + limit_s
        self.limit_s = limit_s
        self._modules = 0
        self._bytes = 0
        self.broken = False
        self.kind = CPU
        self.buffers: dict[Hashable, Any] = {}

    @property
    def remaining_s(self) -> float:
        """Seconds until the server ends the session."""
        return self._expires - time.monotonic()

    @property
    def worn(self) -> bool:
        """True when it is time for a new session: what was loaded into one stays in its memory."""
        return self._modules >= _MAX_MODULES or self._bytes >= _MAX_BYTES

    @property
    def cpu(self) -> Any:
        """The remote CPU device."""
        return self._remote.cpu(0)

    @property
    def place(self) -> Any:
        """The remote device that kernels and models run on: of `kind`, which is TVM's name for it."""
        return self._remote.device(self.kind, 0)

    def function(self, name: str) -> Any | None:
        """A global function of the device, or None where it has none of that name."""
        try:
            return self._remote.get_function(name)
        except AttributeError:
            return None

    def load(self, path: str | Path) -> Any:
        """Upload a shared library and load it there.

        The remote name is a new one each time: dlopen returns the old code for a known name, and overwriting a
        library that is loaded ends the session. A server of ours on this machine loads the file that is here: sending
        half a GiB of weights takes seconds.
        """
        name = f"{uuid.uuid4().hex}{Path(path).suffix}"
        link = self.function(LINK)
        if link is None or not link(os.path.abspath(path), file_identity(os.path.abspath(path)), name):
            self._remote.upload(str(path), name)
        self._modules += 1
        self._bytes += os.path.getsize(path)
        return self._remote.load_module(name)

    @staticmethod
    def transfer_s(nbytes: int) -> float:
        """A generous bound on the seconds that sending `nbytes` and loading them takes."""
        return 10.0 + nbytes / _UPLOAD_BYTES_S

    @contextmanager
    def deadline(self, timeout_s: float) -> Iterator[None]:
        """Bound the calls inside, and turn what TVM raises into RunFailed.

        Raises:
            RunFailed: timeout or crash (the session is broken then), or error (it is still good).
        """
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            self._shut_down()

        timer = threading.Timer(timeout_s, expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        except RunFailed:
            raise
        except Exception as error:
            timer.cancel()
            raise self._classify(error, expired.is_set(), timeout_s) from None
        finally:
            timer.cancel()
            self.broken = self.broken or expired.is_set()

    def _classify(self, error: Exception, expired: bool, timeout_s: float) -> RunFailed:
        text = str(error)
        if expired:
            self.broken = True
            return RunFailed(Status.TIMEOUT, f"no answer within {timeout_s:g} s")
        if isinstance(error, RPCSessionTimeoutError):
            self.broken = True
            return RunFailed(Status.TIMEOUT, f"the session lasted longer than {self.limit_s:g} s")
        if CRASH_MARK in text:
            self.broken = True
            return RunFailed(Status.CRASH, text.split(CRASH_MARK, 1)[1].strip().splitlines()[0])
        if not isinstance(error, RPCError) and self._peer_closed():
            self.broken = True
            return RunFailed(Status.CRASH, "the device closed the connection")
        return RunFailed(Status.ERROR, one_line(error))

    def _peer_closed(self) -> bool:
        try:
            return self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _shut_down(self) -> None:
        with suppress(OSError):  # the other side was faster
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the session. Safe to call twice."""
        self.broken = True
        self.buffers.clear()
        self._shut_down()  # before TVM's own good-bye, which waits for a call in flight in another thread
        self._remote = None
        self._sock.close()


def connect(host: str, port: int, key: str, limit_s: float, timeout_s: float = CONNECT_S) -> Session:
    """Connect to an RPC server; `limit_s` is the life of the session on the server, always finite.

    Raises:
        DeviceFailed: no_device, with what went wrong.
    """
    if limit_s <= 0:
        raise ValueError("a session without a time limit can block its device for ever")
    done = threading.Event()
    expired = threading.Event()
    with _connecting:
        before = _sockets_to(port)

        def expire() -> None:
            expired.set()
            while not done.wait(0.05):
                for fd, _ in _sockets_to(port) - before:
                    _shut_down_copy(fd)

        timer = threading.Timer(timeout_s, expire)
        timer.daemon = True
        timer.start()
        try:
            remote = rpc.connect(host, port, key, limit_s)
            fds = _sockets_to(port) - before
        except Exception as error:
            why = f"no handshake within {timeout_s:g} s" if expired.is_set() else one_line(error)
            raise DeviceFailed(Status.NO_DEVICE, f"RPC server {host}:{port}: {why}") from None
        finally:
            done.set()
            timer.cancel()
    if len(fds) != 1:
        raise DeviceFailed(Status.NO_DEVICE, f"RPC server {host}:{port}: the connection was lost at once")
    sock = socket.socket(fileno=os.dup(fds.pop()[0]))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Session(remote, sock, limit_s)


def _sockets_to(port: int) -> set[tuple[int, int]]:
    """Sockets of this process that are connected, or connecting, to a remote port: file descriptor and local port.

    A descriptor alone may be that of another session which was closed meanwhile.
    """
    found = psutil.Process().net_connections("tcp")
    return {(c.fd, c.laddr.port) for c in found if c.laddr and c.raddr and c.raddr.port == port}


def _shut_down_copy(fd: int) -> None:
    try:
        with socket.socket(fileno=os.dup(fd)) as copy:
            copy.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # closed meanwhile
