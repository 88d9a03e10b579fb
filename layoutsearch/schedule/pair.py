"""Two kernels as one: a depthwise and a pointwise convolution, in either order, the second alone reading the first.

Both are fused, unscheduled functions; what both compute is read as for kernels of their own. The tensor between them is
gone: a few of its rows at a time lie in the scratch of the thread that makes and reads them. Whether that is faster
than two kernels depends on shapes, layouts and caches, and has to be measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from layoutsearch.layout.layout import Layout
from layoutsearch.schedule import builder as b
from layoutsearch.schedule.anatomy import Anatomy, Epilogue, epilogue, read
from layoutsearch.schedule.contraction import Contraction, contraction
from layoutsearch.schedule.indexing import static_shape
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.templates import (
    depthwise_pointwise,
    depthwise_pointwise_guess,
    pointwise_depthwise,
    pointwise_depthwise_guess,
)
from layoutsearch.schedule.value import Schedule, ScheduleError
from layoutsearch.schedule.vector_math import vectorizable

DEPTHWISE_POINTWISE, POINTWISE_DEPTHWISE = "depthwise_pointwise", "pointwise_depthwise"
TEMPLATES = (DEPTHWISE_POINTWISE, POINTWISE_DEPTHWISE)
"""Of pairs, in schedules."""


@dataclass(frozen=True, eq=False)
class Part:
    """One of the two: a convolution with an epilogue and nothing else.

    Attributes:
        anatomy: its stages.
        c: the convolution.
        tail: the epilogue.
        data, out: layouts of what it reads and makes.
    """

    anatomy: Anatomy
    c: Contraction
    tail: Epilogue
    data: Layout
    out: Layout

    @classmethod
    def of(cls, func: tirx.PrimFunc, what: str) -> Part:
        """Reads a function.

        Raises:
            ScheduleError: it is something else; the message calls it `what`.
        """
        anatomy = Anatomy.of(func)
        c, tail = contraction(anatomy), epilogue(anatomy)
        if anatomy.anchor is None or c is None or anatomy.anchor[1]["op"] != "conv2d":
            raise ScheduleError(f"the {what} of a pair is no direct convolution")
        if tail is None or len(tail.outputs) + tail.writes_anchor != 1:
            raise ScheduleError(f"what follows the convolution in the {what} of a pair is not elementwise")
        if any(stage is not c.pad for stage in anatomy.stages[: c.position]):
            raise ScheduleError(f"the {what} of a pair computes something before its convolution")
        data, _, out = (Layout(name) for name in anatomy.anchor[1]["layouts"])
        return cls(anatomy, c, tail, data, out)

    @property
    def params(self) -> list[tirx.Var]:
        """Parameters, the result last."""
        return list(self.anatomy.func.params)

    @property
    def result(self) -> tirx.Buffer:
        """What it makes."""
        return self.params[-1]


@dataclass(frozen=True, eq=False)
class Pair:
    """A depthwise and a pointwise convolution, one behind the other, each with its epilogue.

    Attributes:
        template: `depthwise_pointwise` or `pointwise_depthwise`.
        first, second: the two.
        reads: which parameter of the second is the tensor between them.
    """

    template: str
    first: Part
    second: Part
    reads: int

    @classmethod
    def of(cls, first: tirx.PrimFunc, second: tirx.PrimFunc) -> Pair:
        """Reads two functions, the second of which gets the result of the first as its data.

        Raises:
            ScheduleError: they are no such pair; the message says why.
        """
        one, two = Part.of(first, "first"), Part.of(second, "second")
        template = DEPTHWISE_POINTWISE if one.c.depthwise else POINTWISE_DEPTHWISE
        names = ("first", "second") if template == DEPTHWISE_POINTWISE else ("second", "first")
        depthwise, pointwise = (one, two) if template == DEPTHWISE_POINTWISE else (two, one)
        if not depthwise.c.depthwise or depthwise.c.pointwise:
            raise ScheduleError(f"the {names[0]} of a pair is no depthwise convolution with a window")
        if not pointwise.c.pointwise or pointwise.c.groups != 1 or pointwise.c.pad is not None:
            raise ScheduleError(f"the {names[1]} of a pair is no pointwise convolution of one group and stride 1")
        between = two.c.source
        if one.out != two.data or static_shape(one.result.shape) != static_shape(between.shape):
            raise ScheduleError(
                f"the first of a pair makes {one.out}, the second reads {two.data}: not the same tensor"
            )
        # Rows of the tensor between them are then rows of the scratch.
        if not one.c.channels_last or not two.c.channels_last or "HW" not in one.out.primal:
            raise ScheduleError(f"a pair needs layouts with the channels innermost, not {one.out} and {two.out}")
        if sum(buffer.same_as(between) for stage in two.anatomy.stages for buffer in read(stage)) != 1:
            raise ScheduleError("the epilogue of the second of a pair reads the tensor between them once more")
        position = next(i for i, param in enumerate(two.params) if param.same_as(between))
        return cls(template, one, two, position)


def candidates(pair: Pair, target: TargetInfo, apart: tuple[Schedule | None, Schedule | None]) -> list[Schedule]:
    """Schedules of a pair to try, best guesses first; `apart` are those that the two have as kernels of their own."""
    guess = depthwise_pointwise_guess if pair.template == DEPTHWISE_POINTWISE else pointwise_depthwise_guess
    return guess.schedules(pair.first.c, pair.second.c, target, apart)


def apply(pair: Pair, schedule: Schedule, target: TargetInfo) -> tirx.PrimFunc:
    """The one kernel: parameters of the first, those of the second without the tensor between them, the result.

    Raises:
        ScheduleError: the schedule does not fit.
    """
    if schedule.template != pair.template:
        raise ScheduleError(f"schedule template {schedule.template} is not for a {pair.template} pair of kernels")
    first, second = pair.first, pair.second
    one, two = (first.c, first.tail), (second.c, second.tail)
    if pair.template == DEPTHWISE_POINTWISE:
        emitted = depthwise_pointwise.PairKernel(one, two, first.out, schedule, target).emit()
    else:
        emitted = pointwise_depthwise.PairKernel(one, two, schedule, target).emit()
    params = [*first.params[:-1], *(p for i, p in enumerate(second.params) if i != pair.reads)]
    func = second.anatomy.func
    return b.kernel(params, (), [vectorizable(stage) for stage in emitted], func.ret_type, func.attrs)
