"""Lower bounds: what no schedule of a kernel or a layout change can go below on a calibrated device.

A bound is the roofline of the calibrated peaks (Williams, Waterman, Patterson, CACM 2009), with each level of the
memory hierarchy a roof of its own, plus what any call costs. Every term errs on the low side:

* *operations*: the peak is what the device reached with nothing but multiply-adds in registers, at best; whatever is
  no multiply-add takes as many instructions and counts half;
* *cold bytes*: weights are where a model of that footprint finds them (see `measure.operand_state`), so each comes
  once from there through every level before it; those of a model that fits in the second caches count as warm;
* *warm bytes*: what a level and those before it can hold may lie there when the kernel starts (what it reads) and when
  it ends (what it writes); only the rest has to cross. Bytes that a strided window skips do not count;
* the terms overlap at best, so the largest counts and not their sum;
* *the clock*: at another time it may be faster than while the device was calibrated, so all rates get an allowance;
* *the call*: the fastest call of an empty kernel on one thread; the work of a kernel starts after it. Starting other
  threads costs more, but a kernel need not use them.

What is measured is the kernel alone, as the search costs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from layoutsearch.cost.touched import extra_weight_bytes, needed_bytes, needed_flops, winograd_flops
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.facts import KernelFacts
from layoutsearch.layout.transform import TransformKey
from layoutsearch.measure.caches import USUAL_LAST_BYTES, holds
from layoutsearch.measure.profile import DeviceProfile

# Operators that become views, always or where the order of the elements stays.
_VIEWS = frozenset(
    {"concat", "reshape", "squeeze", "expand_dims", "flatten", "batch_flatten", "permute_dims", "layout_transform"}
)


_ALLOWANCE = 0.05
_SECOND = 1
COMPUTE, CALL = "compute", "call"


@dataclass(frozen=True)
class Roof:
    """What holds a kernel back at least.

    Attributes:
        us: it takes no less.
        name: what that is: `compute`, a level of the memory hierarchy such as `l2` or `memory`, or `call`.
    """

    us: float
    name: str


class Bounds:
    """Lower bounds in microseconds on one device.

    Args:
        profile: of the device.
        allowance: by what part its rates may be exceeded.
    """

    def __init__(self, profile: DeviceProfile, allowance: float = _ALLOWANCE) -> None:
        self.profile = profile
        self._scale = 1.0 / (1.0 + allowance)

    def kernel_us(self, facts: KernelFacts, choice: Candidate | None) -> float:
        """No schedule of this candidate takes less; 0 for what may become a view of its operand."""
        if facts.kind in _VIEWS and not facts.epilogue:
            return 0.0
        return self.kernel_roof(facts, choice).us

    def transform_us(self, key: TransformKey) -> float:
        """No layout change of this tensor takes less; 0 where the elements stay in order, so that it may be a view."""
        return 0.0 if key.keeps_order else self.transform_roof(key).us

    def kernel_roof(self, facts: KernelFacts, choice: Candidate | None) -> Roof:
        """What bounds a kernel that is no view, where its model has its operands."""
        needed = needed_bytes(facts)
        weights = needed.cold + extra_weight_bytes(facts, choice)
        memory = self._memory(weights, needed.read, needed.written, facts.footprint)
        return self._roof(self._compute_us(facts, choice), memory)

    def kernel_in_place(self, facts: KernelFacts, choice: Candidate | None) -> Roof:
        """What holds a kernel back within its model: for reports, since a schedule may be faster.

        Unlike a bound, this takes it that what is read and written comes from and goes to the first level that holds
        both, and the weights, together; a bound lets each lie in the fastest level, which another kernel left them in
        at best. And it counts the call of a kernel on all threads where the work is worth that call.
        """
        needed = needed_bytes(facts)
        weights = needed.cold + extra_weight_bytes(facts, choice)
        moved = needed.read + needed.written
        levels = self.profile.levels
        place = next((level for level in levels if moved + weights <= level.bytes), levels[-1])
        strict = self._memory(weights, needed.read, needed.written, facts.footprint)
        memory = max(strict, Roof(moved / (place.gb_s * 1e3), place.name), key=_us)
        work = max(Roof(self._compute_us(facts, choice), COMPUTE), memory, key=_us)
        call = self.profile.call_us
        # On one thread it would take as many times as long as there are threads, and no such call.
        is_shared = work.us * (self.profile.threads - 1) > call
        return Roof(work.us + (call if is_shared else self.profile.least_call_us), work.name)

    def transform_roof(self, key: TransformKey) -> Roof:
        """What bounds a layout change that is no view."""
        return self._roof(0.0, self._memory(0, key.bytes, key.bytes))

    def share_of_peak(self, facts: KernelFacts, us: float) -> float | None:
        """The part of the device's peak FLOP/s that a kernel reaches in `us`; None where no peak was calibrated.

        Counts the operations of the direct algorithm, so a kernel that saves some may exceed 1.
        """
        peak = self._peak(facts)
        return facts.flops / (us * 1e3 * peak) if peak else None

    def _compute_us(self, facts: KernelFacts, choice: Candidate | None) -> float:
        peak = self._peak(facts)
        return _family_flops(facts, choice) / (peak * 1e3) if peak else 0.0

    def _peak(self, facts: KernelFacts) -> float | None:
        tensors = facts.operands or facts.results
        return self.profile.peak_gflops.get(tensors[0].dtype) if tensors else None

    def _roof(self, compute_us: float, memory: Roof) -> Roof:
        work = max(Roof(compute_us * self._scale, COMPUTE), Roof(memory.us * self._scale, memory.name), key=_us)
        call = self.profile.least_call_us
        return Roof(work.us + call, work.name if work.us > call else CALL)

    def _memory(self, cold: float, read: float, written: float, footprint: int = 0) -> Roof:
        """Time to move bytes, and the level that takes it.

        `cold` comes from the first level that holds all that the model goes over, the rest from and to the fastest that
        can hold it. As near as the second level, cold bytes may be anywhere.
        """
        levels = self.profile.levels
        last = len(levels) - 1
        home = next((i for i, level in enumerate(levels) if 0 < footprint <= level.bytes), last)
        if not self.profile.told and holds(USUAL_LAST_BYTES, footprint):
            # The server flushed nothing, and evicted a second cache of the usual size.
            home = 0
        # Where nothing is flushed, only the second caches are emptied: what is home further out may lie in the third.
        reach = home if home == last else min(home, _SECOND + 1)
        longest, held = Roof(0.0, levels[0].name), 0
        for index, level in enumerate(levels):
            far = cold if home > _SECOND and index <= reach else max(0.0, cold - held)
            crossing = far + max(0.0, read - held) + max(0.0, written - held)
            # From here or from further out, which a noisy calibration may have found to be faster.
            rate = max(outer.gb_s for outer in levels[index:])
            longest = max(longest, Roof(crossing / (rate * 1e3), level.name), key=_us)
            held += level.bytes
        return longest


def _us(roof: Roof) -> float:
    return roof.us


def _family_flops(facts: KernelFacts, choice: Candidate | None) -> float:
    """Fewest operations in the algorithm family of `choice`.

    Direct: every multiplication of the definition is done, those with padding too. Winograd: the products of all tiles;
    its transforms are additions, which are left out.
    """
    if choice is not None and choice.winograd and facts.conv is not None:
        return winograd_flops(facts.conv, choice.winograd)
    return needed_flops(facts)
