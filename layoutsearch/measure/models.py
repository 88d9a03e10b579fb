"""Run and time whole models on a device: interleaved rounds, so that what disturbs one disturbs all."""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
from tvm import relax

from layoutsearch.measure.results import DeviceFailed, Measurement, RunFailed, Status
from layoutsearch.measure.session import Session

if TYPE_CHECKING:
    from layoutsearch.measure.device import Device

SAMPLE_S = 0.02
MODELS_SESSION_S = 900.0
_MAX_CALLS = 5000
_WARM_CALLS = 3


class RemoteModel:
    """A model on the device with its inputs set. Use it within a deadline of its session.

    Attributes:
        calls: how many runs make a sample; 0 until it is known.
    """

    def __init__(self, session: Session, path: str, inputs: Sequence[Any]) -> None:
        self._session = session
        self._vm = relax.VirtualMachine(session.load(path), session.place)
        self._vm.set_input("main", *inputs)
        self.calls = 0

    def time(self, calls: int) -> list[float]:
        """Seconds of each of `calls` runs, after one that does not count and warms the caches."""
        evaluate = self._vm.time_evaluator("invoke_stateful", self._session.place, number=1, repeat=calls)
        return list(evaluate("main").results)

    def run(self) -> tuple[np.ndarray, ...]:
        """Outputs, flattened."""
        self._vm.invoke_stateful("main")
        return tuple(_flatten(self._vm.get_outputs("main")))


def _flatten(value: Any) -> list[np.ndarray]:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _flatten(item)]
    return [value.numpy()]


def calls_in_sample(typical_s: float) -> int:
    """How many runs of `typical_s` seconds make a sample."""
    return min(_MAX_CALLS, max(1, math.ceil(SAMPLE_S / max(typical_s, 1e-9))))


class ModelSet:
    """Models loaded side by side in one session, for A/B runs that stop when enough is known. A context manager.

    Each `round` takes one sample of every model, in an order drawn anew. A sample is the median of as many calls as
    fill 20 ms. A model that fails (a crash is tried once more) leaves the set and appears in `failures`. `own` has the
    inputs of models that take them in other layouts.
    """

    def __init__(
        self,
        device: Device,
        paths: Mapping[str, str],
        inputs: Sequence[np.ndarray],
        *,
        timeout_s: float,
        seed: int,
        own: Mapping[str, Sequence[np.ndarray]] | None = None,
    ) -> None:
        self._device, self._paths = device, dict(paths)
        self._inputs = [np.ascontiguousarray(array) for array in inputs]
        self._own = dict(own or {})
        self._timeout_s = timeout_s
        self._random = random.Random(seed)
        self._session: Session | None = None
        self._loaded: dict[str, RemoteModel] = {}
        self._crashed: set[str] = set()
        self.failures: dict[str, RunFailed] = {}

    def __enter__(self) -> ModelSet:
        self.reload()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loaded.clear()
        self._session = None

    @property
    def alive(self) -> tuple[str, ...]:
        """Names of the models that have not failed."""
        return tuple(name for name in self._paths if name not in self.failures)

    def reload(self) -> None:
        """Load all models into a new process on the device: one start in ten is slow for no visible reason.

        Raises:
            DeviceFailed: the device is gone.
        """
        while not self._load_all():
            pass

    def round(self) -> dict[str, float]:
        """One sample, in microseconds, of each model that is alive; failures are added to `failures`.

        Raises:
            DeviceFailed: the device is gone.
        """
        samples: dict[str, float] = {}
        order = list(self.alive)
        self._random.shuffle(order)
        while order:
            name = order[-1]
            if not self._usable():
                self.reload()
            model = self._loaded.get(name)
            if model is None:  # failed while it was loaded again
                order.pop()
                continue
            try:
                assert self._session is not None
                with self._session.deadline(self._timeout_s):
                    samples[name] = statistics.median(model.time(model.calls)) * 1e6
            except RunFailed as failure:
                del model
                if not self._blame(name, failure):
                    continue
            order.pop()
        return samples

    def _usable(self) -> bool:
        session = self._session
        return session is not None and not session.broken and session.remaining_s > self._timeout_s + 1

    def _load_all(self) -> bool:
        """One attempt to load and warm up every model that is alive; False if the session broke on the way."""
        self._loaded.clear()
        self._session = None
        names = self.alive
        load_s = sum(Session.transfer_s(os.path.getsize(self._paths[name])) for name in names)
        need_s = load_s + self._timeout_s * (len(names) + 1)
        session = self._device.new_session(need_s, MODELS_SESSION_S)
        inputs = send(session, self._inputs)
        own = {name: send(session, arrays) for name, arrays in self._own.items()}
        for name in names:
            try:
                with session.deadline(Session.transfer_s(os.path.getsize(self._paths[name]))):
                    model = RemoteModel(session, self._paths[name], own.get(name, inputs))
                with session.deadline(self._timeout_s):
                    typical = statistics.median(model.time(_WARM_CALLS))
                model.calls = calls_in_sample(typical)
                self._loaded[name] = model
            except RunFailed as failure:
                self._blame(name, failure)
                if session.broken:
                    return False
        self._session = session
        return True

    def _blame(self, name: str, failure: RunFailed) -> bool:
        """Note a failure; False if the model may try once more."""
        if isinstance(failure, DeviceFailed):
            raise failure
        if failure.status is Status.CRASH and name not in self._crashed:
            self._crashed.add(name)
            return False
        self.failures[name] = failure
        self._loaded.pop(name, None)
        return True


