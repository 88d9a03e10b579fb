"""How a helper process ends with the process that started it, however that one ends.

The parent holds the writing end of the child's standard input. Its end of file, or a change of parent, means that
the parent is gone. Pipes alone do not do: a fork of the parent may hold a copy of the writing end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

POLL_S = 0.5
_PR_SET_PDEATHSIG = 1


def spawn(module: str, args: Sequence[str], log: IO[bytes] | int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start `python -m module` with a pipe as standard input (the lifeline) and one as standard output.

    It gets a session of its own: Ctrl-C at the terminal is for the parent, which then ends its helpers in order.
    """
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [sys.executable, "-m", module, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env={**os.environ, **env, "PYTHONPATH": path},
        start_new_session=True,
    )


def stop(process: subprocess.Popen[bytes], grace_s: float = 2.0) -> None:
    """End a spawned process: by its lifeline first, then by force. Safe to call twice."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # unsent bytes to a process that is gone
                pipe.close()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        kill_group(process.pid)
        process.wait()


def kill_group(pid: int) -> None:
    """SIGKILL the process group led by `pid`, compilers and other children of it included."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def detach_output() -> int:
    """Keep standard output for the protocol alone: returns a private copy, and sends prints to standard error."""
    private = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return private


def die_with_creator(parent: int) -> None:
    """Linux: SIGKILL for this process when the *thread* that created it ends. No-op elsewhere."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def exit_with_parent(fd: int | None) -> None:
    """Watch the lifeline `fd` (None: the parent's id alone) from a daemon thread; end this process with the parent."""
    parent = os.getppid()

    def watch() -> None:
        while not parent_gone(parent, fd, POLL_S):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()


def parent_gone(parent: int, fd: int | None, wait_s: float) -> bool:
    """True if the parent ended; waits up to `wait_s` for that to happen."""
    readable, _, _ = select.select([] if fd is None else [fd], [], [], wait_s)
    return os.getppid() != parent or (bool(readable) and fd is not None and os.read(fd, 1) == b"")
