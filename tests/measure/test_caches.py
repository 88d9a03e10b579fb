"""Caches from a folder like Linux's."""

from __future__ import annotations

from pathlib import Path

from layoutsearch.measure.caches import available_bytes, describe_caches


def cache(root: Path, cpu: int, index: int, level: int, size: str, shared: str, kind: str = "Unified") -> None:
    folder = root / f"cpu{cpu}" / "cache" / f"index{index}"
    folder.mkdir(parents=True)
    for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", shared), ("type", kind)):
        (folder / name).write_text(text + "\n")


def machine(root: Path) -> None:
    """Four CPUs in two cores: private L1, an L2 for each core, one L3."""
    for cpu in range(4):
        core = "0-1" if cpu < 2 else "2-3"
        cache(root, cpu, 0, 1, "48K", str(cpu), "Data")
        cache(root, cpu, 1, 1, "32K", str(cpu), "Instruction")
        cache(root, cpu, 2, 2, "2048K", core)
        cache(root, cpu, 3, 3, "32M", "0-3")


def test_data_caches_by_level_with_how_many_there_are(tmp_path: Path) -> None:
    machine(tmp_path)
    assert describe_caches(tmp_path, range(4), tmp_path / "none") == [
        {"level": 1, "bytes": 48 << 10, "whole": 48 << 10, "count": 4},
        {"level": 2, "bytes": 2 << 20, "whole": 2 << 20, "count": 2},
        {"level": 3, "bytes": 32 << 20, "whole": 32 << 20, "count": 1},
    ]


def test_a_virtual_machine_counts_on_a_quarter_of_the_shared_cache(tmp_path: Path) -> None:
    machine(tmp_path)
    cpuinfo = tmp_path / "cpuinfo"
    for flags, megabytes in (("fpu hypervisor avx2", 8), ("fpu avx2", 32)):
        cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
        found = describe_caches(tmp_path, range(4), cpuinfo)
        assert [c["bytes"] for c in found] == [48 << 10, 2 << 20, megabytes << 20]


def test_only_the_caches_of_the_given_cpus_count(tmp_path: Path) -> None:
    machine(tmp_path)
    assert [c["count"] for c in describe_caches(tmp_path, [0, 1])] == [2, 1, 1]


def test_a_machine_that_does_not_say_has_none(tmp_path: Path) -> None:
    assert describe_caches(tmp_path, [0]) == []
    cache(tmp_path, 0, 0, 1, "unknown", "0")
    assert describe_caches(tmp_path, [0]) == []


def test_free_memory(tmp_path: Path) -> None:
    path = tmp_path / "meminfo"
    assert available_bytes(path) == 0
    path.write_text("MemTotal:       100 kB\nMemAvailable:    64 kB\n")
    assert available_bytes(path) == 64 << 10
