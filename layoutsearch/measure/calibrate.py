"""Find the limits of a device: peak FLOP/s, bandwidth of each memory level, what calls cost."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import tvm

from layoutsearch.errors import DeviceError
from layoutsearch.measure.device import Device
from layoutsearch.measure.kernels import KernelCall, TensorSpec
from layoutsearch.measure.probe_kernels import SMALL, STREAM_BYTES, STREAM_DTYPE
from layoutsearch.measure.probe_rounds import SMALLEST_BYTES, ProbeRounds
from layoutsearch.measure.probes import COLD_READS, ProbeSet, build_probes, cold_read, probe_set
from layoutsearch.measure.profile import PROFILE_VERSION, DeviceProfile, ProfileError, ProfileStore
from layoutsearch.measure.results import DeviceFailed, Measurement, RunFailed
from layoutsearch.measure.server_functions import IDENTITY
from layoutsearch.plan.apply import target_json
from layoutsearch.schedule import TargetInfo
from layoutsearch.targets import as_target

Tell = Callable[[str], None]

BUDGET_S = 10.0
_ANSWER_S = 120.0
_LARGEST_BYTES = 256 << 20
_UNTOLD_BYTES = 128 << 20
_COLD_SAMPLES = 15
_CALLS = 400


class CalibrationError(DeviceError):
    """A probe failed on the device."""


def profile_for(
    device: Device, target: Any = None, tell: Tell | None = None, store: ProfileStore | None = None
) -> DeviceProfile:
    """The stored profile of a device for code built for `target`; calibrates and stores it where there is none.

    Raises:
        CalibrationError: a probe failed.
        ProfileError: the profile cannot be written.
        DeviceError: the device is gone.
    """
    say = tell or _silent
    store = store or ProfileStore()
    profile = stored_profile(device, target, say, store)
    if profile is None:
        say(f"calibrating device {device.key!r}, once")
        profile = calibrate(device, target, say)
        store.save(profile, device.identity())
    if profile.is_doubtful:
        say(f"{doubt(profile)}; run layoutsearch device calibrate when it is idle")
    return profile


def stored_profile(
    device: Device, target: Any = None, tell: Tell | None = None, store: ProfileStore | None = None
) -> DeviceProfile | None:
    """The stored profile of a device for code built for `target`; None if there is none that can be used.

    Raises:
        DeviceError: the device is gone.
    """
    try:
        return (store or ProfileStore()).load(device.identity(), target_text(target))
    except ProfileError as error:
        (tell or _silent)(str(error))
        return None


def doubt(profile: DeviceProfile) -> str:
    """What to say of a profile that `is_doubtful`."""
    return (
        f"device {profile.key!r} was busy: {profile.disturbed:.0%} of the samples were disturbed, limits may be too low"
    )


def target_text(target: Any = None) -> str:
    """A target as profiles name it."""
    return json.dumps(target_json(as_target(target)), sort_keys=True)


def calibrate(
    device: Device, target: Any = None, tell: Tell | None = None, *, budget_s: float = BUDGET_S, seed: int = 0
) -> DeviceProfile:
    """Measure what `device` can do at most, with code built for `target` (this machine's CPU by default).

    Args:
        device: where to run; its threads are those of the profile.
        target: what kernels are built for.
        tell: called with a line for each step.
        budget_s: seconds for the rounds of samples; building and calls take about as long again.
        seed: of the order of samples.

    Raises:
        CalibrationError: a probe failed.
        DeviceError: the device is gone.
        ToolchainError: there is no linker.
    """
    say = tell or _silent
    built_for = as_target(target)
    device.check_target(built_for)
    probes = probe_set(TargetInfo.from_target(built_for, device.threads))
    try:
        with tempfile.TemporaryDirectory(prefix="layoutsearch-") as folder:
            return _calibrate(device, built_for, probes, Path(folder), say, budget_s, random.Random(seed))
    except DeviceFailed:
        raise
    except RunFailed as failure:
        again = "run layoutsearch device calibrate again"
        raise CalibrationError(f"calibrating device {device.key!r} failed: {failure}; {again}") from None


def _calibrate(
    device: Device,
    target: tvm.target.Target,
    probes: ProbeSet,
    folder: Path,
    tell: Tell,
    budget_s: float,
    order: random.Random,
) -> DeviceProfile:
    identity = device.identity()
    capacities, whole, memory = _told(device)
    capacity = _buffer_bytes(whole, memory, device.threads)
    tell("building probes")
    library = str(folder / "probes.so")
    build_probes(probes, capacity // STREAM_BYTES, target, library)
    tell("calls and cold reads")
    call_us, least_call_us = _calls(device, library)
    cold_gb_s = _cold_reads(device, library, probes)
    tell("peak and bandwidth")
    rounds = ProbeRounds(device, library, probes, capacity, order)
    rounds.run(budget_s)
    # Once more at another time: bandwidth is what other programs take most of.
    cold_gb_s = max(cold_gb_s, _cold_reads(device, library, probes))
    return DeviceProfile(
        version=PROFILE_VERSION,
        key=identity.key,
        cpu=identity.cpu,
        features=identity.features,
        threads=identity.threads,
        peak_gflops=rounds.peaks(device.threads),
        levels=rounds.levels(capacities, cold_gb_s, whole),
        call_us=call_us,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        target=target_text(target),
        least_call_us=least_call_us,
        one_thread_gflops=rounds.peaks(1),
        disturbed=rounds.disturbed(),
        told=capacities is not None,
    )


def _silent(_line: str) -> None:
    pass


def _told(device: Device) -> tuple[list[int] | None, int, int]:
    """What the device says, in bytes: caches that all threads together can count on, fastest first (None where it says
    nothing), the whole of the last one, and free memory (0 where it says nothing)."""
    session = device.session(_ANSWER_S)
    with session.deadline(_ANSWER_S):
        describe = session.function(IDENTITY)
        said = json.loads(describe()) if describe is not None else {}
    told = said.get("caches", [])
    caches = [c["bytes"] * min(c["count"], device.threads) for c in told]
    whole = max((c.get("whole", c["bytes"]) * min(c["count"], device.threads) for c in told), default=0)
    # Slices of a cluster are told like caches of their own; a level that holds no more than the one before is none.
    growing = [size for i, size in enumerate(caches) if size > max(caches[:i], default=0)]
    return growing or None, whole, int(said.get("memory", 0))


def _buffer_bytes(whole: int, memory: int, threads: int) -> int:
    """Size of each of the two buffers: four times the whole last cache, within reason. A guest counts on a part of it
    only, but may have all of it while its neighbours rest, and would take it for memory."""
    wanted = 4 * whole if whole else _UNTOLD_BYTES
    limits = [_LARGEST_BYTES, *([memory // 4] if memory else [])]
    return max(SMALLEST_BYTES * threads, min(wanted, *limits)) // 4096 * 4096


def _ok(measurement: Measurement, what: str) -> Measurement:
    if measurement.is_infrastructure:
        raise DeviceFailed(measurement.status, measurement.error)
    if not measurement.ok:
        raise RunFailed(measurement.status, f"{what}: {measurement.error}")
    return measurement


def _calls(device: Device, library: str) -> tuple[float, float]:
    """Microseconds of a parallel kernel that does nearly nothing (typical) and of a serial one (the fastest)."""
    spec = TensorSpec((device.threads * SMALL,), STREAM_DTYPE)
    calls = [KernelCall(name, (spec, spec)) for name in ("small", "serial")]
    parallel, serial = device.time_kernels(library, calls, repeat=_CALLS, flush=False, timeout_s=_ANSWER_S)
    low = statistics.quantiles(_ok(parallel, "small").samples_us, n=4)[0]
    return low, min(_ok(serial, "serial").samples_us)


def _cold_reads(device: Device, library: str, probes: ProbeSet) -> float:
    """Bandwidth, in bytes a nanosecond, of an operand that was flushed as weights are."""
    calls = []
    for elements, streams in COLD_READS:
        specs = (TensorSpec((SMALL,)), TensorSpec((elements,)), TensorSpec((probes.threads * probes.step,)))
        calls.append(KernelCall(cold_read(elements, streams), specs, cold=(1,)))
    done = device.time_kernels(library, calls, repeat=_COLD_SAMPLES, flush=True, timeout_s=_ANSWER_S)
    fastest = [min(_ok(one, call.function).samples_us) for one, call in zip(done, calls, strict=True)]
    return max(n * STREAM_BYTES / (us * 1e3) for (n, _), us in zip(COLD_READS, fastest, strict=True))
