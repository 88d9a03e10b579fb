"""Time single kernels on a device, operands placed as within a model, and survive what they do."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm

from layoutsearch.measure.operand_state import PREPARE
from layoutsearch.measure.results import DeviceFailed, Measurement, RunFailed, Status
from layoutsearch.measure.session import CPU, Session

if TYPE_CHECKING:
    from layoutsearch.measure.device import Device

FLUSH = "cache_flush_cpu_non_first_arg"
_FILL = "tvm.contrib.random.uniform"
_FILL_RANGE = 0.5
_FILL_BYTES_S = 2e7
_MAX_BUFFER_BYTES = 256 << 20


@dataclass(frozen=True)
class TensorSpec:
    """Shape (physical, in elements), dtype and memory scope of one argument."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    scope: str = "global"

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * max(1, tvm.DataType(self.dtype).bits // 8)


@dataclass(frozen=True)
class KernelCall:
    """A function of a library and its arguments, outputs included: activation first, output last.

    Attributes:
        function: symbol in the library.
        args: shapes and types.
        cold: positions of the arguments that no kernel before writes, the weights; None for all but the first. The
            others are written anew before each run. Devices whose server cannot do that flush all but the first.
        footprint: bytes that the model goes over in an inference; 0 for more than any cache holds.
        shared: whether all threads have read what lay in the result's memory before; see `operand_state`.
    """

    function: str
    args: tuple[TensorSpec, ...]
    cold: tuple[int, ...] | None = None
    footprint: int = 0
    shared: bool = False


def time_kernels(
    device: Device,
    lib_path: str,
    calls: Sequence[KernelCall],
    *,
    repeat: int,
    warmup: int,
    timeout_s: float,
    flush: bool,
) -> list[Measurement]:
    """Upload a library once and time each call `repeat` times after `warmup` runs that do not count.

    With `flush`, the arguments of each call are where they are within a model before each run; see `operand_state`.
    Only CPUs do that.
    A call that crashes is tried once more; one that crashes again, hangs beyond `timeout_s` or raises is a typed
    failure, and the calls after it are still measured. When the device is gone, all calls from there on are
    infrastructure failures.
    """
    if repeat < 1 or warmup < 1:
        raise ValueError(f"repeat and warmup are at least 1, not {repeat} and {warmup}")
    results: list[Measurement] = []
    library = _Library(device, lib_path)
    for call in calls:
        began = time.monotonic()
        try:
            samples = _with_retry(library, call, repeat, warmup, timeout_s, flush)
            results.append(Measurement(Status.OK, samples, "", time.monotonic() - began))
        except RunFailed as failure:
            results.append(Measurement.failed(failure, time.monotonic() - began))
            if isinstance(failure, (DeviceFailed, _LoadFailed)):
                rest = Measurement(failure.status, (), failure.message)
                return results + [rest] * (len(calls) - len(results))
    return results


class _LoadFailed(RunFailed):
    """The library itself does not load: no call of it can be measured."""


class _Library:
    """A library on the device, loaded again when the session has changed."""

    def __init__(self, device: Device, path: str) -> None:
        self._device, self._path = device, path
        self._session: Session | None = None
        self._module: Any = None
        self._size = os.path.getsize(path)

    def get(self, need_s: float) -> tuple[Session, Any]:
        session = self._session
        if session is None or session.broken or session.remaining_s < need_s:
            self._session = self._module = None
            limit = Session.transfer_s(self._size)
            session = self._device.session(need_s + limit)
            try:
                with session.deadline(limit):
                    self._module = session.load(self._path)
            except RunFailed as failure:
                raise _LoadFailed(failure.status, f"loading the library: {failure.message}") from None
            self._session = session
        return session, self._module


def _with_retry(
    library: _Library, call: KernelCall, repeat: int, warmup: int, timeout_s: float, flush: bool
) -> tuple[float, ...]:
    try:
        return _time_call(library, call, repeat, warmup, timeout_s, flush)
    except RunFailed as failure:
        if failure.status is not Status.CRASH:
            raise
    return _time_call(library, call, repeat, warmup, timeout_s, flush)


def _time_call(
    library: _Library, call: KernelCall, repeat: int, warmup: int, timeout_s: float, flush: bool
) -> tuple[float, ...]:
    fill_s = 10.0 + sum(spec.nbytes for spec in call.args) / _FILL_BYTES_S
    session, module = library.get(fill_s + timeout_s)
    with session.deadline(fill_s):
        args = _buffers(session, call.args)
    with session.deadline(timeout_s):
        # The evaluator makes one run of its own before the first that it counts.
        evaluate = module.time_evaluator(
            call.function,
            session.place,
            number=1,
            repeat=warmup - 1 + repeat,
            f_preproc=_flush_function(session, module, call) if flush and session.kind == CPU else "",
        )
        seconds = evaluate(*args).results
    return tuple(s * 1e6 for s in seconds[warmup - 1 :])


def _flush_function(session: Session, module: Any, call: KernelCall) -> str:
    """Name of the device's function that puts the arguments where they are within a model; see `operand_state`."""
    prepare = session.function(PREPARE) if call.cold is not None else None
    if prepare is None or call.cold is None:
        return FLUSH
    return str(prepare(",".join(map(str, sorted(call.cold))), call.footprint, call.shared, module))


def _buffers(session: Session, specs: Sequence[TensorSpec]) -> list[Any]:
    """Device tensors for the arguments, kept in the session for the calls that follow.

    What was an output never comes back as an input, so that values do not pile up to infinities or denormals.
    """
    used: Counter[tuple[TensorSpec, bool]] = Counter()
    keys = []
    for index, spec in enumerate(specs):
        role = (spec, index == len(specs) - 1)
        keys.append((*role, used[role]))
        used[role] += 1
    missing = [key for key in keys if key not in session.buffers]
    size = sum(key[0].nbytes for key in session.buffers) + sum(key[0].nbytes for key in missing)  # type: ignore[index]
    if size > _MAX_BUFFER_BYTES:
        session.buffers.clear()
        missing = keys
    for key in missing:
        session.buffers[key] = _new_tensor(session, key[0])
    return [session.buffers[key] for key in keys]


def _new_tensor(session: Session, spec: TensorSpec) -> Any:
    """Random floats made on the device, small and of both signs so that sums neither saturate nor grow.

    Zeros for anything but float32, since random integers are wild indices. For other devices than CPUs they are made
    here and sent.
    """
    if session.kind != CPU:
        array = np.zeros(spec.shape, spec.dtype)
        if spec.dtype == "float32":
            array = np.random.default_rng(0).uniform(-_FILL_RANGE, _FILL_RANGE, spec.shape).astype(spec.dtype)
        return tvm.runtime.tensor(array, device=session.place, mem_scope=spec.scope)
    fill = session.function(_FILL) if spec.dtype == "float32" else None
    if fill is None:
        return tvm.runtime.tensor(np.zeros(spec.shape, spec.dtype), device=session.cpu)
    tensor = tvm.runtime.empty(spec.shape, spec.dtype, session.cpu)
    fill(-_FILL_RANGE, _FILL_RANGE, tensor)
    return tensor
