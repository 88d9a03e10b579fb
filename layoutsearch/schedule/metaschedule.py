"""Schedules that MetaSchedule found: a trace replayed on the kernel it was made for."""

from __future__ import annotations

import json

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import Trace

from layoutsearch.schedule.builder import mark
from layoutsearch.schedule.indexing import static_shape
from layoutsearch.schedule.trace import plain, trace_text
from layoutsearch.schedule.value import TEMPLATES, Schedule, ScheduleError

NAME = "metaschedule"


def as_module(func: tirx.PrimFunc) -> tvm.IRModule:
    """A kernel as MetaSchedule takes it: a copy, since a schedule takes annotations off the very blocks it is given."""
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    return tvm.ir.load_json(tvm.ir.save_json(module))


def from_trace(trace: Trace) -> Schedule:
    """The schedule of a trace, postprocessing included.

    Raises:
        PlanError: an instruction is not allowed in plans.
    """
    return Schedule(NAME, TEMPLATES[NAME].version, (("trace", trace_text(plain(trace.as_json()))),))


def replay(func: tirx.PrimFunc, schedule: Schedule) -> s_tir.Schedule:
    """TVM's schedule of the kernel after the trace.

    Raises:
        ScheduleError: the trace does not apply to this kernel.
    """
    state = s_tir.Schedule(as_module(func), seed=1)
    try:
        Trace.apply_json_to_schedule(json.loads(str(schedule["trace"])), state)
    except Exception as error:
        # TVM has an exception class of its own for each way in which an instruction may fail.
        raise ScheduleError(
            f"the MetaSchedule trace does not apply to this kernel: {_first_line(error)}; tune again"
        ) from None
    return state


def apply(func: tirx.PrimFunc, schedule: Schedule) -> tirx.PrimFunc:
    """The kernel after the trace; see `dispatch.apply`.

    Raises:
        ScheduleError: the trace does not apply to this kernel, or makes another function of it.
    """
    functions = [f for _, f in replay(func, schedule).mod.functions_items()]
    if len(functions) != 1 or _signature(functions[0]) != _signature(func):
        raise ScheduleError("the MetaSchedule trace makes a kernel with other operands; tune again")
    (made,) = functions
    return mark(tirx.PrimFunc(made.params, made.body, func.ret_type, func.attrs))


def _signature(func: tirx.PrimFunc) -> list[tuple[tuple[int, ...], str]]:
    return [(tuple(static_shape(p.ty.shape)), str(p.ty.dtype)) for p in func.params]


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith(("Traceback", "File ", "[", "ScheduleError: (not"))]
    return (said[0] if said else type(error).__name__)[:200]
