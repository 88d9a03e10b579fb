"""Which process something belongs to, in a form that outlives it: so that what a killed process left can be told."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

# The kernel tells the boot time in whole seconds, from a clock that may be adjusted meanwhile.
_SAME_START_S = 3.0
_FIRST_PID_NAMESPACE = "pid:[4026531836]"


@dataclass(frozen=True)
class Owner:
    """A process.

    Attributes:
        host: name of the machine; within a container, with its process namespace.
        boot: id of the machine's boot, empty where the system has none.
        pid: process id.
        started: seconds from boot to the start of the process, which setting the clock does not change.
    """

    host: str
    boot: str
    pid: int
    started: float

    @classmethod
    def current(cls) -> Owner:
        """This process."""
        return _owner(os.getpid())

    @classmethod
    def from_json(cls, data: object) -> Owner | None:
        """Inverse of `to_json`; None if it is nothing of the kind."""
        if not isinstance(data, Mapping):
            return None
        try:
            return cls(str(data["host"]), str(data["boot"]), int(data["pid"]), float(data["started"]))
        except (KeyError, TypeError, ValueError):
            return None

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Inverse of `str`; None if it is nothing of the kind."""
        try:
            return cls.from_json(json.loads(text))
        except ValueError:
            return None

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)

    def __str__(self) -> str:
        return json.dumps(self.to_json(), separators=(",", ":"))

    @property
    def dead(self) -> bool:
        """Whether it certainly runs no more. False for processes of other machines: nothing is known of them."""
        here = Owner.current()
        if self.host != here.host:
            return False
        if self.boot != here.boot:
            return True
        started = _started(self.pid)
        return started is None or abs(started - self.started) > _SAME_START_S


@cache
def _owner(pid: int) -> Owner:
    started = _started(pid)
    assert started is not None
    return Owner(_host(), _boot(), pid, round(started, 2))


def _started(pid: int) -> float | None:
    """Seconds from boot to the start of a process; None if there is none, or a zombie."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return float(process.create_time() - psutil.boot_time())
    except psutil.NoSuchProcess:
        return None


@cache
def _host() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = _FIRST_PID_NAMESPACE
    return socket.gethostname() + ("" if namespace == _FIRST_PID_NAMESPACE else f" {namespace}")


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
