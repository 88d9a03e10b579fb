"""A device profile that was made up, stored for this machine."""

from __future__ import annotations

from typing import Any

from layoutsearch.measure.device import Device
from layoutsearch.measure.profile import PROFILE_VERSION, DeviceProfile, MemoryLevel, ProfileStore


def store_profile(threads: int, target: str, levels: tuple[MemoryLevel, ...], **more: Any) -> DeviceProfile:
    """A profile of this machine with so many threads for a target; `more` are further fields."""
    with Device.local(threads) as device:
        identity = device.identity()
    profile = DeviceProfile(
        PROFILE_VERSION,
        identity.key,
        identity.cpu,
        identity.features,
        identity.threads,
        {"float32": 123.4},
        levels,
        2.25,
        "2030-01-02T03:04:05+00:00",
        target,
        0.05,
        **more,
    )
    ProfileStore().save(profile, identity)
    return profile
