"""A TVM RPC server that outlives what it runs.

    python -m layoutsearch.measure.server --host 127.0.0.1 --port 9090 --tracker HOST:PORT --key KEY --threads 4

It speaks TVM's protocol, so any TVM client can use it. Differences from `tvm.exec.rpc_server`: a session that
crashes, exits or hangs ends alone and says by which signal; a session whose client went away is killed, so the
device is free again; handshakes have a deadline; the process of a session dies with the server, and the server with
the process that started it.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from layoutsearch.measure import lifeline

log = logging.getLogger("layoutsearch.server")

CRASH_MARK = "layoutsearch session crashed:"
_CLEAN_EXIT = 86  # a kernel that calls exit(0) must not look like a session that was closed
_HANDSHAKE_S = 5.0
_ABANDONED_S = 0.3
_TRACKER_PERIOD_S = 2.0
_TRACKER_UNUSED_PERIODS = 3
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def thread_env(threads: int) -> dict[str, str]:
    """Environment that gives TVM kernels `threads` threads and keeps them from being pinned to cores 0..n-1.

    That makes two servers on one host share core 0 without a word; see `placement` for when threads get cores.
    """
    return {"TVM_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads), "TVM_BIND_THREADS": "0"}


def _session_main(conn: socket.socket, folder: str, listener: socket.socket, server_pid: int) -> None:
    """Body of the process that serves one client."""
    lifeline.die_with_creator(server_pid)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    listener.close()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(folder)
    from tvm.rpc import _ffi_api

    from layoutsearch.measure import server_functions

    server_functions.register(folder)
    _ffi_api.ServerLoop(conn.fileno())
    os._exit(_CLEAN_EXIT)


class _TrackerLink:
    """The registration of one server with a tracker. Every exchange has a deadline."""

    def __init__(self, address: tuple[str, int], key: str, port: int) -> None:
        self._address, self._key, self._port = address, key, port
        self._sock: socket.socket | None = None
        self._unused = 0
        self.match_key = ""

    def register(self) -> None:
        """Offer the server, under a new match key, to whoever asks the tracker next."""
        from tvm.rpc import base

        try:
            if self._sock is None:
                self._sock = socket.create_connection(self._address, _HANDSHAKE_S)
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sock.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
                if struct.unpack("<i", base.recvall(self._sock, 4))[0] != base.RPC_TRACKER_MAGIC:
                    raise OSError("it is no RPC tracker")
                info = {"key": f"server:{self._key}", "addr": (None, self._port)}
                self._exchange([base.TrackerCode.UPDATE_INFO, info])
                log.info("registered with tracker %s:%d as %s", *self._address, self._key)
            self.match_key = base.random_key(self._key)
            self._exchange([base.TrackerCode.PUT, self._key, (self._port, self.match_key), None])
            self._unused = 0
        except (OSError, ValueError) as error:
            log.warning("tracker %s:%d: %s; trying again", *self._address, error)
            self._drop()

    def ping(self) -> None:
        """Renew what was lost: the connection, or a match key that a client took and never used."""
        from tvm.rpc import base

        if self._sock is None:
            self.register()
            return
        try:
            pending = self._exchange([base.TrackerCode.GET_PENDING_MATCHKEYS])
        except (OSError, ValueError) as error:
            log.warning("tracker %s:%d: %s; trying again", *self._address, error)
            self._drop()
            return
        self._unused = 0 if self.match_key in pending else self._unused + 1
        if self._unused > _TRACKER_UNUSED_PERIODS:
            self.register()

    def _exchange(self, message: object) -> list[str]:
        from tvm.rpc import base

        base.sendjson(self._sock, message)
        reply = base.recvjson(self._sock)
        return reply if isinstance(reply, list) else []

    def _drop(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._sock, self.match_key = None, ""


class Server:
    """One listening socket, one session at a time, each in a forked process.

    The process of the server itself never runs a kernel: a fork after TVM's thread pool has started hangs.
    """

    def __init__(
        self, host: str, port: int, key: str, tracker: tuple[str, int] | None = None, lifeline_fd: int | None = None
    ) -> None:
        self._listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.port: int = self._listener.getsockname()[1]
        self._key = key
        self._lifeline_fd = lifeline_fd
        self._parent = os.getppid()
        self._link = None if tracker is None else _TrackerLink(tracker, key, self.port)
        self._fork = multiprocessing.get_context("fork")
        if self._link:
            self._link.register()

    def run(self) -> None:
        """Serve until the parent ends (with a lifeline) or a signal comes."""
        next_ping = time.monotonic() + _TRACKER_PERIOD_S
        while True:
            watched: list[Any] = [self._listener] if self._lifeline_fd is None else [self._listener, self._lifeline_fd]
            ready, _, _ = select.select(watched, [], [], _TRACKER_PERIOD_S)
            if self._parent_gone():
                return
            if self._listener in ready and self._accept() and self._link:
                self._link.register()
                next_ping = time.monotonic() + _TRACKER_PERIOD_S
            elif self._link and time.monotonic() >= next_ping:
                self._link.ping()
                next_ping = time.monotonic() + _TRACKER_PERIOD_S

    def _parent_gone(self) -> bool:
        return self._lifeline_fd is not None and lifeline.parent_gone(self._parent, self._lifeline_fd, 0.0)

    def _accept(self) -> bool:
        """Take one connection and serve it to its end; True if a session took place."""
        conn, peer = self._listener.accept()
        with conn:
            try:
                options = self._handshake(conn)
            except (OSError, ValueError, struct.error) as error:
                log.warning("refused %s: %s", peer[0], error)
                return False
            folder = tempfile.mkdtemp(prefix="layoutsearch-session-")
            try:
                self._serve(conn, folder, options)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        return True

    def _handshake(self, conn: socket.socket) -> float | None:
        """TVM's handshake. Returns the session timeout that the client asked for, in seconds."""
        from tvm.rpc import base

        conn.settimeout(_HANDSHAKE_S)
        conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        magic, length = struct.unpack("<ii", base.recvall(conn, 8))
        if magic != base.RPC_MAGIC or not 0 < length < 4096:
            raise ValueError("it does not speak TVM RPC")
        name, *options = base.recvall(conn, length).decode().split()
        expected = self._link.match_key if self._link else self._key
        if name != f"client:{expected}" or (self._link and not expected):
            conn.sendall(struct.pack("<i", base.RPC_CODE_MISMATCH))
            raise ValueError(f"it asked for {name!r}")
        reply = f"server:{self._key}".encode()
        conn.sendall(struct.pack("<ii", base.RPC_CODE_SUCCESS, len(reply)) + reply)
        conn.settimeout(None)  # the C++ side expects a blocking socket
        timeouts = [float(option[9:]) for option in options if option.startswith("-timeout=")]
        return timeouts[0] if timeouts and timeouts[0] > 0 else None

    def _serve(self, conn: socket.socket, folder: str, timeout_s: float | None) -> None:
        child = self._fork.Process(target=_session_main, args=(conn, folder, self._listener, os.getpid()), daemon=True)
        child.start()
        assert child.pid is not None
        try:
            reason = self._watch(conn, child.sentinel, timeout_s)
            if reason == "ended":
                child.join()
                if child.exitcode != _CLEAN_EXIT:
                    reason = _describe_exit(child.exitcode)
                    _tell_client(conn, f"{CRASH_MARK} {reason}")
            elif reason == "expired":
                _tell_client(conn, f"RPCSessionTimeoutError: the session lasted longer than {timeout_s:g} s")
            log.info("session: %s", reason)
        finally:
            if child.is_alive():
                lifeline.kill_group(child.pid)
            child.join()

    def _watch(self, conn: socket.socket, child_fd: int, timeout_s: float | None) -> str:
        """Wait for the end of a session: ended, expired, closed or abandoned by its client, orphaned by our parent."""
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(child_fd, select.POLLIN)
        if self._lifeline_fd is not None:
            poll.register(self._lifeline_fd, select.POLLIN)
        hung_up = getattr(select, "POLLRDHUP", 0)
        poll.register(conn, hung_up)
        while True:
            wait_s = min(deadline - time.monotonic(), _TRACKER_PERIOD_S)
            events = dict(poll.poll(max(0.0, wait_s) * 1000))
            if child_fd in events:
                return "ended"
            if self._parent_gone():
                return "orphaned"
            if time.monotonic() >= deadline:
                return "expired"
            if conn.fileno() in events:
                # An idle session ends by itself when its client closes; one that is in a kernel would not.
                ended, _, _ = select.select([child_fd], [], [], _ABANDONED_S)
                return "closed" if ended else "abandoned"


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"the process exited with code {code}"


