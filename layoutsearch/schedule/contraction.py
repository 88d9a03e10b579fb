"""One description for convolutions, transposed convolutions and matrix products: a sum over channels and taps.

    out[n, k, y, x] = sum over taps (ky, kx) and channels i of  data[n, c(k, i), Y, X] * weight[k, i, ky, kx]

Along each spatial axis the outputs fall into phases: output `start + q * step` reads input `q * in_step + offset(tap)`.
An ordinary convolution has one phase, a transposed one of stride s has s of them, each an ordinary convolution with a
part of the taps (no multiplication by inserted zeros).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx

from layoutsearch.layout.layout import Layout
from layoutsearch.schedule.anatomy import Anatomy, Stage
from layoutsearch.schedule.builder import load, unravel
from layoutsearch.schedule.indexing import Coordinate, Expr, flat, physical_indices, static_shape
from layoutsearch.schedule.value import ScheduleError
from layoutsearch.schedule.winograd import KERNEL


@dataclass(frozen=True)
class Phase:
    """Outputs start, start + step, ... (`count` of them) along one axis, and the taps that reach them.

    Tap j (0 <= j < taps) is kernel position `kernel0 + j * kernel_step`; output number q reads input
    `q * in_step + offset0 + j * offset_step` with it.
    """

    start: int
    step: int
    count: int
    in_step: int
    taps: int
    kernel0: int
    kernel_step: int
    offset0: int
    offset_step: int

    def input(self, q: Expr, tap: Expr) -> Expr:
        """Input position read by output number q through a tap."""
        return q * self.in_step + (tap * self.offset_step + self.offset0)

    def kernel(self, tap: Expr, q: Expr) -> Expr:
        """Kernel position of a tap of output number q."""
        return tap * self.kernel_step + self.kernel0

    def valid(self, tap: int, extent: int, first: int, count: int) -> tuple[int, int]:
        """The part [low, high) of outputs first..first+count whose input through `tap` lies inside the tensor."""
        inside = [0 <= int(self.input(first + t, tap)) < extent for t in range(count)]
        if True not in inside:
            return 0, 0
        low = inside.index(True)
        return low, low + sum(inside)

    def always_inside(self, extent: int) -> bool:
        """Whether no output ever reads outside the tensor."""
        ends = [int(self.input(q, j)) for q in (0, self.count - 1) for j in (0, max(0, self.taps - 1))]
        return self.taps == 0 or (min(ends) >= 0 and max(ends) < extent)

    def tap_range(self, q: Expr, extent: int) -> tuple[Expr, Expr]:
        """(first tap, number of taps) whose input lies inside the tensor for output number q."""
        if self.always_inside(extent) or self.taps == 0:
            return 0, self.taps
        base, step = q * self.in_step + self.offset0, self.offset_step
        if step > 0:
            low, high = _ceildiv(0 - base, step), _ceildiv(extent - base, step)
        else:
            low, high = _ceildiv(base - (extent - 1), -step), _ceildiv(base + 1, -step)
        low, high = tirx.max(low, 0), tirx.min(high, self.taps)
        return low, tirx.max(high - low, 0)


@dataclass(frozen=True)
class TransposedRows(Phase):
    """All rows of a transposed convolution as one phase: which taps reach a row is computed from its number.

    Row q takes kernel positions (q + pad) % stride, + stride, ...; tap j reads input (q + pad) // stride - j.
    """

    stride: int
    pad: int
    extent: int

    @classmethod
    def of(cls, out: int, kernel: int, stride: int, pad: int) -> TransposedRows:
        """Rows of an undilated transposed convolution with `kernel` taps."""
        return cls(0, 1, out, 1, -(-kernel // stride), 0, stride, 0, -1, stride, pad, kernel)

    def input(self, q: Expr, tap: Expr) -> Expr:
        """Input row read by output row q through a tap."""
        return (q + self.pad) // self.stride - tap

    def kernel(self, tap: Expr, q: Expr) -> Expr:
        """Kernel row of a tap of output row q."""
        return (q + self.pad) % self.stride + tap * self.stride

    def always_inside(self, extent: int) -> bool:
        """Never taken for granted: rows differ in the number of their taps."""
        return False

    def tap_range(self, q: Expr, extent: int) -> tuple[Expr, Expr]:
        """(first tap, number of taps) whose input lies inside the tensor and whose kernel row exists."""
        center = (q + self.pad) // self.stride
        low = tirx.max(center - (extent - 1), 0)
        exists = (self.extent - (q + self.pad) % self.stride + (self.stride - 1)) // self.stride
        return low, tirx.max(tirx.min(center + 1, exists) - low, 0)


def _ceildiv(a: Expr, b: int) -> Expr:
    return a if b == 1 else (a + (b - 1)) // b


def conv_phases(out: int, kernel: int, stride: int, pad: int, dilation: int) -> list[Phase]:
    """The one phase of an ordinary convolution axis."""
    return [Phase(0, 1, out, stride, kernel, 0, 1, -pad, dilation)]


def transposed_phases(out: int, kernel: int, stride: int, pad: int, dilation: int) -> list[Phase]:
    """The `stride` phases of a transposed convolution axis."""
    common = math.gcd(stride, dilation)
    every = stride // common
    phases = []
    for start in range(min(stride, out)):
        taps = [k for k in range(kernel) if (start + pad - k * dilation) % stride == 0]
        first = taps[0] if taps else 0
        offset = (start + pad - first * dilation) // stride
        count = (out - start + stride - 1) // stride
        phases.append(Phase(start, stride, count, 1, len(taps), first, every, offset, -(every * dilation // stride)))
    return phases


@dataclass(frozen=True)
class Contraction:
    """The sum, with its extents and its accesses.

    Attributes:
        batch: Extent of n.
        out_channels: Extent of k, all groups.
        in_channels: Channels summed over, of one group.
        groups: Number of groups; k runs over `out_channels / groups` in each.
        height, width: Extents of the input.
        rows, columns: Phases along the two axes of the output.
        merged_rows: The rows as a single phase, where one can describe them.
        data: (n, channel, y, x) -> element of the input.
        weight: (n, k, i, ky, kx) -> element of the weights; k over all groups, i within its group. Only the right
            operand of a batched matrix product depends on n.
        out_indices: (n, k, y, x) -> indices into the output.
        lane_blocks: Block sizes that a vector of output channels must divide (of the output, the weights and, for a
            depthwise convolution, the data; of the weights alone for Winograd, whose outputs are stored later on).
        kernel_block: Block of output channels in the weights; 1 where they are not blocked.
        out_block: Block of output channels in the output; 1 where they are not blocked.
        reduce_block: Input channels to run over innermost: the common part of the blocks of data and weights.
        channels_last: Whether output channels are contiguous in the output.
        columns_last: Whether columns are contiguous in both the data and the output.
        dtype: Of the accumulator and the output.
        source, weights, output: The buffers.
        position: Number of the anchor among the stages.
        pad: The absorbed `pad` stage: the taps know the border.
        winograd: m of F(m x m, 3 x 3), whose transformed weights are (m + 2) x (m + 2); 0 for the direct algorithm. The
            phases are those of the 3 x 3 kernel.
    """

    batch: int
    out_channels: int
    in_channels: int
    groups: int
    height: int
    width: int
    rows: tuple[Phase, ...]
    columns: tuple[Phase, ...]
    merged_rows: Phase | None
    data: Callable[[Expr, Coordinate, Expr, Expr], tirx.Expr]
    weight: Callable[[Expr, Coordinate, Coordinate, Expr, Expr], tirx.Expr]
    out_indices: Callable[[Expr, Coordinate, Expr, Expr], list[Expr]]
    lane_blocks: tuple[int, ...]
    kernel_block: int
    out_block: int
    reduce_block: int
    channels_last: bool
    columns_last: bool
    dtype: str
    source: tirx.Buffer
    weights: tirx.Buffer
    output: tirx.Buffer
    position: int
    pad: Stage | None
    winograd: int = 0

    @property
    def depthwise(self) -> bool:
        """One input and one output channel per group."""
        return self.groups > 1 and self.in_channels == 1 and self.out_channels == self.groups

    @property
    def out_per_group(self) -> int:
        """Output channels of one group."""
        return self.out_channels // self.groups

    @property
    def flops(self) -> float:
        """Multiplications and additions of the whole sum, border included."""
        taps = sum(p.count * p.taps for p in self.rows) * sum(p.count * p.taps for p in self.columns)
        return 2.0 * self.batch * self.out_channels * self.in_channels * taps

    @property
    def pointwise(self) -> bool:
        """One tap, stride one, no border: output pixel f reads input pixel f."""
        one = [(p.start, p.step, p.in_step, p.taps, p.offset0) for p in (*self.rows, *self.columns)]
        same = (sum(p.count for p in self.rows), sum(p.count for p in self.columns)) == (self.height, self.width)
        return one == [(0, 1, 1, 1, 0)] * 2 and same

    def fused(self) -> Contraction:
        """A pointwise contraction with its rows and columns as one axis of columns; any other one as it is."""
        if not self.pointwise or self.height == 1:
            return self
        width, pixels = self.width, self.height * self.width
        data, out = self.data, self.out_indices
        return replace(
            self,
            height=1,
            width=pixels,
            rows=(replace(self.rows[0], count=1),),
            merged_rows=replace(self.rows[0], count=1),
            columns=(replace(self.columns[0], count=pixels),),
            data=lambda n, c, _, x: data(n, c, x // width, x % width),
            out_indices=lambda n, k, _, x: out(n, k, x // width, x % width),
        )


def contraction(anatomy: Anatomy) -> Contraction | None:
    """The anchor as a contraction; None where the function has no anchor."""
    if anatomy.anchor is None:
        return None
    position, attrs = anatomy.anchor
    stage = anatomy.stages[position]
    assert isinstance(stage, Stage)
    if attrs["op"] == "matmul":
        return _matmul(stage, position)
    return _convolution(anatomy, stage, position, attrs)


def _operands(stage: Stage) -> tuple[tirx.Buffer, tirx.Buffer]:
    loads = stage.loads
    if len(loads) != 2:
        raise ScheduleError(f"block {stage.name} reads {len(loads)} tensors, expected data and weights")
    return loads[0].source, loads[1].source


def _convolution(anatomy: Anatomy, stage: Stage, position: int, attrs: dict[str, Any]) -> Contraction:
    data_l, kernel_l, out_l = (Layout(name) for name in attrs["layouts"])
    data, weights = _operands(stage)
    pads, strides, dilation, groups = attrs["padding"], attrs["strides"], attrs["dilation"], attrs["groups"]
    transposed, winograd = attrs["op"] == "conv2d_transpose", attrs["op"] == "conv2d_winograd"
    pad = anatomy.producer(data)
    if isinstance(pad, Stage) and pad.name == "pad" and not transposed:
        data = pad.loads[0].source
    elif any(pads) and not transposed:
        raise ScheduleError("the anchor conv2d is padded but no pad block comes before it")
    else:
        pad = None
    n, c, h, w = data_l.logical_shape(static_shape(data.shape), "NCHW")
    _, k, oh, ow = out_l.logical_shape(static_shape(stage.buffer.shape), "NCHW")
    *_, kh, kw = kernel_l.logical_shape(static_shape(weights.shape), "IOHW" if transposed else "OIHW")
    outputs = kh - KERNEL + 1 if winograd else 0
    if winograd:
        kh = kw = KERNEL
    make = transposed_phases if transposed else conv_phases
    per_group_in, per_group_out = c // groups, k // groups
    dtype = str(stage.buffer.dtype)

    def weight(_: Expr, out: Coordinate, i: Coordinate, ky: Expr, kx: Expr) -> tirx.Expr:
        at: dict[str, Coordinate] = {"I": i, "O": out, "H": ky, "W": kx}
        if transposed and groups > 1:
            at["I"] = flat(out) // per_group_out * per_group_in + flat(i)
            at["O"] = flat(out) % per_group_out if per_group_out > 1 else 0
        return load(weights, *physical_indices(kernel_l, at)).astype(dtype)

    depthwise = groups > 1 and per_group_in == per_group_out == 1
    lane_blocks = [1 if winograd else out_l.block("C"), kernel_l.block("O"), data_l.block("C") if depthwise else 1]
    reduce_blocks = [b for b in (data_l.block("C"), kernel_l.block("I")) if b > 1]
    rows = make(oh, kh, strides[0], pads[0], dilation[0])
    merged = rows[0] if len(rows) == 1 else None
    if transposed and dilation[0] == 1 and len(rows) > 1:
        merged = TransposedRows.of(oh, kh, strides[0], pads[0])
    return Contraction(
        batch=n,
        out_channels=k,
        in_channels=per_group_in,
        groups=groups,
        height=h,
        width=w,
        rows=tuple(rows),
        columns=tuple(make(ow, kw, strides[1], pads[1], dilation[1])),
        merged_rows=merged,
        data=lambda b, ch, y, x: load(data, *physical_indices(data_l, {"N": b, "C": ch, "H": y, "W": x})).astype(dtype),
        weight=weight,
        out_indices=lambda b, ch, y, x: physical_indices(out_l, {"N": b, "C": ch, "H": y, "W": x}),
        lane_blocks=tuple(b for b in lane_blocks if b > 1),
        kernel_block=kernel_l.block("O"),
        out_block=out_l.block("C"),
        reduce_block=math.gcd(per_group_in, *reduce_blocks),
        channels_last=out_l.axes[-1].letter.upper() == "C",
        columns_last=data_l.axes[-1].letter == out_l.axes[-1].letter == "W",
        dtype=dtype,
        source=data,
        weights=weights,
        output=stage.buffer,
        position=position,
        pad=pad if isinstance(pad, Stage) else None,
        winograd=outputs,
    )


def _matmul(stage: Stage, position: int) -> Contraction:
    left, right = _operands(stage)
    left_load, right_load = stage.loads
    *outer, m, n = static_shape(stage.buffer.shape)
    k = stage.reduction[0][1]
    axes = [var for var, _ in stage.spatial]
    dtype = str(stage.buffer.dtype)

    def at(indices: Sequence[Expr], batch: Expr) -> list[Expr]:
        """Batch indices of an operand (each one of the output's batch axes, or zero) at the flat `batch`."""
        by_axis = dict(zip(axes, unravel(batch, outer), strict=False))
        return [0 if isinstance(i, int | tirx.IntImm) else by_axis[i] for i in indices]

    return Contraction(
        batch=math.prod(outer),
        out_channels=n,
        in_channels=k,
        groups=1,
        height=1,
        width=m,
        rows=(Phase(0, 1, 1, 1, 1, 0, 1, 0, 1),),
        columns=(Phase(0, 1, m, 1, 1, 0, 1, 0, 1),),
        merged_rows=Phase(0, 1, 1, 1, 1, 0, 1, 0, 1),
        data=lambda b, ch, _, x: load(left, *at(left_load.indices[:-2], b), x, flat(ch)).astype(dtype),
        weight=lambda b, out, i, _, __: load(right, *at(right_load.indices[:-2], b), flat(i), flat(out)).astype(dtype),
        out_indices=lambda b, ch, _, x: [*unravel(b, outer), x, flat(ch)],
        lane_blocks=(),
        kernel_block=1,
        out_block=1,
        reduce_block=k,
        channels_last=True,
        columns_last=False,
        dtype=dtype,
        source=left,
        weights=right,
        output=stage.buffer,
        position=position,
        pad=None,
    )
