"""Kernels that do one thing only, as fast as the device can: the probes of a calibration.

They are built here for the target and sent, as every kernel is. How much a call does is an argument, so that one
library serves small caches and large ones, slow boards and fast ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import tvm

from layoutsearch.measure import probe_kernels as kernels
from layoutsearch.measure.probe_kernels import STREAM_BYTES, STREAM_VECTORS
from layoutsearch.schedule import BUILD_CONFIG, TargetInfo
from layoutsearch.schedule.builder import mark
from layoutsearch.toolchain import export

# Independent sums: the latency of a multiply-add is 4 or 5 cycles on two ports; more of them help where it is longer.
_ACCUMULATORS = (8, 12, 16, 24)
# Registers that hold the factor and the summand.
_OPERANDS = 2
_SPREAD = 4
COLD_READS = tuple(product((1 << 18, 1 << 20, 1 << 22), (1, _SPREAD)))
"""(elements, streams) of the tensors that are read once from memory, function(warm, x, out)."""

_WIDE_LANES = 16
_BYTES = {"float32": 4, "float64": 8}
DTYPES = tuple(_BYTES)


@dataclass(frozen=True)
class PeakProbe:
    """Multiply-adds in registers: function(x, out, rounds, tasks).

    Attributes:
        function: symbol in the library.
        dtype: of `x` (two vectors: factor and summand) and `out`.
        lanes: elements of a vector.
        accumulators: vectors that are summed up independently.
    """

    function: str
    dtype: str
    lanes: int
    accumulators: int

    @property
    def flops(self) -> int:
        """Operations of one round of one task."""
        return 2 * self.lanes * self.accumulators


@dataclass(frozen=True)
class StreamProbe:
    """Streams over a prefix of two buffers: function(x, y, steps, passes), the prefix shared out between the threads.

    Attributes:
        function: symbol in the library.
        reads: elements read from `x` for each of a step.
        writes: elements written to `y`.
    """

    function: str
    reads: int
    writes: int

    def bytes(self, elements: int) -> int:
        """Bytes moved by one step of one thread."""
        return (self.reads + self.writes) * elements * STREAM_BYTES


@dataclass(frozen=True)
class ProbeSet:
    """What `build_probes` built.

    Attributes:
        peaks: variants of the multiply-add kernel.
        streams: `read`, `read_spread`, `copy` and `add`.
        step: elements of one buffer that one thread takes in a step.
        threads: tasks of the streaming kernels.
    """

    peaks: tuple[PeakProbe, ...]
    streams: tuple[StreamProbe, ...]
    step: int
    threads: int


def probe_set(info: TargetInfo, dtypes: Sequence[str] = DTYPES) -> ProbeSet:
    """The probes for a machine, with as many sums as its registers hold."""
    peaks = []
    for dtype in dtypes:
        whole = max(2, info.lanes * _BYTES["float32"] // _BYTES[dtype])
        # Wide vectors may run at a lower clock.
        widths = (whole // 2, whole) if whole >= _WIDE_LANES else (whole,)
        for lanes, count in product(widths, _ACCUMULATORS):
            if count + _OPERANDS <= info.registers:
                peaks.append(PeakProbe(f"peak_{dtype}_{lanes}_{count}", dtype, lanes, count))
    streams = (
        StreamProbe("read", 1, 0),
        StreamProbe("read_spread", 1, 0),
        StreamProbe("copy", 1, 1),
        StreamProbe("add", 2, 1),
    )
    return ProbeSet(tuple(peaks), streams, info.lanes * STREAM_VECTORS, info.threads)


def cold_read(elements: int, streams: int) -> str:
    """Symbol of one of `COLD_READS`."""
    return f"read_cold_{elements}_{streams}"


def build_probes(probes: ProbeSet, capacity: int, target: tvm.target.Target, path: str) -> None:
    """Build the probes into one library.

    Args:
        probes: which.
        capacity: elements of each of the two buffers of the streaming kernels.
        target: what to build for.
        path: library to write.

    Raises:
        ToolchainError: there is no linker.
    """
    lanes = probes.step // STREAM_VECTORS
    functions = {p.function: kernels.peak(p.dtype, p.lanes, p.accumulators, probes.threads) for p in probes.peaks}
    functions["read"] = kernels.read(capacity, probes.threads, lanes, streams=1)
    functions["read_spread"] = kernels.read(capacity, probes.threads, lanes, streams=_SPREAD)
    functions["copy"] = kernels.copy(capacity, probes.threads, lanes)
    functions["add"] = kernels.add(capacity, probes.threads, lanes)
    functions["fill"] = kernels.fill(capacity, probes.threads, lanes)
    for elements, streams in COLD_READS:
        functions[cold_read(elements, streams)] = kernels.read_cold(elements, probes.threads, lanes, streams)
    functions["small"] = kernels.small(probes.threads)
    functions["serial"] = kernels.serial(probes.threads)
    named = {name: mark(func).with_attr("global_symbol", name) for name, func in functions.items()}
    with tvm.transform.PassContext(config=BUILD_CONFIG):
        export(tvm.compile(tvm.IRModule(named), target), path, target)


def build_peak(info: TargetInfo, target: tvm.target.Target, path: str) -> PeakProbe:
    """Build one peak probe in float32, of the widest vectors and the most sums, into a library of its own.

    Raises:
        ToolchainError: there is no linker.
    """
    probe = max(probe_set(info, ("float32",)).peaks, key=lambda p: (p.lanes, p.accumulators))
    func = mark(kernels.peak(probe.dtype, probe.lanes, probe.accumulators, info.threads))
    with tvm.transform.PassContext(config=BUILD_CONFIG):
        module = tvm.IRModule({probe.function: func.with_attr("global_symbol", probe.function)})
        export(tvm.compile(module, target), path, target)
    return probe
