"""A real calibration of this machine; how fast it is is nobody's business here."""

from __future__ import annotations

from pathlib import Path

import pytest

from layoutsearch.errors import DeviceError
from layoutsearch.measure.calibrate import calibrate, profile_for, target_text
from layoutsearch.measure.device import Device
from layoutsearch.measure.profile import PROFILE_VERSION, ProfileStore
from layoutsearch.targets import local_architecture


@pytest.mark.slow
def test_the_limits_of_this_machine_make_sense(tmp_path: Path) -> None:
    threads = 2
    said: list[str] = []
    store = ProfileStore(tmp_path)
    with Device.local(threads) as device:
        profile = calibrate(device, tell=said.append, budget_s=0.5)
        identity = device.identity()
        store.save(profile, identity)
        # Stored now, so nothing is measured.
        assert profile_for(device, None, said.append, store) == profile
    assert profile.version == PROFILE_VERSION
    assert (profile.key, profile.cpu, profile.threads) == (identity.key, identity.cpu, threads)
    assert profile.target == target_text()
    for rates in (profile.peak_gflops, profile.one_thread_gflops):
        assert set(rates) == {"float32", "float64"}
        assert all(rate > 0.01 for rate in rates.values())
    assert profile.levels[-1].name == "memory"
    assert profile.caches
    assert profile.levels[0].gb_s >= profile.memory_gb_s > 0.01
    assert profile.least_call_us > 0
    assert profile.call_us > 0
    assert len(said) >= 3


def test_code_for_another_cpu_fails_in_one_line() -> None:
    other = "x86_64" if local_architecture() == "aarch64" else "aarch64"
    foreign = {"kind": "llvm", "mtriple": f"{other}-linux-gnu"}
    with Device.local(1) as device, pytest.raises(DeviceError, match=f"cannot run code for {other}") as caught:
        calibrate(device, foreign, budget_s=0.1)
    assert "\n" not in str(caught.value)
