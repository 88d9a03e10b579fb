"""Stored profiles: they come back as they were, or are refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layoutsearch.measure import calibrate as calibration
from layoutsearch.measure.device import DeviceIdentity
from layoutsearch.measure.profile import (
    HOME_VARIABLE,
    PROFILE_VERSION,
    DeviceProfile,
    MemoryLevel,
    ProfileError,
    ProfileStore,
)

IDENTITY = DeviceIdentity("board", "Some CPU @ 2 GHz", ("avx2", "fma"), 4, 2)
TARGET = calibration.target_text({"kind": "llvm"})
PROFILE = DeviceProfile(
    PROFILE_VERSION,
    IDENTITY.key,
    IDENTITY.cpu,
    IDENTITY.features,
    IDENTITY.threads,
    {"float32": 100.5, "float64": 50.25},
    (MemoryLevel("l1", 65536, 400.0), MemoryLevel("l2", 1 << 20, 200.0), MemoryLevel("memory", 0, 12.5)),
    2.5,
    "2030-01-02T03:04:05+00:00",
    TARGET,
    0.03,
    {"float32": 60.0},
    0.05,
)


@pytest.fixture
def store(tmp_path: Path) -> ProfileStore:
    return ProfileStore(tmp_path)


def change(store: ProfileStore, **values: Any) -> None:
    path = store.path(IDENTITY, TARGET)
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def refusal(store: ProfileStore) -> str:
    with pytest.raises(ProfileError) as caught:
        store.load(IDENTITY, TARGET)
    text = str(caught.value)
    assert "\n" not in text
    assert str(store.path(IDENTITY, TARGET)) in text
    return text


def test_what_was_saved_is_loaded_and_nothing_else_lies_there(store: ProfileStore) -> None:
    assert store.load(IDENTITY, TARGET) is None
    path = store.save(PROFILE, IDENTITY)
    assert store.load(IDENTITY, TARGET) == PROFILE
    store.save(replace(PROFILE, call_us=3.0), IDENTITY)
    loaded = store.load(IDENTITY, TARGET)
    assert loaded is not None
    assert loaded.call_us == 3.0
    assert [p.name for p in store.folder.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "other",
    [
        replace(IDENTITY, key="board2"),
        replace(IDENTITY, cpu="Another CPU"),
        replace(IDENTITY, features=("avx2",)),
        replace(IDENTITY, threads=1),
    ],
)
def test_another_device_or_target_has_a_profile_of_its_own(store: ProfileStore, other: DeviceIdentity) -> None:
    store.save(PROFILE, IDENTITY)
    assert store.load(other, TARGET) is None
    assert store.load(IDENTITY, "another target") is None


@pytest.mark.parametrize("key", ["../../etc", "rack/3:board é", "...", "k" * 500])
def test_any_device_key_names_a_file_in_the_folder(store: ProfileStore, key: str) -> None:
    identity = replace(IDENTITY, key=key)
    path = store.save(replace(PROFILE, key=key), identity)
    assert path.parent == store.folder
    assert store.load(identity, TARGET) == replace(PROFILE, key=key)


def test_another_version_is_refused(store: ProfileStore) -> None:
    store.save(PROFILE, IDENTITY)
    for version in (PROFILE_VERSION - 1, PROFILE_VERSION + 1, None, True):
        change(store, version=version)
        line = refusal(store)
        assert f"version {version}" in line
        assert "layoutsearch device calibrate" in line


def test_what_an_older_version_recorded_is_read() -> None:
    data = {**PROFILE.to_json(), "version": 1}
    assert DeviceProfile.from_json(data) == replace(PROFILE, version=1)
    with pytest.raises(ProfileError):
        DeviceProfile.from_json({**data, "version": 0})


@pytest.mark.parametrize("text", ["", "{", "[]", '"profile"', "\x00\xff", "null"])
def test_a_damaged_file_is_refused(store: ProfileStore, text: str) -> None:
    store.save(PROFILE, IDENTITY)
    store.path(IDENTITY, TARGET).write_bytes(text.encode("latin-1"))
    refusal(store)


@pytest.mark.parametrize(
    "values",
    [
        {"levels": []},
        {"levels": [{"name": "l1", "bytes": 1024, "gb_s": 5.0}]},
        {"levels": [{"name": "l1", "bytes": -4, "gb_s": 5.0}, {"name": "memory", "bytes": 0, "gb_s": 1.0}]},
        {"levels": [{"name": "memory", "bytes": 0, "gb_s": 0.0}]},
        {"peak_gflops": {"float32": -1.0}},
        {"peak_gflops": 3},
        {"call_us": "soon"},
        {"call_us": -1.0},
        {"threads": None},
        {"cpu": "Another CPU"},
    ],
)
def test_values_that_make_no_sense_are_refused(store: ProfileStore, values: dict[str, Any]) -> None:
    store.save(PROFILE, IDENTITY)
    change(store, **values)
    refusal(store)


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match=HOME_VARIABLE):
        ProfileStore(tmp_path / "file" / "devices").save(PROFILE, IDENTITY)


def test_the_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    assert ProfileStore().folder == tmp_path / "devices"


class FakeDevice:
    key, threads = IDENTITY.key, IDENTITY.threads

    def identity(self) -> DeviceIdentity:
        return IDENTITY


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calibrations that were made, by target."""
    calls: list[str] = []

    def calibrate(_device: Any, target: Any, _tell: Any) -> DeviceProfile:
        calls.append(calibration.target_text(target))
        return replace(PROFILE, target=calls[-1])

    monkeypatch.setattr(calibration, "calibrate", calibrate)
    return calls


def test_a_device_is_calibrated_once(store: ProfileStore, made: list[str]) -> None:
    said: list[str] = []
    device: Any = FakeDevice()
    for _ in range(3):
        assert calibration.profile_for(device, {"kind": "llvm"}, said.append, store) == PROFILE
    assert made == [TARGET]
    assert len(said) == 1


def test_a_busy_device_is_said(store: ProfileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "calibrate", lambda *_: replace(PROFILE, disturbed=0.5))
    said: list[str] = []
    device: Any = FakeDevice()
    assert calibration.profile_for(device, {"kind": "llvm"}, said.append, store).is_doubtful
    assert "busy" in said[-1]
    assert "layoutsearch device calibrate" in said[-1]


def test_a_damaged_profile_is_made_again_and_that_is_said(store: ProfileStore, made: list[str]) -> None:
    store.save(PROFILE, IDENTITY)
    change(store, version=99)
    said: list[str] = []
    device: Any = FakeDevice()
    assert calibration.profile_for(device, {"kind": "llvm"}, said.append, store) == PROFILE
    assert made == [TARGET]
    assert "version 99" in said[0]
    assert store.load(IDENTITY, TARGET) == PROFILE
