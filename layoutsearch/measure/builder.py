"""A pool of warm build processes that survives what compilers do: crash, hang, eat memory."""

from __future__ import annotations

import pickle
import queue
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

import cloudpickle

from layoutsearch.measure import lifeline
from layoutsearch.measure.results import RunFailed, Status, one_line

_START_S = 60.0
_MAX_JOBS = 300


@dataclass(frozen=True)
class BuildResult:
    """What a job returned, or why it did not.

    Attributes:
        status: ok, build_error (it raised), build_crash (its process died) or build_timeout.
        value: What the function returned; None for a failure.
        error: One line; empty when the status is ok.
        wall_s: Seconds in the worker.
    """

    status: Status
    value: Any = None
    error: str = ""
    wall_s: float = 0.0

    @property
    def ok(self) -> bool:
        """True if the function returned."""
        return self.status is Status.OK

    def get(self) -> Any:
        """The value; raises RunFailed for a failure."""
        if not self.ok:
            raise RunFailed(self.status, self.error)
        return self.value


@dataclass(frozen=True)
class _Job:
    function: str
    payload: bytes
    timeout_s: float
    future: Future[BuildResult]


class Builder:
    """Runs functions in spawned worker processes. A context manager.

    Workers are spawned, never forked: a fork after TVM's thread pool has started hangs. They stay warm between jobs,
    are replaced after a crash or a hang, and end with this process whatever happens to it.

    Args:
        workers: How many processes.
        timeout_s: Limit of a job.
        memory_bytes: Limit of what a worker may allocate; None for no limit. A job beyond it fails, alone.
        preload: Modules that a worker imports before its first job, outside the job's time limit.
    """

    def __init__(
        self,
        workers: int = 2,
        timeout_s: float = 60.0,
        memory_bytes: int | None = None,
        preload: tuple[str, ...] = ("tvm",),
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers is at least 1, not {workers}")
        self._timeout_s = timeout_s
        self._memory_bytes, self._preload = memory_bytes, preload
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._run, name=f"builder-{i}", daemon=True) for i in range(workers)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Builder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, function: str, payload: Any, timeout_s: float | None = None) -> Future[BuildResult]:
        """Run `function` ("package.module:name") on `payload` in a worker.

        The payload and the value that it returns travel by pickle. The future always gets a BuildResult; it is
        cancelled when the builder closes first.
        """
        if self._closing.is_set():
            raise RuntimeError("the builder is closed")
        future: Future[BuildResult] = Future()
        limit = self._timeout_s if timeout_s is None else timeout_s
        self._jobs.put(_Job(function, cloudpickle.dumps(payload), limit, future))
        return future

    def close(self) -> None:
        """Cancel what has not started, end what runs. Safe to call twice."""
        self._closing.set()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        """Thread of one worker: its process is replaced as often as needed."""
        worker: _Worker | None = None
        try:
            while True:
                job = self._jobs.get()
                if job is None or self._closing.is_set():
                    if job is None:
                        return
                    job.future.cancel()
                    continue
                if not job.future.set_running_or_notify_cancel():
                    continue
                try:
                    if worker is None:
                        worker = _Worker(self._memory_bytes, self._preload)
                    result = worker.run(job, self._closing)
                except Exception as error:
                    job.future.set_exception(error)
                    result = None
                if result is not None:
                    job.future.set_result(result)
                if worker is not None and worker.worn:
                    worker.stop()
                    worker = None
        finally:
            if worker is not None:
                worker.stop()


class _Worker:
    """One worker process, as seen from its thread."""

    def __init__(self, memory_bytes: int | None, preload: tuple[str, ...]) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        args = [str(memory_bytes or 0), ",".join(preload)]
        self._process: subprocess.Popen[bytes] = lifeline.spawn(
            "layoutsearch.measure.build_worker", args, self._log, {}
        )
        self._jobs = 0
        self._broken = False
        self._send(pickle.dumps(sys.path))
        if self._receive(_START_S, None) is None:
            said = self._last_words()
            self.stop()
            raise RunFailed(Status.BUILD_CRASH, f"a build process did not start: {said}")

    @property
    def worn(self) -> bool:
        """True if the next job needs a new process."""
        return self._broken or self._jobs >= _MAX_JOBS

    def run(self, job: _Job, closing: threading.Event) -> BuildResult:
        """Run one job to its result, whatever that is."""
        self._jobs += 1
        began = time.monotonic()
        self._send(pickle.dumps((job.function, job.payload)))
        reply = self._receive(job.timeout_s, closing)
        wall_s = time.monotonic() - began
        if reply is not None:
            status, value, error = pickle.loads(reply)
            return BuildResult(Status(status), value, error, wall_s)
        self._broken = True
        alive = self._process.poll() is None and wall_s >= job.timeout_s
        self.stop(keep_log=True)
        if closing.is_set():
            result = BuildResult(Status.BUILD_CRASH, None, "the builder was closed during the job", wall_s)
        elif alive:
            result = BuildResult(Status.BUILD_TIMEOUT, None, f"no result within {job.timeout_s:g} s", wall_s)
        else:
            result = BuildResult(Status.BUILD_CRASH, None, self._describe_exit(), wall_s)
        self._log.close()
        return result

    def stop(self, keep_log: bool = False) -> None:
        """Kill the process and its children: a compiler in C++ hears nothing else."""
        self._broken = True
        if self._process.poll() is None:
            lifeline.kill_group(self._process.pid)
        lifeline.stop(self._process)
        if not keep_log:
            self._log.close()

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(struct.pack("<q", len(data)) + data)
            self._process.stdin.flush()
        except OSError:
            pass  # the process is gone, which the missing reply will say

    def _receive(self, timeout_s: float, closing: threading.Event | None) -> bytes | None:
        """One message; None if the process ended, the time is over or the builder closes."""
        deadline = time.monotonic() + timeout_s
        header = self._read(8, deadline, closing)
        if header is None:
            return None
        return self._read(struct.unpack("<q", header)[0], deadline, closing)

    def _read(self, size: int, deadline: float, closing: threading.Event | None) -> bytes | None:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        data = bytearray()
        while len(data) < size:
            wait_s = min(deadline - time.monotonic(), 0.2)
            if wait_s <= 0 or (closing is not None and closing.is_set()):
                return None
            if not select.select([fd], [], [], wait_s)[0]:
                continue
            chunk = self._process.stdout.read1(min(size - len(data), 1 << 20))  # type: ignore[attr-defined]
            if not chunk:
                self._process.wait()
                return None
            data += chunk
        return bytes(data)

    def _describe_exit(self) -> str:
        code = self._process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"the build process was {how}: {self._last_words()}" if code < 0 else f"the build process {how}"

    def _last_words(self) -> str:
        self._log.seek(0)
        said = self._log.read()[-8000:].decode(errors="replace").strip()
        return one_line(said, last=True, limit=200) if said else "it said nothing"