def _tell_client(conn: socket.socket, message: str) -> None:
    from tvm.rpc import _ffi_api

    try:
        _ffi_api.ReturnException(conn.fileno(), message)
    except Exception as error:
        log.info("the client was gone before it could be told: %s", error)


def _parse_cpus(text: str) -> set[int]:
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _parse_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host, int(port)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `python -m layoutsearch.measure.server`."""
    parser = argparse.ArgumentParser(prog="layoutsearch.measure.server", description="TVM RPC server for a board")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default %(default)s)")
    parser.add_argument("--port", type=int, default=9090, help="port to bind; 0 takes a free one (default %(default)s)")
    parser.add_argument("--tracker", type=_parse_address, metavar="HOST:PORT", help="tracker to register with")
    parser.add_argument("--key", default="", help="device key under which the tracker offers this server")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of a kernel (default: all)")
    parser.add_argument("--cpus", type=_parse_cpus, help="cores to stay on, such as 0-3,6")
    parser.add_argument("--die-with-parent", action="store_true", help="end when standard input does")
    options = parser.parse_args(argv)
    if options.tracker and not options.key:
        parser.error("--tracker needs --key")
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    if options.host not in _LOOPBACK:
        log.warning("warning: TVM RPC has no authentication; whoever reaches %s can run code here", options.host)
    announce = lifeline.detach_output()
    os.environ.update(thread_env(options.threads))
    if options.cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, options.cpus)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    import tvm.rpc  # noqa: F401  (a second; here, so that sessions fork with it loaded)

    logging.getLogger("RPCServer").setLevel(logging.ERROR)
    server = Server(
        options.host,
        options.port,
        options.key,
        options.tracker,
        sys.stdin.fileno() if options.die_with_parent else None,
    )
    os.write(announce, f"port {server.port}\n".encode())
    os.close(announce)
    log.info("serving on %s:%d with %d threads", options.host, server.port, options.threads)
    try:
        server.run()
    except KeyboardInterrupt:
        log.info("stopped")


if __name__ == "__main__":
    main()
