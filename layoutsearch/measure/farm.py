"""RPC servers of our own on loopback, which go away with this process whatever happens to it."""

from __future__ import annotations

import select
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from layoutsearch.errors import DeviceError
from layoutsearch.measure import lifeline
from layoutsearch.measure.placement import usable_cores
from layoutsearch.measure.server import thread_env

_START_S = 60.0
_HOST = "127.0.0.1"


class _Helper:
    """One helper process that announces the port it listens on."""

    def __init__(self, module: str, args: Sequence[str], env: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("ab") as sink:
            self.process: subprocess.Popen[bytes] = lifeline.spawn(
                module, [*args, "--die-with-parent"], sink, {**env, "TMPDIR": str(log.parent)}
            )
        self.module = module
        self.port = 0

    def wait_ready(self, deadline: float) -> None:
        """Read the announced port; raise DeviceError with the last line of its log if there is none in time."""
        assert self.process.stdout is not None
        line = b""
        if select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            line = self.process.stdout.readline()
        if not line.startswith(b"port "):
            lifeline.stop(self.process, 0.0)
            said = self._log.read_text(errors="replace").strip().splitlines()
            raise DeviceError(f"{self.module} did not start on {_HOST}: {said[-1] if said else 'it said nothing'}")
        self.port = int(line.split()[1])
        self.process.stdout.close()


class LocalFarm:
    """Hardened servers, and a tracker if wanted, on loopback. A context manager.

    Args:
        servers: How many; each serves one session at a time.
        threads: Threads of a kernel on each.
        key: Device key, for the tracker and for direct connections.
        tracker: Also start a tracker and register the servers with it.

    Several servers are kept on disjoint cores where the machine has enough of them.
    """

    def __init__(self, servers: int = 1, threads: int = 1, key: str = "local", tracker: bool = False) -> None:
        if servers < 1 or threads < 1:
            raise ValueError(f"servers and threads are at least 1, not {servers} and {threads}")
        self.key, self.threads = key, threads
        self._count, self._with_tracker = servers, tracker
        self._folder: Path | None = None
        self._servers: list[_Helper] = []
        self._tracker: _Helper | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> LocalFarm:
        self._folder = Path(tempfile.mkdtemp(prefix="layoutsearch-farm-"))
        deadline = time.monotonic() + _START_S
        try:
            if self._with_tracker:
                self._tracker = _Helper(
                    "layoutsearch.measure.tracker", ["--port", "0"], {}, self._folder / "tracker.log"
                )
                self._tracker.wait_ready(deadline)
            self._servers = [self._start_server(index) for index in range(self._count)]
            for server in self._servers:
                server.wait_ready(deadline)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def host(self) -> str:
        """Address of the servers."""
        return _HOST

    @property
    def ports(self) -> tuple[int, ...]:
        """Port of each server."""
        return tuple(server.port for server in self._servers)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process id of each server, then of the tracker."""
        helpers = [*self._servers, *([self._tracker] if self._tracker else [])]
        return tuple(helper.process.pid for helper in helpers)

    @property
    def tracker_address(self) -> str:
        """HOST:PORT of the tracker."""
        if self._tracker is None:
            raise ValueError("this farm was started without a tracker")
        return f"{_HOST}:{self._tracker.port}"

    def ensure(self, index: int = 0) -> int:
        """Port of a server that is alive; one that ended is started again, on a new port."""
        with self._lock:
            if self._folder is None:
                raise DeviceError("the local RPC servers are stopped; enter LocalFarm or Device.local again")
            if self._servers[index].process.poll() is not None:
                lifeline.stop(self._servers[index].process)
                self._servers[index] = self._start_server(index)
                self._servers[index].wait_ready(time.monotonic() + _START_S)
            return self._servers[index].port

    def close(self) -> None:
        """Stop everything. Safe to call twice."""
        for helper in [*self._servers, *([self._tracker] if self._tracker else [])]:
            lifeline.stop(helper.process)
        self._servers, self._tracker = [], None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start_server(self, index: int) -> _Helper:
        assert self._folder is not None
        args = ["--port", "0", "--key", self.key, "--threads", str(self.threads)]
        if self._tracker is not None:
            args += ["--tracker", self.tracker_address]
        cores = sorted(usable_cores())
        if self._count > 1 and len(cores) >= self._count * self.threads:
            own = cores[index * self.threads : (index + 1) * self.threads]
            args += ["--cpus", ",".join(map(str, own))]
        log = self._folder / f"server-{index}.log"
        return _Helper("layoutsearch.measure.server", args, thread_env(self.threads), log)
