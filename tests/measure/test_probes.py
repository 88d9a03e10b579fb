"""Probes do all the work that their rates stand for: one that skipped some would find limits that are too high."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tvm

from layoutsearch.measure.device import Device
from layoutsearch.measure.probe_kernels import SMALL
from layoutsearch.measure.probes import COLD_READS, ProbeSet, build_probes, cold_read, probe_set
from layoutsearch.schedule import TargetInfo
from layoutsearch.targets import local_target

THREADS = 2


class Remote:
    """The library on a device, functions over numpy arrays."""

    def __init__(self, session: Any, path: str) -> None:
        self._session, self._module = session, session.load(path)

    def __call__(self, function: str, *args: Any) -> list[np.ndarray]:
        """The arrays after the call."""
        cpu = self._session.cpu
        sent = [tvm.runtime.tensor(a, device=cpu) if isinstance(a, np.ndarray) else a for a in args]
        with self._session.deadline(60):
            self._module[function](*sent)
            return [t.numpy() for t, a in zip(sent, args, strict=True) if isinstance(a, np.ndarray)]


@pytest.fixture(scope="module")
def probes() -> ProbeSet:
    return probe_set(TargetInfo.from_target(local_target(), THREADS))


@pytest.fixture(scope="module")
def capacity(probes: ProbeSet) -> int:
    return 16 * THREADS * probes.step


@pytest.fixture(scope="module")
def remote(probes: ProbeSet, capacity: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    path = str(tmp_path_factory.mktemp("probes") / "probes.so")
    build_probes(probes, capacity, local_target(), path)
    with Device.local(THREADS) as device:
        yield Remote(device.session(60), path)


def whole_numbers(size: int) -> np.ndarray:
    """Numbers whose sums are exact in float32."""
    return np.random.default_rng(0).integers(-8, 9, size).astype("float32")


@pytest.mark.parametrize("function", ["read", "read_spread"])
@pytest.mark.parametrize(("steps", "passes"), [(1, 1), (16, 1), (7, 3)])
def test_reads_see_every_element_of_the_working_set_in_every_pass(
    remote: Remote, probes: ProbeSet, capacity: int, function: str, steps: int, passes: int
) -> None:
    x = whole_numbers(capacity)
    _, y = remote(function, x, np.zeros(capacity, "float32"), steps, passes)
    assert y.sum() == passes * x[: steps * THREADS * probes.step].sum()


@pytest.mark.parametrize(("steps", "passes"), [(1, 1), (8, 2)])
def test_copy_and_add_write_the_working_set_and_nothing_else(
    remote: Remote, probes: ProbeSet, capacity: int, steps: int, passes: int
) -> None:
    x, size = whole_numbers(capacity), steps * THREADS * probes.step
    _, copied = remote("copy", x, np.full(capacity, 99, "float32"), steps, passes)
    _, added = remote("add", x, np.full(capacity, 99, "float32"), steps, passes)
    assert (copied[:size] == x[:size]).all()
    assert (added[:size] == x[:size] + x[size : 2 * size]).all()
    assert (copied[size:] == 99).all()
    assert (added[size:] == 99).all()


@pytest.mark.parametrize("read", COLD_READS[:2])
def test_cold_reads_see_every_element(remote: Remote, probes: ProbeSet, read: tuple[int, int]) -> None:
    x = whole_numbers(read[0])
    _, _, out = remote(cold_read(*read), np.zeros(SMALL, "float32"), x, np.zeros(THREADS * probes.step, "float32"))
    assert out.sum(dtype="float64") == x.sum(dtype="float64")


@pytest.mark.parametrize("tasks", [1, THREADS])
def test_every_sum_of_a_peak_probe_takes_every_round(remote: Remote, probes: ProbeSet, tasks: int) -> None:
    for probe in probes.peaks:
        size = probe.lanes * probe.accumulators
        x = np.repeat(np.array([2.0, 1.0], probe.dtype), probe.lanes)
        _, out = remote(probe.function, x, np.zeros(THREADS * size, probe.dtype), 5, tasks)
        expected = 2.0
        for _ in range(5):
            expected = 2.0 * expected + 1.0
        assert (out[: tasks * size] == expected).all()
        assert (out[tasks * size :] == 0).all()
        assert probe.flops == 2 * size
