"""A client of TVM's RPC tracker that never blocks without a limit, and a tracker that ends with its parent.

python -m layoutsearch.measure.tracker --host 127.0.0.1 --port 9190
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from layoutsearch.errors import DeviceError
from layoutsearch.measure import lifeline
from layoutsearch.measure.results import DeviceFailed, Status

_MAGIC = 0x2F271
_REQUEST = 4
_SUMMARY = 6
_MAX_REPLY = 1 << 24


class UnknownKeyError(DeviceFailed):
    """The tracker serves no device under the key."""


@dataclass(frozen=True)
class TrackerSummary:
    """Servers registered for each key, and how many of them are free now."""

    servers: dict[str, int]
    free: dict[str, int]


class TrackerClient:
    """Talks to one tracker; a connection for each question, each with a timeout."""

    def __init__(self, address: str, timeout_s: float = 3.0) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise DeviceError(f"tracker address {address!r} is not HOST:PORT, such as 127.0.0.1:9190")
        self.address = address
        self._addr = (host.strip("[]"), int(port))
        self._timeout_s = timeout_s

    def summary(self) -> TrackerSummary:
        """What the tracker serves.

        Raises:
            DeviceFailed: no_tracker.
        """
        try:
            with self._connect() as sock:
                reply = self._ask(sock, [_SUMMARY])
        except (OSError, ValueError) as error:
            raise self._no_tracker(error) from None
        servers: dict[str, int] = {}
        for info in reply[1]["server_info"]:
            key = info["key"].split(":", 1)[1]
            servers[key] = servers.get(key, 0) + 1
        return TrackerSummary(servers, {key: queue["free"] for key, queue in reply[1]["queue_info"].items()})

    def check_key(self, key: str) -> None:
        """Raise UnknownKeyError, naming the keys that are served, unless `key` is one of them."""
        served = self.summary().servers
        if key not in served:
            have = ", ".join(f"{name} ({count})" for name, count in sorted(served.items())) or "none"
            raise UnknownKeyError(
                Status.NO_DEVICE,
                f"tracker {self.address} serves no device with key {key!r}; keys that it serves: {have}. "
                f"Start one on the board: python -m layoutsearch.measure.server --tracker {self.address} --key {key}",
            )

    def acquire(self, key: str, wait_s: float) -> tuple[str, int, str]:
        """Host, port and match key of a device that is now ours to connect to.

        Leaving early withdraws the request: the tracker notices that the socket is closed.

        Raises:
            DeviceFailed: no_tracker, or no_device when all are busy for `wait_s`.
            UnknownKeyError: nothing serves the key, for which the tracker itself would wait for ever.
        """
        self.check_key(key)
        try:
            sock = self._connect()
        except (OSError, ValueError) as error:
            raise self._no_tracker(error) from None
        with sock:
            sock.settimeout(wait_s)
            try:
                reply = self._ask(sock, [_REQUEST, key, "", 1])
            except TimeoutError:
                message = f"every device with key {key!r} at tracker {self.address} was busy for {wait_s:g} s"
                raise DeviceFailed(Status.NO_DEVICE, message) from None
            except (OSError, ValueError) as error:
                raise self._no_tracker(error) from None
        host, port, match_key = reply[1]
        return str(host), int(port), str(match_key)

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(self._addr, self._timeout_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(struct.pack("<i", _MAGIC))
            if struct.unpack("<i", _receive(sock, 4))[0] != _MAGIC:
                raise OSError("it is no TVM RPC tracker")
        except BaseException:
            sock.close()
            raise
        return sock

    @staticmethod
    def _ask(sock: socket.socket, message: list[object]) -> list:
        body = json.dumps(message).encode()
        sock.sendall(struct.pack("<i", len(body)) + body)
        (size,) = struct.unpack("<i", _receive(sock, 4))
        if not 0 < size <= _MAX_REPLY:
            raise OSError("it is no TVM RPC tracker")
        reply = json.loads(_receive(sock, size))
        if not isinstance(reply, list) or len(reply) != 2 or reply[0] != 0:
            raise OSError(f"it answered {reply!r}")
        return reply

    def _no_tracker(self, error: Exception) -> DeviceFailed:
        return DeviceFailed(
            Status.NO_TRACKER,
            f"no RPC tracker at {self.address} ({error}); "
            f"start one: python -m layoutsearch.measure.tracker --port {self._addr[1]}",
        )


def _receive(sock: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes, within the socket's timeout as a whole."""
    limit = sock.gettimeout()
    deadline = None if limit is None else time.monotonic() + limit
    data = b""
    while len(data) < size:
        if deadline is not None:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise OSError("the connection was closed")
        data += chunk
    return data


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `python -m layoutsearch.measure.tracker`."""
    parser = argparse.ArgumentParser(prog="layoutsearch.measure.tracker", description="TVM RPC tracker")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default %(default)s)")
    parser.add_argument("--port", type=int, default=9190, help="port to bind; 0 takes a free one (default %(default)s)")
    parser.add_argument("--die-with-parent", action="store_true", help="end when standard input does")
    options = parser.parse_args(argv)
    announce = lifeline.detach_output()
    if options.die_with_parent:
        lifeline.exit_with_parent(sys.stdin.fileno())
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))
    from tvm.rpc import base
    from tvm.rpc.tracker import TrackerServerHandler

    logging.getLogger("RPCTracker").setLevel(logging.WARNING)
    if options.host not in ("127.0.0.1", "localhost", "::1"):
        print(f"warning: TVM RPC has no authentication and is open to whoever reaches {options.host}", file=sys.stderr)
    listener = socket.create_server((options.host, options.port))
    asyncio.set_event_loop(asyncio.new_event_loop())
    handler = TrackerServerHandler(listener, base.random_key("tracker"))
    os.write(announce, f"port {listener.getsockname()[1]}\n".encode())
    os.close(announce)
    handler.run()


if __name__ == "__main__":
    main()
