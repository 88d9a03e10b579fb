"""The caches of this machine as Linux tells them; runs on the device, in its server."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from layoutsearch.measure.placement import usable_cores

_CPUS = Path("/sys/devices/system/cpu")
_CPUINFO = Path("/proc/cpuinfo")
# A virtual machine is told of the whole last cache and shares it with others: bandwidth fell behind 64 of 260 MiB.
_GUEST_SHARE, _SHARED_LEVEL = 4, 3
USUAL_LAST_BYTES = 16 << 20
"""What a server takes for the last cache where the system tells of none."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def holds(last_bytes: int, footprint: int) -> bool:
    """Whether a last cache holds what a model goes over in turn, so that it finds its weights there again: half of a
    cache does. 0 bytes stand for more than any cache holds."""
    return 0 < footprint <= last_bytes // 2


def describe_caches(
    root: Path = _CPUS, cpus: Iterable[int] | None = None, cpuinfo: Path = _CPUINFO
) -> list[dict[str, int]]:
    """Data and unified caches that the given CPUs (those of this process by default) can use, fastest first.

    Returns:
        For each level its number, the bytes of one cache that a program can count on (of a third level within a virtual
        machine a quarter), those it has (`whole`) and how many of them there are; empty where nothing is said.
    """
    if cpus is None:
        cpus = usable_cores()
    found: dict[int, dict[str, int]] = {}
    for cpu in sorted(cpus):
        for index in sorted(root.glob(f"cpu{cpu}/cache/index*")):
            try:
                kind, level, size, shared = (
                    (index / name).read_text().strip() for name in ("type", "level", "size", "shared_cpu_list")
                )
            except OSError:
                continue
            amount = re.fullmatch(r"(\d+)([KMG]?)", size)
            if kind != "Instruction" and amount and level.isdigit():
                found.setdefault(int(level), {})[shared] = int(amount[1]) * _UNITS[amount[2]]
    guests = _GUEST_SHARE if _is_guest(cpuinfo) else 1
    return [
        {
            "level": level,
            "bytes": max(caches.values()) // (guests if level >= _SHARED_LEVEL else 1),
            "whole": max(caches.values()),
            "count": len(caches),
        }
        for level, caches in sorted(found.items())
    ]


def _is_guest(cpuinfo: Path) -> bool:
    try:
        flags = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return False
    return flags is not None and "hypervisor" in flags[1].split()


def available_bytes(path: Path = Path("/proc/meminfo")) -> int:
    """Memory that a new program can have; 0 where nothing is said."""
    try:
        said = re.search(r"^MemAvailable:\s*(\d+) kB", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(said[1]) << 10 if said else 0
