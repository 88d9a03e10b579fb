"""`layoutsearch device`: what is stored is shown, what is not is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from layoutsearch.measure.calibrate import target_text
from layoutsearch.measure.profile import HOME_VARIABLE, DeviceProfile, MemoryLevel, ProfileStore
from tests.cli.made_profile import store_profile
from tests.cli.running import call, refused


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))


@pytest.fixture
def profile() -> DeviceProfile:
    """Made up, and stored for one thread of this machine."""
    levels = (MemoryLevel("l1", 48 << 10, 456.7), MemoryLevel("memory", 0, 8.9))
    return store_profile(1, target_text(), levels, one_thread_gflops={"float32": 123.4})


def test_a_device_that_is_not_calibrated_is_named_with_what_to_run(capfd: pytest.CaptureFixture[str]) -> None:
    line = refused(capfd, "device", "show", "--threads", 1)
    assert "not calibrated" in line
    assert "layoutsearch device calibrate" in line


def test_a_stored_profile_is_shown(capfd: pytest.CaptureFixture[str], profile: DeviceProfile) -> None:
    code, out, _ = call(capfd, "device", "show", "--threads", 1, "--json")
    assert code == 0
    assert DeviceProfile.from_json(json.loads(out)) == profile
    code, out, _ = call(capfd, "device", "show", "--threads", 1)
    assert code == 0
    for word in (profile.cpu, "123.4", "456.7", "8.9", "48", "2.25"):
        assert word in out


def test_another_number_of_threads_or_target_is_another_profile(
    capfd: pytest.CaptureFixture[str], profile: DeviceProfile
) -> None:
    assert "not calibrated" in refused(capfd, "device", "show", "--threads", 1, "--target", "llvm -mcpu=core2")
    assert "not calibrated" in refused(capfd, "device", "show", "--threads", 2)


def test_a_damaged_profile_is_refused(capfd: pytest.CaptureFixture[str], profile: DeviceProfile) -> None:
    (path,) = ProfileStore().folder.iterdir()
    path.write_text("{}")
    assert str(path) in refused(capfd, "device", "show", "--threads", 1)


@pytest.mark.parametrize("command", ["show", "calibrate"])
def test_half_an_address_is_refused(capfd: pytest.CaptureFixture[str], command: str) -> None:
    assert "go together" in refused(capfd, "device", command, "--rpc", "127.0.0.1:1")
