"""What runs in a build worker for a pair of kernels: some schedules of the one kernel, and the two apart."""

from __future__ import annotations

import json
from dataclasses import dataclass

import tvm
from tvm import tirx

from layoutsearch.errors import LayoutSearchError
from layoutsearch.measure.records import canonical_json
from layoutsearch.schedule import dispatch, pair
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.value import Schedule, ScheduleError
from layoutsearch.search.jobs import ArgSpec, KernelJob, compiled, function_name, lowered_kernel
from layoutsearch.toolchain import export

PAIR = "layoutsearch.search.pair_jobs:build_pair"
APART = ("first", "second")
"""Symbols of the two kernels in the library."""


@dataclass(frozen=True)
class PairJob:
    """Build a pair.

    Attributes:
        first, second: the two kernels; of these jobs what is computed, target and threads are read.
        apart: their schedules as JSON, empty for the default.
        count: of schedules of the one kernel, at most.
        output: path of the library.
    """

    first: KernelJob
    second: KernelJob
    apart: tuple[str, str]
    count: int
    output: str


@dataclass(frozen=True)
class BuiltPair:
    """A library of kernels: function i is the one kernel in schedule i (canonical JSON), `APART` are the two.

    Attributes:
        args: of the one kernel, output last.
        apart: of the two.
        reads: which parameter of the second is the tensor between the two.
        why_none: why there is no such kernel; nothing was built then.
    """

    output: str
    schedules: tuple[str, ...]
    args: tuple[ArgSpec, ...]
    apart: tuple[tuple[ArgSpec, ...], tuple[ArgSpec, ...]]
    reads: int
    why_none: str = ""


def build_pair(job: PairJob) -> BuiltPair:
    """Lower both workloads and build the pair."""
    target = tvm.target.Target(job.first.target)
    info = TargetInfo.from_target(target, job.first.threads)
    two = lowered_kernel(job.first), lowered_kernel(job.second)
    schedules = tuple(
        Schedule.from_json(json.loads(text)) if text else dispatch.default(func, info)
        for text, func in zip(job.apart, two, strict=True)
    )
    specs = (_specs(two[0]), _specs(two[1]))
    try:
        both = pair.Pair.of(*two)
    except ScheduleError as error:
        return BuiltPair(job.output, (), (), specs, 0, str(error))
    functions: dict[str, tirx.PrimFunc] = {}
    fresh: list[str] = []
    why = "it has no schedule"
    for schedule in pair.candidates(both, info, (schedules[0], schedules[1])):
        if len(fresh) == job.count:
            break
        try:
            kernel = pair.apply(both, schedule, info)
        except LayoutSearchError as error:
            why = str(error)
            continue
        functions[function_name(len(fresh))] = kernel
        fresh.append(canonical_json(schedule.to_json()))
    if not fresh:
        return BuiltPair(job.output, (), (), specs, both.reads, why)
    args = _specs(functions[function_name(0)])
    for name, func, schedule in zip(APART, two, schedules, strict=True):
        functions[name] = dispatch.apply(func, schedule, info)
    named = {name: func.with_attr("global_symbol", name) for name, func in functions.items()}
    export(compiled(named, target, info), job.output, target)
    return BuiltPair(job.output, tuple(fresh), args, specs, both.reads)


def _specs(func: tirx.PrimFunc) -> tuple[ArgSpec, ...]:
    return tuple((tuple(int(s) for s in p.ty.shape), str(p.ty.dtype)) for p in func.params)
