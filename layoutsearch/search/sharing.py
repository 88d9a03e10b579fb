"""How kernels share their work out between threads: by rows of pixels, or by tiles of channels.

A thread finds what it has made itself in the cache next to its core, and what another has made farther away. So which
way is best depends on the kernels around, and a kernel that is timed alone does not show it. Kernels are therefore
timed within the model, in a few plans: all by rows, all by channels, and some in which neighbours differ. From these
the time of each kernel is known for every way of its own and of the one before it; what is best for all together is a
layout problem with two "layouts", solved exactly.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.plan.plan import LayoutPlan, PlanOp
from layoutsearch.schedule.value import Schedule
from layoutsearch.search.known import Known, Knows
from layoutsearch.search.problem import LayoutProblem, Node, Tensor, Use
from layoutsearch.search.solve import solve
from layoutsearch.search.workloads import KernelNode

BY_ROWS, BY_CHANNELS = 0, 1
WAYS = ("rows", "channels")
"""Names of the two."""
_SOLVE_S = 5.0
# What of a template's `outer` is by rows; the others are by channels.
_ROWS = {"channels": "rows", "winograd": "tiles"}
# A way in which a kernel alone is slower than that is not tried.
_MOST_SLOWER = 1.5
# Tries to have neighbours differ; each takes two more builds.
_MIXED = 2

Ways = tuple[int, ...]
"""Of each kernel of a plan that can be shared out either way."""


@dataclass(frozen=True)
class SharedKernel:
    """A kernel that can be shared out either way, wherever a plan has it.

    Attributes:
        ops: ids of its roots.
        schedules: by rows and by channels.
        us: what each took alone; None where that is not known.
        now: which of the two the plan has.
    """

    ops: tuple[str, ...]
    schedules: tuple[Schedule, Schedule]
    us: tuple[float | None, float | None]
    now: int


def way_of(schedule: Schedule | None) -> int | None:
    """How a schedule shares its work out; None for templates that know one way only."""
    rows = _ROWS.get(schedule.template) if schedule is not None else None
    if schedule is None or rows is None:
        return None
    return BY_ROWS if schedule["outer"] == rows else BY_CHANNELS


def shared_kernels(
    plan: LayoutPlan, graph: LayoutGraph, nodes: Sequence[KernelNode], lab: Knows, cached_bytes: float
) -> list[SharedKernel]:
    """The kernels of a plan that can be shared out either way, in program order; equal ones together.

    Those that move more than `cached_bytes` find nothing in a cache, and are left as they are.
    """
    ops = {op.id: op for op in plan.ops}
    joined = {op_id for fusion in plan.fusions for op_id in (fusion.first, fusion.second)}
    found: dict[tuple[str, object, Schedule], SharedKernel] = {}
    for node in nodes:
        op = ops.get(graph.by_name[node.root].id)
        facts = node.workload.facts
        if op is None or op.id in joined or facts.read_bytes + facts.written_bytes > cached_bytes:
            continue
        now = way_of(op.schedule)
        if op.schedule is None or now is None:
            continue
        key = (node.workload.key, op.choice, op.schedule)
        if key in found:
            found[key] = replace(found[key], ops=(*found[key].ops, op.id))
            continue
        other = _other_way(op, op.schedule, lab.of(node.workload, op.choice))
        if other is not None:
            schedule, us = other
            pairs = ((op.schedule, op.measured_us), (schedule, us))
            first, second = pairs if now == BY_ROWS else pairs[::-1]
            found[key] = SharedKernel((op.id,), (first[0], second[0]), (first[1], second[1]), now)
    return list(found.values())


def _other_way(op: PlanOp, schedule: Schedule, known: Known) -> tuple[Schedule, float | None] | None:
    """The fastest schedule that shares out the other way, and what it took alone."""
    now = way_of(schedule)
    for text, us in known.ranked:
        other = Schedule.from_json(json.loads(text))
        if way_of(other) not in (None, now):
            slow = op.measured_us is not None and us > _MOST_SLOWER * op.measured_us
            return None if slow else (other, us)
    if schedule.template != "channels":
        return None
    outer = "channels" if now == BY_ROWS else "rows"
    return Schedule.make("channels", **{**dict(schedule.params), "outer": outer}), None


def with_ways(plan: LayoutPlan, kernels: Sequence[SharedKernel], ways: Ways) -> LayoutPlan:
    """The plan with its kernels shared out so."""
    changed: dict[str, tuple[SharedKernel, int]] = {}
    for kernel, way in zip(kernels, ways, strict=True):
        if way != kernel.now:
            changed |= dict.fromkeys(kernel.ops, (kernel, way))
    return replace(plan, ops=tuple(_changed(op, *changed[op.id]) if op.id in changed else op for op in plan.ops))


def _changed(op: PlanOp, kernel: SharedKernel, way: int) -> PlanOp:
    why = f"work shared out by {WAYS[way]}, which is faster within the model"
    return replace(
        op,
        schedule=kernel.schedules[way],
        measured_us=kernel.us[way],
        why=f"{op.why}; {why}" if op.why else why,
    )


def designs(order: Sequence[int], count: int) -> list[Ways]:
    """Which ways to time the kernels in: all by rows, all by channels, and some in which neighbours differ.

    Where equal kernels lie in rings, not all neighbours can differ at once: those that did not yet come first in a
    second try.

    Args:
        order: number of the kernel at each place of the program.
        count: of kernels.
    """
    alike = Counter((one, two) for one, two in itertools.pairwise(order) if one != two)
    every = [(BY_ROWS,) * count, (BY_CHANNELS,) * count]
    for _ in range(_MIXED):
        if not alike:
            break
        mixed = _unlike(order, count, alike)
        every += [mixed, tuple(1 - way for way in mixed)]
        alike = Counter({pair: n for pair, n in alike.items() if mixed[pair[0]] == mixed[pair[1]]})
    return every


def _unlike(order: Sequence[int], count: int, alike: Mapping[tuple[int, int], int]) -> Ways:
    """Ways in which many of these pairs of neighbours differ, one kernel after the other."""
    ways: dict[int, int] = {}
    for kernel in dict.fromkeys(order):
        votes = [0, 0]
        for (one, two), times in alike.items():
            other = two if one == kernel else one if two == kernel else None
            if other in ways:
                votes[1 - ways[other]] += times
        ways[kernel] = BY_CHANNELS if votes[BY_CHANNELS] > votes[BY_ROWS] else BY_ROWS
    return tuple(ways.get(kernel, BY_ROWS) for kernel in range(count))


@dataclass(frozen=True)
class Parts:
    """What the kernels of a plan took within the model.

    Attributes:
        roots: id of the first operator of each, in the order in which they run; empty for a transform.
        us: microseconds of each.
    """

    roots: tuple[str, ...]
    us: tuple[float, ...]

    def by_kernel(self, of: Mapping[str, int]) -> tuple[list[int], list[float]]:
        """Kernels in order, and the time from the start of each to the start of the next; `of` are their numbers.

        What a kernel left in the caches shows in those behind it that know one way only.
        """
        order: list[int] = []
        us: list[float] = []
        for root, took in zip(self.roots, self.us, strict=True):
            if root in of:
                order.append(of[root])
                us.append(took)
            elif us:
                us[-1] += took
        return order, us


def best_ways(order: Sequence[int], count: int, observed: Sequence[tuple[Ways, Sequence[float]]]) -> Ways:
    """The ways that together are fastest.

    Args:
        order: number of the kernel at each place.
        count: of kernels.
        observed: ways of all kernels that were timed, with the time at each place. All by rows and all by channels
            are among them.
    """
    costs = np.zeros((count, 2))
    between: dict[tuple[int, int], npt.NDArray[np.float64]] = {}
    for place, kernel in enumerate(order):
        before = order[place - 1] if place else kernel
        cells = _cells(before, kernel, [(ways, us[place]) for ways, us in observed])
        if before == kernel:
            costs[kernel] += np.diag(cells)
        else:
            between[before, kernel] = between.get((before, kernel), np.zeros((2, 2))) + cells
    nodes = tuple(Node(f"kernel {k}", tuple(costs[k])) for k in range(count))
    # What the one before made is never what is wanted, so that each of the four has its price.
    tensors = []
    for (before, kernel), cells in between.items():
        matrix = np.zeros((4, 4))
        matrix[:2, 2:] = cells
        tensors.append(
            Tensor(f"{before} to {kernel}", before, (0, 1), (Use(kernel, (2, 3)),), tuple(map(tuple, matrix.tolist())))
        )
    return solve(LayoutProblem(nodes, tuple(tensors)), time_limit_s=_SOLVE_S).assignment


def _cells(before: int, kernel: int, observed: Sequence[tuple[Ways, float]]) -> npt.NDArray[np.float64]:
    """Time at one place by the way of the one before and its own: shape (2, 2)."""
    seen: dict[tuple[int, int], list[float]] = {}
    for ways, us in observed:
        seen.setdefault((ways[before], ways[kernel]), []).append(us)
    cells = np.zeros((2, 2))
    # What was never seen is as slow as the slower one without a change of ways: nothing to gain from a guess.
    unseen = max(statistics.mean(seen[way, way]) for way in (BY_ROWS, BY_CHANNELS))
    for one in (BY_ROWS, BY_CHANNELS):
        for two in (BY_ROWS, BY_CHANNELS):
            cells[one, two] = statistics.mean(seen[one, two]) if (one, two) in seen else unseen
    return cells
