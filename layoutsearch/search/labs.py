"""What a run measures with: a device behind RPC here, or whatever else offers the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from layoutsearch.errors import LayoutSearchError
from layoutsearch.measure.builder import Builder
from layoutsearch.measure.calibrate import CalibrationError, profile_for, stored_profile
from layoutsearch.measure.device import Device, DeviceIdentity
from layoutsearch.measure.profile import DeviceProfile, ProfileError
from layoutsearch.measure.records import RecordContext, RecordStore
from layoutsearch.plan.apply import target_json
from layoutsearch.search.budget import Budget
from layoutsearch.search.kernels import KernelLab
from layoutsearch.search.known import Lab
from layoutsearch.search.pair_lab import PairLab
from layoutsearch.search.pairs import PairTimer
from layoutsearch.search.parts_lab import PartsLab
from layoutsearch.search.reference import reference_key
from layoutsearch.search.reporter import Reporter
from layoutsearch.search.setup import ModelSetup, template_versions
from layoutsearch.search.sharing_out import PartsTimer
from layoutsearch.search.tuners import KernelTuner
from layoutsearch.search.whole import MAX_REL_ERROR, Whole, WholeLab
from layoutsearch.targets import default_threads

# A run with less time than this does not spend it on calibrating a device.
_CALIBRATE_FROM_S = 180.0


class _Stopped(Exception):
    """The user stopped the run while its device was calibrated."""


@dataclass(frozen=True)
class Workplace:
    """Where a run works.

    Attributes:
        folder: for what is built, gone after the run.
        out: output folder of the run.
        store: records.
        began: mark of the store from where on records are recalled, in a run that is resumed; else None.
        samples: inputs of the model to validate with.
        budget: when to stop.
        reporter: told of progress.
        max_rel_error: plans that are off by more, over the range of an output, are refused.
        tuner: where schedules come from.
    """

    folder: Path
    out: Path
    store: RecordStore
    began: int | None
    samples: Sequence[Sequence[np.ndarray]]
    budget: Budget
    reporter: Reporter
    max_rel_error: float = MAX_REL_ERROR
    tuner: KernelTuner = KernelTuner.TEMPLATE


@dataclass(frozen=True)
class Labs:
    """What measures kernels and whole models, and the device that it stands for.

    `profile` is None where the device is not calibrated: nothing is bounded then. `pairs` is None where no pairs of
    kernels can be timed, `parts` where kernels cannot be timed within the model: neither is tried then.
    """

    lab: Lab
    whole: Whole
    identity: DeviceIdentity
    context: RecordContext
    profile: DeviceProfile | None
    pairs: PairTimer | None = None
    parts: PartsTimer | None = None


class LabSource(Protocol):
    """Opens labs for a model."""

    @property
    def target(self) -> Any:
        """What code is built for; None for this CPU."""

    @property
    def threads(self) -> int:
        """Threads of a kernel."""

    @property
    def name(self) -> str:
        """Of the device, in the run's file."""

    def open(self, setup: ModelSetup, place: Workplace) -> AbstractContextManager[Labs]:
        """The labs; they go away with the context.

        Raises:
            LayoutSearchError: no device, or it is not one for this model.
        """


class DeviceSource:
    """A device: this machine's CPU, or one that a tracker serves.

    Args:
        target: what code is built for; this CPU by default.
        threads: of a kernel; all cores by default.
        rpc: tracker, HOST:PORT.
        device_key: at the tracker.

    Raises:
        LayoutSearchError: one of `rpc` and `device_key` without the other.
    """

    def __init__(self, target: Any, threads: int | None, rpc: str | None, device_key: str | None) -> None:
        if bool(rpc) != bool(device_key):
            raise LayoutSearchError("--rpc HOST:PORT and --device-key KEY go together; give both or neither")
        self.target, self.threads = target, threads or default_threads()
        self._rpc, self._key = rpc, device_key

    @property
    def name(self) -> str:
        """See LabSource."""
        return self._key or "local"

    @contextmanager
    def open(self, setup: ModelSetup, place: Workplace) -> Iterator[Labs]:
        """See LabSource."""
        with ExitStack() as stack:
            device = stack.enter_context(self._device())
            device.check_target(setup.target)
            workers = max(1, min(8, default_threads()))
            builder = stack.enter_context(Builder(workers=workers, preload=("layoutsearch.search.jobs",)))
            identity = device.identity()
            templates = template_versions(setup.target)
            if setup.target.kind.name == "llvm" and not device.places_operands:
                # Other numbers than those of our server: never read as the same.
                templates += " flush-all"
                place.reporter.note(
                    "the device's server cannot place operands as a model does, so all but one are cold and kernels "
                    "look slower; python -m layoutsearch.measure.server of this version on the device can"
                )
            profile = _profile(device, setup, place)
            context = setup.context(identity, templates)
            target, budget, reporter = target_json(setup.target), place.budget, place.reporter
            lab = KernelLab(
                device, builder, place.store, context, target, place.folder, budget, reporter, place.began, place.tuner
            )
            key = reference_key(setup.loaded, setup.fingerprint, place.samples)
            reference = (place.out / "reference.npz", key)
            whole = WholeLab(
                device, builder, setup.source, place.samples, reference, place.folder, budget, reporter,
                place.max_rel_error,
            )  # fmt: skip
            pairs = parts = None
            if setup.target.kind.name == "llvm":
                pairs = PairLab(device, builder, place.store, context, target, place.folder, budget, reporter)
                parts = PartsLab(device, builder, setup.source, place.samples[0], place.folder, budget, reporter)
            yield Labs(lab, whole, identity, context, profile, pairs, parts)

    def _device(self) -> AbstractContextManager[Device]:
        """The device, not yet opened."""
        if self._rpc:
            return Device.remote(self._rpc, str(self._key), self.threads)
        return Device.local(self.threads)


def _profile(device: Device, setup: ModelSetup, place: Workplace) -> DeviceProfile | None:
    place.reporter.stage("device", 1)
    if setup.target.kind.name != "llvm":
        place.reporter.step(f"no limits are known for target {setup.target.kind.name}: the plan has no lower bound", 0)
        return None
    if place.budget.left_s < _CALIBRATE_FROM_S and stored_profile(device, setup.target) is None:
        place.reporter.step("not calibrated, and this run is too short for it: the plan will have no lower bound", 0)
        return None

    def step(text: str) -> None:
        # Calibrating takes up to a minute: a user who wants to stop waits for a step of it, not for all.
        if place.budget.interrupted:
            raise _Stopped
        place.reporter.step(text, 0)

    try:
        return profile_for(device, setup.target, step)
    except _Stopped:
        return None
    except (CalibrationError, ProfileError) as error:
        # A night's run is worth more than its lower bound.
        place.reporter.note(f"{error}; the plan will have no lower bound")
        return None
