"""`Device`: the one interface through which anything is run or timed, here or on a board."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import numpy as np
import tvm

from layoutsearch.errors import DeviceError
from layoutsearch.measure import kernels, models
from layoutsearch.measure.farm import LocalFarm
from layoutsearch.measure.kernels import KernelCall
from layoutsearch.measure.operand_state import PREPARE
from layoutsearch.measure.results import WARMUP, DeviceFailed, Measurement, RunFailed, Status
from layoutsearch.measure.server_functions import IDENTITY
from layoutsearch.measure.session import CPU, Session, connect
from layoutsearch.measure.tracker import TrackerClient
from layoutsearch.targets import architecture, architecture_of

SESSION_S = 120.0
_ANSWER_S = 10.0
_BIG_CORES = 1
_ACQUIRE_TRIES = 3


@dataclass(frozen=True)
class DeviceIdentity:
    """What code ran on: part of the key of every record.

    Attributes:
        key: Device key.
        cpu: Name of the CPU; "unknown" where the server cannot tell.
        features: Instruction sets, sorted; empty where the server cannot tell.
        cores: Logical cores that the server may use; 0 where it cannot tell.
        threads: Threads of a kernel.
    """

    key: str
    cpu: str
    features: tuple[str, ...]
    cores: int
    threads: int


class Source(Protocol):
    """Where sessions come from."""

    def open(self, limit_s: float) -> Session:
        """A new session, or DeviceFailed."""

    def close(self) -> None:
        """Give back what the source holds."""


class _LocalSource:
    def __init__(self, threads: int, key: str) -> None:
        self._farm = LocalFarm(servers=1, threads=threads, key=key)
        self._farm.__enter__()

    def open(self, limit_s: float) -> Session:
        port = self._farm.ensure()
        return connect(self._farm.host, port, self._farm.key, limit_s)

    def close(self) -> None:
        self._farm.close()


class _TrackerSource:
    def __init__(self, tracker: str, key: str, acquire_s: float) -> None:
        self._client = TrackerClient(tracker)
        self._key, self._acquire_s = key, acquire_s
        self._client.check_key(key)

    def open(self, limit_s: float) -> Session:
        for attempt in range(_ACQUIRE_TRIES):
            host, port, match_key = self._client.acquire(self._key, self._acquire_s)
            try:
                return connect(host, port, match_key, limit_s)
            except DeviceFailed:
                # A host that hangs is still offered as free; the next one may do.
                if attempt == _ACQUIRE_TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    def close(self) -> None:
        pass


class Device:
    """A device with one RPC session, renewed when it is worn, old or broken. A context manager; not thread-safe.

    Use `Device.local` or `Device.remote`. Kernels and models that crash, hang or fail give typed results and leave
    the device usable.
    """

    def __init__(self, source: Source, key: str, threads: int) -> None:
        self.key = key
        self.threads = threads
        self._source = source
        self._session: Session | None = None
        self._identity: DeviceIdentity | None = None
        self._places_operands: bool | None = None
        self._kind = CPU
        self._closed = False
        self._lock = threading.RLock()

    @classmethod
    @contextmanager
    def local(cls, threads: int, key: str = "local") -> Iterator[Device]:
        """This machine, through a server of our own on loopback that ends with the context.

        Raises:
            DeviceError: the server does not start.
        """
        with cls(_LocalSource(threads, key), key, threads) as device:
            yield device

    @classmethod
    @contextmanager
    def remote(cls, tracker: str, key: str, threads: int, acquire_s: float = 60.0) -> Iterator[Device]:
        """A device that the tracker at HOST:PORT serves under `key`.

        Args:
            tracker: Address of the tracker.
            key: Device key.
            threads: Threads of a kernel; the server must offer at least as many.
            acquire_s: How long to wait while every such device is busy.

        Raises:
            DeviceError: no tracker, no such key (the message names those that are served), or too few threads.
        """
        with cls(_TrackerSource(tracker, key, acquire_s), key, threads) as device:
            yield device

    def __enter__(self) -> Device:
        try:
            self.session(_ANSWER_S)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the session and whatever runs for this device. Safe to call twice."""
        self._closed = True
        self._drop()
        self._source.close()

    def identity(self) -> DeviceIdentity:
        """What the device is, read on the device itself."""
        if self._identity is None:
            self._identity = self._read_identity()
        return self._identity

    def check_target(self, target: tvm.target.Target) -> None:
        """Refuse a target whose instruction set is not the device's; passes where the device cannot tell.

        From here on, kernels and models run on the target's kind of device: a CPU, or a GPU beside it.

        Raises:
            DeviceError: with both instruction sets; or the device's TVM has no runtime for this kind.
        """
        session = self.session(_ANSWER_S)
        with session.deadline(_ANSWER_S):
            triple = session.function("target.llvm_get_system_triple")
            have = architecture_of(str(triple())) if triple is not None else ""
        wanted = architecture(target)
        if have and wanted and have != wanted:
            raise DeviceError(
                f"device {self.key!r} is {have} and cannot run code for {wanted}: give --rpc HOST:PORT --device-key "
                f"KEY of a device that is {wanted}, or a --target or plan for {have}"
            )
        self._kind = CPU if target.kind.name == "llvm" else target.kind.name
        if self._kind != CPU and not self.has_function(f"device_api.{self._kind}"):
            raise DeviceError(
                f"device {self.key!r} cannot run {self._kind}: give --rpc HOST:PORT --device-key KEY of a device whose "
                f"TVM runtime has it (TVM's own RPC app, built with USE_{self._kind.upper()}=ON)"
            )
        session.kind = self._kind

    def has_function(self, name: str) -> bool:
        """True if the device's runtime registers a global function `name`."""
        session = self.session(_ANSWER_S)
        with session.deadline(_ANSWER_S):
            return session.function(name) is not None

    @property
    def places_operands(self) -> bool:
        """Whether its server places operands as a model does, in the way of this version; see `operand_state`."""
        if self._places_operands is None:
            self.session(_ANSWER_S)
        return bool(self._places_operands)

    def time_kernels(
        self,
        lib_path: str,
        calls: Sequence[KernelCall],
        *,
        repeat: int = 7,
        warmup: int = WARMUP,
        timeout_s: float = 10.0,
        flush: bool = True,
    ) -> list[Measurement]:
        """Time functions of one shared library; see `kernels.time_kernels`."""
        return kernels.time_kernels(
            self, lib_path, calls, repeat=repeat, warmup=warmup, timeout_s=timeout_s, flush=flush
        )

    def models(
        self,
        paths: Mapping[str, str],
        inputs: Sequence[np.ndarray],
        *,
        timeout_s: float = 60.0,
        seed: int = 0,
        own: Mapping[str, Sequence[np.ndarray]] | None = None,
    ) -> AbstractContextManager[models.ModelSet]:
        """Whole models side by side for interleaved rounds; see `models.ModelSet`."""
        return models.ModelSet(self, paths, inputs, timeout_s=timeout_s, seed=seed, own=own)

    def time_models(
        self,
        paths: Mapping[str, str],
        inputs: Sequence[np.ndarray],
        *,
        rounds: int,
        timeout_s: float = 60.0,
        seed: int = 0,
    ) -> dict[str, Measurement]:
        """Time whole models in interleaved rounds; see `models.time_models`."""
        return models.time_models(self, paths, inputs, rounds=rounds, timeout_s=timeout_s, seed=seed)

    def run_model(self, lib_path: str, inputs: Sequence[np.ndarray], timeout_s: float = 60.0) -> tuple[np.ndarray, ...]:
        """Run `main` of an exported Relax executable once; outputs flattened, in order.

        Raises:
            RunFailed: with the status and one line.
        """
        return models.run_model(self, lib_path, inputs, timeout_s)

    def session(self, need_s: float, limit_s: float = SESSION_S) -> Session:
        """The current session if it is good for another `need_s` seconds, else a new one.

        Raises:
            DeviceFailed: no device answers.
        """
        with self._lock:
            current = self._session
            if current is not None and not (current.broken or current.worn or current.remaining_s < need_s):
                return current
            return self.new_session(need_s, limit_s)

    def new_session(self, need_s: float, limit_s: float = SESSION_S) -> Session:
        """End the current session and open one that lasts for `limit_s`, or twice `need_s` if that is more."""
        with self._lock:
            self._drop()
            if self._closed:
                raise DeviceFailed(Status.NO_DEVICE, f"device {self.key!r} was closed; open it again")
            session = self._source.open(max(limit_s, 2 * need_s))
            session.kind = self._kind
            try:
                self._set_threads(session)
                self._compare_servers(session)
            except BaseException:
                session.close()
                raise
            self._session = session
            return session

    def _drop(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _compare_servers(self, session: Session) -> None:
        """Refuse a board of the key whose server times in another way than the first: records would mix both."""
        with session.deadline(_ANSWER_S):
            places = session.function(PREPARE) is not None
        if self._places_operands is None:
            self._places_operands = places
        elif places != self._places_operands:
            raise DeviceError(
                f"device {self.key!r}: its boards have servers of different versions, whose times do not compare; "
                "start python -m layoutsearch.measure.server of this version on all of them"
            )

    def _set_threads(self, session: Session) -> None:
        """Make kernels of the session use `self.threads` threads, or say why they cannot."""
        try:
            with session.deadline(_ANSWER_S):
                count = session.function("runtime.NumThreads")
                if count is None:
                    raise RunFailed(Status.ERROR, "its runtime does not report its threads")
                have = int(count())
                configure = session.function("runtime.config_threadpool")
                if have != self.threads and configure is not None:
                    # Fewer than the server offers; or all of them, where TVM starts on the fastest cores alone.
                    configure(_BIG_CORES, self.threads)
                    have = int(count())
        except RunFailed as failure:
            raise DeviceFailed(Status.NO_DEVICE, f"device {self.key!r}: {failure.message}") from None
        if have != self.threads:
            raise DeviceError(
                f"device {self.key!r} runs kernels on {have} threads, {self.threads} were asked for: "
                f"use --threads {have}, or start its server with --threads {self.threads}"
            )

    def _read_identity(self) -> DeviceIdentity:
        session = self.session(_ANSWER_S)
        with session.deadline(_ANSWER_S):
            describe = session.function(IDENTITY)
            if describe is not None:
                info = json.loads(describe())
                return DeviceIdentity(
                    self.key, info["cpu"], tuple(info["features"]), int(info["cores"] or 0), self.threads
                )
            llvm_name = session.function("target.llvm_get_system_cpu")
            cpu = str(llvm_name()) if llvm_name is not None else "unknown"
        return DeviceIdentity(self.key, cpu, (), 0, self.threads)
