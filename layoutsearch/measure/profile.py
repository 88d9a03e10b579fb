"""What a device can do at most, calibrated once and kept with its identity."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from layoutsearch.errors import LayoutSearchError

if TYPE_CHECKING:
    from layoutsearch.measure.device import DeviceIdentity

PROFILE_VERSION = 2
# Recorded tables carry the profile of their time: 1 has the same fields, and counts all of a last cache that is shared
# with other virtual machines.
_READABLE = (1, PROFILE_VERSION)
HOME_VARIABLE = "LAYOUTSEARCH_HOME"
MEMORY = "memory"
_DISTURBED = 0.15
_AGAIN = "make it again: layoutsearch device calibrate, with the same --threads and --target"


class ProfileError(LayoutSearchError):
    """A stored profile is missing, damaged or of another version."""


@dataclass(frozen=True)
class MemoryLevel:
    """A level of the memory hierarchy, as all threads together see it.

    Attributes:
        name: `l1`, `l2`, ... from the fastest cache on; `memory` is the last.
        bytes: what the level holds, the private caches of all threads added up; 0 for memory, which has no end.
        gb_s: the most bytes a second, read and written together, that any of our kernels moved from and to it.
    """

    name: str
    bytes: int
    gb_s: float


@dataclass(frozen=True)
class DeviceProfile:
    """Limits of one device with one number of threads, for code built for one target.

    Attributes:
        version: of this format and of the way of calibrating.
        key: device key.
        cpu: name of the CPU.
        features: its instruction sets.
        threads: threads of a kernel.
        peak_gflops: dtype -> most floating-point operations a nanosecond, all threads together; a multiply-add is two.
        levels: caches, fastest first, then memory.
        call_us: a parallel kernel that does nothing, called alone; typical.
        created: when, ISO 8601 in UTC.
        target: TVM target that the calibration was built for, canonical JSON.
        least_call_us: the fastest call of a kernel that does nothing, on one thread: no kernel takes less.
        one_thread_gflops: `peak_gflops` of a kernel that runs on one thread.
        disturbed: share of the samples of the peaks that were much slower than the best one; with more than a few the
            device was busy, and its limits may be higher than found.
        told: whether the device told of its caches; else they are read off the bandwidths, and its server, which takes
            them for usual ones, may leave weights elsewhere.
    """

    version: int
    key: str
    cpu: str
    features: tuple[str, ...]
    threads: int
    peak_gflops: Mapping[str, float]
    levels: tuple[MemoryLevel, ...]
    call_us: float
    created: str
    target: str = ""
    least_call_us: float = 0.0
    one_thread_gflops: Mapping[str, float] = field(default_factory=dict)
    disturbed: float = 0.0
    told: bool = True

    @property
    def caches(self) -> tuple[MemoryLevel, ...]:
        """The levels that hold a bounded number of bytes."""
        return tuple(level for level in self.levels if level.bytes)

    @property
    def is_doubtful(self) -> bool:
        """Whether the device was so busy that its limits should be found again."""
        return self.disturbed > _DISTURBED

    @property
    def memory_gb_s(self) -> float:
        """Bytes a nanosecond from and to memory."""
        return self.levels[-1].gb_s

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> DeviceProfile:
        """Inverse of `to_json`; older versions, as in recorded tables, are read too.

        Raises:
            ProfileError: an unknown version, or not a profile.
        """
        version = data.get("version") if isinstance(data, Mapping) else None
        if isinstance(version, bool) or version not in _READABLE:
            raise ProfileError(f"a device profile of version {version!r}, this layoutsearch reads {PROFILE_VERSION}")
        try:
            levels = tuple(MemoryLevel(str(v["name"]), int(v["bytes"]), float(v["gb_s"])) for v in data["levels"])
            profile = cls(
                version=version,
                key=str(data["key"]),
                cpu=str(data["cpu"]),
                features=tuple(map(str, data["features"])),
                threads=int(data["threads"]),
                peak_gflops={str(k): float(v) for k, v in data["peak_gflops"].items()},
                levels=levels,
                call_us=float(data["call_us"]),
                created=str(data["created"]),
                target=str(data["target"]),
                least_call_us=float(data["least_call_us"]),
                one_thread_gflops={str(k): float(v) for k, v in data["one_thread_gflops"].items()},
                disturbed=float(data["disturbed"]),
                told=bool(data.get("told", True)),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProfileError(f"a damaged device profile: {type(error).__name__} {error}") from None
        sizes = [level.bytes for level in levels]
        rising = sizes[-1:] == [0] and all(a < b for a, b in zip([0, *sizes[:-2]], sizes[:-1], strict=False))
        rates = [*(level.gb_s for level in levels), *profile.peak_gflops.values()]
        costs = [profile.call_us, profile.least_call_us, profile.disturbed]
        infinite = float("inf")
        if not rising or not all(0 < r < infinite for r in rates) or not all(0 <= c < infinite for c in costs):
            raise ProfileError("a damaged device profile: its numbers cannot be those of a device")
        return profile


def user_folder() -> Path:
    """What is kept between runs of any model: the user's folder of layoutsearch, or what LAYOUTSEARCH_HOME names."""
    return Path(os.environ.get(HOME_VARIABLE) or click.get_app_dir("layoutsearch"))


class ProfileStore:
    """Profiles as JSON files in the user's folder of layoutsearch, or in the one that LAYOUTSEARCH_HOME names."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(folder) if folder is not None else user_folder() / "devices"

    def path(self, identity: DeviceIdentity, target: str) -> Path:
        """Where the profile of a device lies, for code built for `target`."""
        about = [identity.key, identity.cpu, list(identity.features), identity.threads, target]
        digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", identity.key).strip(".-")[:40] or "device"
        return self.folder / f"{readable}-{identity.threads}t-{digest}.json"

    def load(self, identity: DeviceIdentity, target: str) -> DeviceProfile | None:
        """The stored profile; None if there is none.

        Raises:
            ProfileError: there is one that cannot be used; the message names the file.
        """
        path = self.path(identity, target)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ProfileError(f"{path}: cannot be read: {' '.join(str(error).split())}; {_AGAIN}") from None
        try:
            profile = DeviceProfile.from_json(data)
        except ProfileError as error:
            raise ProfileError(f"{path}: {error}; {_AGAIN}") from None
        if profile.version != PROFILE_VERSION:
            raise ProfileError(
                f"{path}: a device profile of version {profile.version}, this layoutsearch calibrates "
                f"version {PROFILE_VERSION}; {_AGAIN}"
            )
        have = (profile.key, profile.cpu, profile.features, profile.threads, profile.target)
        if have != (identity.key, identity.cpu, identity.features, identity.threads, target):
            raise ProfileError(f"{path}: the profile of another device ({profile.key}, {profile.cpu}); {_AGAIN}")
        return profile

    def save(self, profile: DeviceProfile, identity: DeviceIdentity) -> Path:
        """Write a profile, replacing an older one atomically.

        Raises:
            ProfileError: the folder cannot be written.
        """
        path = self.path(identity, profile.target)
        text = json.dumps(profile.to_json(), indent=1, allow_nan=False) + "\n"
        temporary = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            raise ProfileError(f"cannot write {path}: {error.strerror}; set {HOME_VARIABLE} to a folder") from None
        return path
