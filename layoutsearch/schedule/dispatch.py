"""The entry points: which schedules a fused kernel may have, and the kernel under one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tvm import tirx

from layoutsearch.schedule import builder as b
from layoutsearch.schedule import metaschedule
from layoutsearch.schedule.anatomy import Anatomy, Epilogue, Opaque, Stage, epilogue
from layoutsearch.schedule.contraction import Contraction, contraction
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.templates import (
    channels,
    channels_guess,
    flat,
    flat_guess,
    reshape,
    stack,
    winograd,
    winograd_guess,
    workitems,
)
from layoutsearch.schedule.templates.loops import emit_stages
from layoutsearch.schedule.value import Schedule, ScheduleError
from layoutsearch.schedule.vector_math import vectorizable


class _Emits(Protocol):
    def emit(self) -> list[tirx.Stmt]: ...


_KERNELS: dict[str, Callable[[Contraction, Epilogue, Schedule, TargetInfo], _Emits]] = {
    "flat": flat.FlatKernel,
    "channels": channels.ChannelsKernel,
    "winograd": winograd.WinogradKernel,
}
LOOPS = Schedule.make("loops")
RESHAPE = Schedule.make("reshape")
STACK = Schedule.make("stack")
LIBRARY = Schedule.make("extern")
EXTERN = "layoutsearch.extern"
"""Attribute of kernels that call an external library, with its name: nothing is to be scheduled."""


def candidates(func: tirx.PrimFunc, target: TargetInfo) -> list[Schedule]:
    """The legal schedules of a fused, unscheduled kernel, best guesses first; at least one.

    Raises:
        ScheduleError: `func` is not a function as `te` and FuseTIR make it.
    """
    if _is_extern(func):
        return [LIBRARY]
    if target.isa == "opencl":
        return workitems.schedules()
    if reshape.is_reshape(func):
        return [RESHAPE]
    anatomy = Anatomy.of(func)
    c = contraction(anatomy)
    if c is None:
        return [STACK] if stack.is_stack(anatomy) else [LOOPS]
    if c.winograd:
        return winograd_guess.schedules(c, target)
    return flat_guess.schedules(c, target) if flat.applies(c) else channels_guess.schedules(c, target)


def default(func: tirx.PrimFunc, target: TargetInfo) -> Schedule:
    """The schedule to use where nothing was measured."""
    return candidates(func, target)[0]


def apply(func: tirx.PrimFunc, schedule: Schedule, target: TargetInfo) -> tirx.PrimFunc:
    """The kernel under `schedule`: same parameters, `tirx.is_scheduled` set, no global symbol.

    Raises:
        ScheduleError: the schedule does not fit the kernel.
    """
    if _is_extern(func) != (schedule.template == LIBRARY.template):
        raise ScheduleError(f"schedule template {schedule.template} does not fit: extern is for libraries alone")
    if schedule.template == LIBRARY.template:
        return func
    if schedule.template == metaschedule.NAME:
        return metaschedule.apply(func, schedule)
    if (schedule.template == workitems.NAME) != (target.isa == "opencl"):
        raise ScheduleError(f"schedule template {schedule.template} is not for target kind {target.isa}")
    if schedule.template == workitems.NAME:
        return b.mark(workitems.emit(func, schedule))
    if schedule.template == "reshape":
        if not reshape.is_reshape(func):
            raise ScheduleError("schedule template reshape needs a kernel that only reshapes, this one computes")
        return reshape.emit(func, target)
    anatomy = Anatomy.of(func)
    if schedule.template == "loops":
        return _finish(anatomy, _generic(anatomy, anatomy.stages, target))
    if schedule.template == "stack":
        if not stack.is_stack(anatomy):
            raise ScheduleError("schedule template stack needs a kernel that joins tensors end to end")
        return _finish(anatomy, _generic(anatomy, anatomy.stages, target)).with_attr(stack.STACKS, True)
    c = contraction(anatomy)
    if c is None:
        raise ScheduleError(f"schedule template {schedule.template} needs a convolution or matmul, the kernel has none")
    tail = epilogue(anatomy)
    rest: Sequence[Stage | Opaque] = ()
    if tail is None:
        # What follows is not pointwise: the anchor is stored as it is, the rest gets loops of its own.
        tail = Epilogue(c.output, (), {}, True)
        rest = anatomy.stages[c.position + 1 :]
    before = [s for s in anatomy.stages[: c.position] if s is not c.pad]
    if schedule.template not in _KERNELS:
        raise ScheduleError(f"schedule template {schedule.template} is for two kernels that become one")
    if (schedule.template == "winograd") != bool(c.winograd):
        raise ScheduleError(f"schedule template {schedule.template} is for another algorithm than the kernel's")
    main = _KERNELS[schedule.template](c, tail, schedule, target).emit()
    return _finish(anatomy, [*_generic(anatomy, before, target), *main, *_generic(anatomy, rest, target)])


def _is_extern(func: tirx.PrimFunc) -> bool:
    return func.attrs is not None and EXTERN in func.attrs


def _generic(anatomy: Anatomy, stages: Sequence[Stage | Opaque], target: TargetInfo) -> list[tirx.Stmt]:
    return emit_stages(stages, anatomy, target)


def _finish(anatomy: Anatomy, stages: Sequence[tirx.Stmt]) -> tirx.PrimFunc:
    used = {buffer for s in stages for buffer in (*b.stored_buffers(s), *(load.source for load in b.buffer_loads(s)))}
    allocated = [i for i in anatomy.intermediates if i in used]
    return b.finish(anatomy.func, allocated, [vectorizable(s) for s in stages])
