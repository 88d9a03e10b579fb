"""Two kernels as one: a depthwise convolution and the pointwise convolution that alone reads what it makes.

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
from layoutsearch.schedule.templates import depthwise_pointwise, depthwise_pointwise_guess
from layoutsearch.schedule.value import Schedule, ScheduleError
from layoutsearch.schedule.vector_math import vectorizable

NAME = "depthwise_pointwise"
"""Of the template in schedules."""


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
    """A depthwise convolution and the pointwise one behind it, each with its epilogue.

    Attributes:
        first, second: the two.
        reads: which parameter of the second is the tensor between them.
    """

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
        if not one.c.depthwise or one.c.pointwise:
            raise ScheduleError("the first of a pair is no depthwise convolution with a window")
        if not two.c.pointwise or two.c.groups != 1 or two.c.pad is not None:
            raise ScheduleError("the second of a pair is no pointwise convolution of one group and stride 1")
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
        return cls(one, two, position)


def candidates(pair: Pair, target: TargetInfo, apart: tuple[Schedule | None, Schedule | None]) -> list[Schedule]:
    """Schedules of a pair to try, best guesses first; `apart` are those that the two have as kernels of their own."""
    return depthwise_pointwise_guess.schedules(pair.first.c, pair.second.c, target, apart)


def apply(pair: Pair, schedule: Schedule, target: TargetInfo) -> tirx.PrimFunc:
    """The one kernel: parameters of the first, those of the second without the tensor between them, the result.

    Raises:
        ScheduleError: the schedule does not fit.
    """
    if schedule.template != NAME:
        raise ScheduleError(f"schedule template {schedule.template} is not for a pair of kernels")
    first, second = pair.first, pair.second
    emitted = depthwise_pointwise.PairKernel(
        (first.c, first.tail), (second.c, second.tail), first.out, schedule, target
    ).emit()
    params = [*first.params[:-1], *(p for i, p in enumerate(second.params) if i != pair.reads)]
    func = second.anatomy.func
    return b.kernel(params, (), [vectorizable(stage) for stage in emitted], func.ret_type, func.attrs)
