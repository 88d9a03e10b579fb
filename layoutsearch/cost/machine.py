"""The machine as the cost model sees it: a handful of peaks, nominal where nothing was calibrated."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from layoutsearch.measure.caches import holds
from layoutsearch.schedule.target import TargetInfo

if TYPE_CHECKING:
    from layoutsearch.measure.profile import DeviceProfile

# Nominal figures of one core, where no calibration says better. They set the scale of the base that the model corrects,
# so a common factor in all of them changes nothing.
_GHZ = 2.5
_MEMORY_GB_S = 8.0
_L2_GB_S, _L3_GB_S = 60.0, 20.0
_L3_BYTES = 32 << 20
_CALL_US = 1.0


@dataclass(frozen=True)
class Machine:
    """Peaks of one device at its number of threads.

    Attributes:
        lanes: float32 elements of a vector register.
        registers: vector registers.
        broadcast_operand: whether a multiply-add takes a scalar from memory.
        threads: threads of a kernel.
        ghz: multiply-adds per nanosecond and lane of one core, over two: the clock of a core that starts two a cycle.
        l1_bytes: first-level data cache of one core.
        l2_bytes: second-level cache of one core.
        l3_bytes: last-level cache, shared.
        l2_gb_s: from the second level, all threads together.
        l3_gb_s: from the last level, all threads together.
        memory_gb_s: from memory, all threads together.
        call_us: a parallel kernel that does nothing.
    """

    lanes: int
    registers: int
    broadcast_operand: bool
    threads: int
    ghz: float
    l1_bytes: int
    l2_bytes: int
    l3_bytes: int
    l2_gb_s: float
    l3_gb_s: float
    memory_gb_s: float
    call_us: float

    @classmethod
    def nominal(cls, target: TargetInfo) -> Machine:
        """Figures of a common core with the vectors and caches of `target`."""
        n = target.threads
        return cls(
            target.lanes, target.registers, target.broadcast_operand, n, _GHZ, target.l1_bytes, target.l2_bytes,
            _L3_BYTES, _L2_GB_S * n, _L3_GB_S * n, _MEMORY_GB_S * n, _CALL_US,
        )  # fmt: skip

    @classmethod
    def of(cls, profile: DeviceProfile | None, target: TargetInfo) -> Machine:
        """The calibrated figures, with nominal ones for what the profile lacks or when there is none."""
        base = cls.nominal(target)
        if profile is None:
            return base
        gflops = profile.peak_gflops.get("float32", 0.0) or base.gflops
        caches, n = profile.caches, target.threads
        l1, l2 = (caches[min(i, len(caches) - 1)] if caches else None for i in (0, 1))
        last = caches[-1] if len(caches) > 2 else None
        return replace(
            base,
            ghz=gflops / (4.0 * base.lanes * n),
            # The first two levels belong to a core each, the profile adds them up.
            l1_bytes=l1.bytes // n if l1 else base.l1_bytes,
            l2_bytes=l2.bytes // n if l2 else base.l2_bytes,
            l3_bytes=last.bytes if last else base.l3_bytes,
            l2_gb_s=l2.gb_s if l2 else base.l2_gb_s,
            l3_gb_s=last.gb_s if last else base.l3_gb_s,
            memory_gb_s=profile.memory_gb_s,
            call_us=profile.call_us,
        )

    @property
    def gflops(self) -> float:
        """Peak in float32, all threads; a multiply-add counts two."""
        return self.ghz * 4.0 * self.lanes * self.threads

    def weights_gb_s(self, footprint: int) -> float:
        """Bandwidth at which a model of that footprint finds its weights; see `measure.operand_state`."""
        if not holds(self.l3_bytes, footprint):
            return self.memory_gb_s
        return self.l3_gb_s if footprint > self.l2_bytes * self.threads else self.l2_gb_s

    def gb_s(self, working_set: float) -> float:
        """Bandwidth for a working set of that many bytes, over all threads: between levels it is interpolated in log.

        An activation that a neighbor kernel has just written is at best in the second level.
        """
        sizes = [math.log(max(1, self.l2_bytes * self.threads / 2)), math.log(max(2, self.l3_bytes / 2))]
        if sizes[1] <= sizes[0]:
            sizes[1] = sizes[0] + 1e-6
        at = (math.log(max(1.0, working_set)) - sizes[0]) / (sizes[1] - sizes[0])
        if at <= 0:
            return self.l2_gb_s
        if at >= 1:
            beyond = min(1.0, (math.log(max(1.0, working_set)) - sizes[1]) / math.log(4.0))
            return math.exp((1 - beyond) * math.log(self.l3_gb_s) + beyond * math.log(self.memory_gb_s))
        return math.exp((1 - at) * math.log(self.l2_gb_s) + at * math.log(self.l3_gb_s))
