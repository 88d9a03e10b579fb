"""Kernels for GPUs: a work item computes one texel, or one element, of the result.

Every step that can be is computed within the item that needs it, in registers; the result is then stored by one vector
store, since a texture takes whole texels only. Of several reductions that depend on each other (a softmax), all but the
last have kernels of their own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import tvm
from tvm import s_tir, tirx

from layoutsearch.schedule.value import Schedule, ScheduleError

NAME = "workitems"
LANES = 4
_SIZES = (64, 256, 128, 32)


def schedules() -> list[Schedule]:
    """Sizes of a group of work items, at most; the first one is the default."""
    return [Schedule.make(NAME, threads=size) for size in _SIZES]


def emit(func: tirx.PrimFunc, schedule: Schedule) -> tirx.PrimFunc:
    """The kernel, its loops bound to work items.

    Raises:
        ScheduleError: a shape is not static, or TVM cannot schedule the kernel so.
    """
    try:
        return _WorkItems(func, schedule.number("threads")).emit()
    except (RuntimeError, ValueError) as error:  # TVM's own errors are of both
        lines = [line for line in str(error).splitlines() if line.startswith("Error message: ")] or [str(error)]
        raise ScheduleError(f"schedule template {NAME} does not fit the kernel: {lines[0]}") from None


class _WorkItems:
    def __init__(self, func: tirx.PrimFunc, threads: int) -> None:
        self._sch = s_tir.Schedule(tvm.IRModule({"main": func}))
        self._func, self._threads = func, threads

    def emit(self) -> tirx.PrimFunc:
        sch = self._sch
        results = self._results()
        if len(results) != 1:
            # Of an operator with several results, such as a split.
            for block in self._blocks():
                self._alone(block)
            return sch.mod["main"]
        (result,) = results
        for block in self._blocks():
            if not self._same(block, result) and not self._reduces(block):
                self._inline(block)
        *before, last = self._blocks()
        store = sch.cache_write(last, 0, "local")
        item, lane = self._bind(store)
        if lane is not None:
            sch.vectorize(lane)
        self._compute_in(last, item)
        # A reduction whose elements are those of the result is computed beside them.
        if before and not self._reduces(last) and self._elements(before[-1]) == self._elements(store):
            reduction = before.pop()
            for i in range(len(sch.get(reduction).writes)):
                sch.set_scope(reduction, i, "local")
            self._compute_in(reduction, item)
        for block in before:
            self._alone(block)
        return sch.mod["main"]

    def _blocks(self) -> list[s_tir.schedule.SBlockRV]:
        return list(self._sch.get_child_blocks(self._sch.get_sblock("root")))

    def _same(self, one: s_tir.schedule.SBlockRV, other: s_tir.schedule.SBlockRV) -> bool:
        return self._sch.get_sref(one).same_as(self._sch.get_sref(other))

    def _results(self) -> list[s_tir.schedule.SBlockRV]:
        """The blocks that write the function's results."""
        params = list(self._func.params)
        return [b for b in self._blocks() if any(self._written(b).same_as(p) for p in params)]

    def _written(self, block: s_tir.schedule.SBlockRV) -> tirx.Buffer:
        return self._sch.get(block).writes[0].source

    def _elements(self, block: s_tir.schedule.SBlockRV) -> int:
        return math.prod(int(extent) for extent in self._written(block).shape)

    def _is_reduced(self, block: s_tir.schedule.SBlockRV) -> list[bool]:
        """For each axis of a block, whether it is summed over."""
        return [int(v.iter_type) == tirx.IterVar.CommReduce for v in self._sch.get(block).iter_vars]

    def _reduces(self, block: s_tir.schedule.SBlockRV) -> bool:
        return any(self._is_reduced(block))

    def _inline(self, block: s_tir.schedule.SBlockRV) -> None:
        """Computes an element where it is read; what TVM cannot inline keeps loops of its own."""
        with contextlib.suppress(s_tir.ScheduleError):
            self._sch.compute_inline(block)

    def _bind(self, block: s_tir.schedule.SBlockRV) -> tuple[s_tir.schedule.LoopRV, s_tir.schedule.LoopRV | None]:
        """Binds the loops over a block's elements; returns that of an item and, where there is one, that of lanes."""
        sch = self._sch
        loops = [
            loop for loop, reduced in zip(sch.get_loops(block), self._is_reduced(block), strict=True) if not reduced
        ]
        lane = loops.pop() if len(loops) > 1 and int(sch.get(loops[-1]).extent) == LANES else None
        size = self._group_size([int(sch.get(loop).extent) for loop in loops])
        fused = sch.fuse(*loops) if loops else sch.add_unit_loop(block)
        group, item = sch.split(fused, [None, size])
        sch.bind(group, "blockIdx.x")
        sch.bind(item, "threadIdx.x")
        return item, lane

    def _group_size(self, extents: Sequence[int]) -> int:
        """The most items, up to the limit, that make whole rows of the loops of these extents, outermost first.

        Of anything else TVM cannot tell the coordinates again, which reductions need.
        """
        size = 1
        for extent in reversed(extents):
            fits = max(d for d in range(1, extent + 1) if extent % d == 0 and size * d <= self._threads)
            size *= fits
            if fits < extent:
                break
        return size

    def _alone(self, block: s_tir.schedule.SBlockRV) -> None:
        """A kernel of its own, which leaves its result in a buffer."""
        _, lane = self._bind(block)
        if lane is not None:
            # Reductions are inside: the lanes are a part of the item.
            self._sch.unroll(lane)

    def _compute_in(self, block: s_tir.schedule.SBlockRV, item: s_tir.schedule.LoopRV) -> None:
        """Computes within an item what it needs of a block, lane by lane: lanes may differ in what they read.

        A compiler that sees the lanes unrolled reads a texel once for all of them.
        """
        sch = self._sch
        sch.compute_at(block, item, preserve_unit_loops=True)
        reduced = self._is_reduced(block)
        loops = sch.get_loops(block)[-len(reduced) :]
        kept = [loop for loop, is_reduced in zip(loops, reduced, strict=True) if not is_reduced]
        summed = [loop for loop, is_reduced in zip(loops, reduced, strict=True) if is_reduced]
        lane = kept[-1] if kept and int(sch.get(kept[-1]).extent) == LANES else None
        lanes = [lane] if lane is not None else []
        if summed:
            inner = []
            if int(sch.get(summed[0]).extent) % LANES == 0:
                # Channels by texel: those of one are read together.
                summed[0], texel = sch.split(summed[0], [None, LANES])
                inner = [texel]
                sch.unroll(texel)
            sch.reorder(*summed, *inner, *lanes)
            init = sch.decompose_reduction(block, summed[0])
            if lanes:
                sch.unroll(sch.get_loops(init)[-1])
        for loop in lanes:
            sch.unroll(loop)