def time_models(
    device: Device,
    paths: Mapping[str, str],
    inputs: Sequence[np.ndarray],
    *,
    rounds: int,
    timeout_s: float,
    seed: int,
) -> dict[str, Measurement]:
    """Samples of each model, aligned by round: `samples_us[r]` of all models were taken in the same round.

    Args:
        device: Where to run.
        paths: Name to shared library, each exported from a Relax executable whose `main` takes `inputs` in order.
        inputs: Arrays, sent once.
        rounds: Samples for each model.
        timeout_s: Limit of one sample.
        seed: For the order within rounds.
    """
    if rounds < 1:
        raise ValueError(f"rounds is at least 1, not {rounds}")
    began = time.monotonic()
    taken: dict[str, list[float]] = {name: [] for name in paths}
    failures: dict[str, RunFailed] = {}
    try:
        with ModelSet(device, paths, inputs, timeout_s=timeout_s, seed=seed) as models:
            for _ in range(rounds):
                if not models.alive:
                    break
                for name, sample in models.round().items():
                    taken[name].append(sample)
            failures = models.failures
    except DeviceFailed as failure:
        failures = dict.fromkeys(paths, failure)
    wall_s = time.monotonic() - began
    return {
        name: Measurement.failed(failures[name], wall_s)
        if name in failures
        else Measurement(Status.OK, tuple(taken[name]), "", wall_s)
        for name in paths
    }


def run_model(device: Device, lib_path: str, inputs: Sequence[np.ndarray], timeout_s: float) -> tuple[np.ndarray, ...]:
    """Outputs of one run, flattened. Raises RunFailed; a crash is tried once more."""
    try:
        return _run_once(device, lib_path, inputs, timeout_s)
    except RunFailed as failure:
        if failure.status is not Status.CRASH:
            raise
    return _run_once(device, lib_path, inputs, timeout_s)


def _run_once(device: Device, path: str, inputs: Sequence[np.ndarray], timeout_s: float) -> tuple[np.ndarray, ...]:
    load_s = Session.transfer_s(os.path.getsize(path))
    session = device.session(load_s + 2 * timeout_s)
    arrays = send(session, inputs)
    with session.deadline(load_s):
        model = RemoteModel(session, path, arrays)
    with session.deadline(timeout_s):
        return model.run()


def send(session: Session, inputs: Sequence[np.ndarray]) -> list[Any]:
    """The arrays on the device, contiguous.

    Raises:
        RunFailed: the session ends on the way.
    """
    with session.deadline(Session.transfer_s(sum(array.nbytes for array in inputs))):
        return [tvm.runtime.tensor(np.ascontiguousarray(array), device=session.place) for array in inputs]
