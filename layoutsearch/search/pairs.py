"""Which kernels of a plan may become one with the one behind them, and whether what was measured says that they should.

A pair is a depthwise and a pointwise convolution, in either order, of which the second alone reads the result of the
first, both with channels innermost; see `schedule.pair`. It is taken where the one kernel is clearly faster than the
two, timed in the same minutes; of a chain of kernels, those pairs that together gain most.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from layoutsearch.layout import kinds
from layoutsearch.layout.candidate import DIRECT, Candidate
from layoutsearch.layout.graph import LayoutGraph, OpNode
from layoutsearch.measure.records import canonical_json
from layoutsearch.measure.results import Measurement
from layoutsearch.plan.plan import LayoutPlan, PlanFusion, PlanOp
from layoutsearch.schedule.value import Schedule
from layoutsearch.search.workloads import KernelNode, Workload

# A gain has to be so many standard errors, and that part of what the two take.
_ERRORS = 3.0
_LEAST_GAIN = 0.02
_IQR_OF_NORMAL = 1.349
_KINDS = ("conv2d_depthwise", "conv2d_pointwise")


@dataclass(frozen=True)
class Half:
    """One of the two kernels.

    Attributes:
        workload: what it computes.
        choice: how.
        schedule: of it as a kernel of its own; None for the default.
    """

    workload: Workload
    choice: Candidate
    schedule: Schedule | None

    @property
    def about(self) -> str:
        """Equal for the same kernel."""
        schedule = canonical_json(self.schedule.to_json()) if self.schedule is not None else ""
        return f"{self.workload.key} {self.choice} {schedule}"


@dataclass(frozen=True)
class PairWork:
    """Two kernels that may become one, wherever a plan has them.

    Attributes:
        first, second: the two; the second reads the result of the first as its data.
        ops: ids of their roots, for each place.
    """

    first: Half
    second: Half
    ops: tuple[tuple[str, str], ...]

    @property
    def key(self) -> str:
        """Workload key of its records: of what the two compute, and of the kernels that they are apart."""
        text = f"{self.first.about}|{self.second.about}"
        return f"pair {hashlib.sha256(text.encode()).hexdigest()[:16]}"

    @property
    def candidate(self) -> str:
        """Candidate of its records."""
        return f"{self.first.choice} + {self.second.choice}"

    @property
    def summary(self) -> str:
        """For people."""
        return f"{self.first.workload.summary} and {self.second.workload.summary}"


@dataclass(frozen=True)
class PairTimes:
    """What was measured of a pair.

    Attributes:
        apart: the two kernels; empty where there is no such pair, or one of them does not run.
        joined: the one kernel by schedule (JSON), those that were timed in the same minutes.
    """

    apart: tuple[Measurement, ...] = ()
    joined: Mapping[str, Measurement] = field(default_factory=dict)


class PairTimer(Protocol):
    """Times pairs next to the kernels that they are apart."""

    def measure(self, works: Sequence[PairWork], reserve_s: float) -> dict[str, PairTimes]:
        """By key of the pair; what there was no time for, while `reserve_s` seconds are kept, is left out."""


def join_candidates(graph: LayoutGraph, nodes: Sequence[KernelNode]) -> list[tuple[KernelNode, KernelNode]]:
    """Kernels that may be a pair in some layouts, in program order."""
    escaping = {o.tensor for o in graph.outputs}
    by_last = {node.members[-1]: node for node in nodes}
    found = []
    for node in nodes:
        op = graph.by_name[node.root]
        if op.kind not in _KINDS:
            continue
        data = op.operands[0]
        producer = graph.producers.get(data.tensor or "")
        first = by_last.get(producer.name) if producer is not None else None
        if producer is None or first is None or not _may_be_one(graph.by_name[first.root], op):
            continue
        is_between = data.tensor not in escaping and len(graph.consumers[producer.result.name]) == 1
        # A view in between, which the model's own transposes are, would have to be one kernel with them.
        if is_between and data.info.axes == producer.result.axes:
            found.append((first, node))
    return found


def _may_be_one(first: OpNode, second: OpNode) -> bool:
    """Whether one is depthwise, and the other pointwise with stride 1 and no border."""
    if {first.kind, second.kind} != set(_KINDS):
        return False
    pointwise = first if first.kind == "conv2d_pointwise" else second
    is_plain = set(pointwise.attrs["strides"]) == {1} and set(pointwise.attrs["padding"]) == {0}
    return pointwise.op == kinds.CONV and is_plain


def pairs_of(plan: LayoutPlan, graph: LayoutGraph, nodes: Sequence[KernelNode]) -> list[PairWork]:
    """The pairs that a plan may have, equal ones together, in program order."""
    ops = {op.id: op for op in plan.ops}
    found: dict[str, PairWork] = {}
    for kernels in join_candidates(graph, nodes):
        one, two = (graph.by_name[kernel.root].id for kernel in kernels)
        first, second = _half(kernels[0], ops.get(one)), _half(kernels[1], ops.get(two))
        if first is None or second is None or first.choice.out != second.choice.data:
            continue
        if all(half.choice.out.axes[-1].letter.upper() == "C" for half in (first, second)):
            work = PairWork(first, second, ((one, two),))
            known = found.get(work.key)
            found[work.key] = work if known is None else replace(known, ops=(*known.ops, *work.ops))
    return list(found.values())


def _half(node: KernelNode, op: PlanOp | None) -> Half | None:
    if op is None or op.choice is None or op.choice.algorithm != DIRECT:
        return None
    return Half(node.workload, op.choice, op.schedule)


def chosen(works: Sequence[PairWork], times: Mapping[str, PairTimes]) -> tuple[PlanFusion, ...]:
    """The pairs that are worth it, no kernel in two."""
    found = []
    for work in works:
        best = _clearly_faster(times.get(work.key, PairTimes()))
        if best is not None:
            schedule, joined_us, apart_us = best
            found += [
                PlanFusion(first, second, schedule, round(joined_us, 3), round(apart_us, 3))
                for first, second in work.ops
            ]
    return tuple(fusion for fusion in found if fusion in _apart(found))


def _apart(fusions: Sequence[PlanFusion]) -> set[PlanFusion]:
    """Of each chain of kernels the pairs that share none and together gain most."""
    by_first = {fusion.first: fusion for fusion in fusions}
    kept: set[PlanFusion] = set()
    for start in by_first.keys() - {fusion.second for fusion in fusions}:
        # The best of the chain so far with its last pair, and without.
        taken: tuple[float, tuple[PlanFusion, ...]] = (-math.inf, ())
        left: tuple[float, tuple[PlanFusion, ...]] = (0.0, ())
        fusion = by_first.get(start)
        while fusion is not None:
            gain = (fusion.apart_us or 0.0) - (fusion.measured_us or 0.0)
            taken, left = (left[0] + gain, (*left[1], fusion)), max(taken, left, key=lambda each: each[0])
            fusion = by_first.get(fusion.second)
        kept.update(max(taken, left, key=lambda each: each[0])[1])
    return kept


def _clearly_faster(times: PairTimes) -> tuple[Schedule, float, float] | None:
    """Schedule and time of the one kernel, and the time of the two, where the one is faster beyond doubt."""
    if len(times.apart) != 2 or not all(m.ok for m in times.apart):
        return None
    ran = {schedule: m for schedule, m in times.joined.items() if m.ok}
    if not ran:
        return None
    text = min(ran, key=lambda schedule: ran[schedule].expected_us)
    joined_us, apart_us = ran[text].expected_us, sum(m.expected_us for m in times.apart)
    doubt = math.sqrt(sum(_standard_error(m) ** 2 for m in (*times.apart, ran[text])))
    if apart_us - joined_us <= max(_ERRORS * doubt, _LEAST_GAIN * apart_us):
        return None
    return Schedule.from_json(json.loads(text)), joined_us, apart_us


def _standard_error(measurement: Measurement) -> float:
    """Of the mean of the samples in microseconds, from the range of their middle half."""
    count = len(measurement.samples_us)
    if count < 2:
        return math.inf
    low, _, high = statistics.quantiles(measurement.samples_us, n=4, method="inclusive")
    return (high - low) / _IQR_OF_NORMAL / math.sqrt(count)
