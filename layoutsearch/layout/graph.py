"""The layout graph: what every operator of the canonical module reads and makes, free of TVM objects.

Tensors of four dimensions carry *axis names* in logical order (`NCHW` for what an NCHW convolution made, `NHWC` after
the transpose of such a tensor), so that one layout string means the same memory on both sides of every operator. A
transpose of the model is then only a *view*: the same memory with its axes in another order. Its consumers read the
tensor behind it, and the transforms that remain are the ones the layouts need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from layoutsearch.layout import kinds
from layoutsearch.layout.declared import Declared
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.layout import Layout

ALPHABET = "ABCDEFGHIJKLMNOP"


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in its original (logical) form.

    Attributes:
        name: bound variable in the canonical module; `var.i` for field i of a tuple.
        shape: logical shape, None where it is not static.
        dtype: element type.
        axes: axis names in logical order; upper-case A, B, C... where they have no meaning.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    axes: str

    @property
    def initial(self) -> Layout | None:
        """The original layout; None for a scalar."""
        return Layout(self.axes) if self.axes else None

    @property
    def bytes(self) -> int:
        """Size in memory, 0 where the shape is not static."""
        size = dtype_bytes(self.dtype) if self.shape is not None else 0
        for extent in self.shape or ():
            size *= extent
        return size


@dataclass(frozen=True)
class Operand:
    """One tensor operand.

    Attributes:
        tensor: the tensor that is read, behind any transposes; None for a constant, whose layout changes cost nothing.
        info: the operand as the operator sees it, its axes in the order of the last transpose.
    """

    tensor: str | None
    info: TensorInfo


@dataclass(frozen=True)
class OpNode:
    """One operator: fields of tuple operands are flattened, in order."""

    name: str
    id: str
    op: str
    kind: str
    role: Role
    operands: tuple[Operand, ...]
    results: tuple[TensorInfo, ...]
    attrs: Mapping[str, Any] = field(hash=False)
    why_frozen: str = ""

    @property
    def result(self) -> TensorInfo:
        """The only result (the first of several)."""
        return self.results[0]


@dataclass(frozen=True)
class LayoutGraph:
    """Operators in program order, with the model's inputs and outputs.

    Attributes:
        inputs: the model's inputs, weights that are parameters included.
        ops: every operator but the transposes that are views.
        outputs: what `main` returns, flattened.
        views: transposes that move nothing, by bound variable, with the tensor behind each.
    """

    inputs: tuple[TensorInfo, ...]
    ops: tuple[OpNode, ...]
    outputs: tuple[Operand, ...]
    views: Mapping[str, Operand] = field(default_factory=dict, hash=False)

    @cached_property
    def by_name(self) -> dict[str, OpNode]:
        """Operators by bound variable."""
        return {op.name: op for op in self.ops}

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor that is an input or a result."""
        found = {t.name: t for t in self.inputs}
        for op in self.ops:
            found.update({t.name: t for t in op.results})
        return found

    @cached_property
    def producers(self) -> dict[str, OpNode]:
        """The operator behind each tensor; model inputs have none."""
        return {t.name: op for op in self.ops for t in op.results}

    @cached_property
    def consumers(self) -> dict[str, tuple[tuple[OpNode, int], ...]]:
        """Operators (with operand index) that read each tensor, in program order."""
        found: dict[str, list[tuple[OpNode, int]]] = {name: [] for name in self.tensors}
        for op in self.ops:
            for index, operand in enumerate(op.operands):
                if operand.tensor is not None:
                    found[operand.tensor].append((op, index))
        return {name: tuple(uses) for name, uses in found.items()}

    @property
    def anchors(self) -> tuple[OpNode, ...]:
        """Operators whose kernel depends on the layout and that are free to choose it."""
        return tuple(op for op in self.ops if op.role is Role.ANCHOR)


def declared_choices(op: OpNode) -> tuple[Declared, ...]:
    """The choices of a call of an external function; empty for every other operator."""
    return tuple(op.attrs["declared"]) if op.op == kinds.EXTERN_CALL else ()


@dataclass(frozen=True)
class ConvInfo:
    """Geometry of a conv2d or conv2d_transpose, in logical terms."""

    batch: int
    in_channels: int
    out_channels: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @property
    def depthwise(self) -> bool:
        """One filter a channel."""
        return self.groups > 1 and self.groups == self.in_channels == self.out_channels


def conv_info(op: OpNode) -> ConvInfo:
    """Geometry of a convolution node."""
    data, kernel = op.operands[0].info, op.operands[1].info
    x = dict(zip(data.axes, data.shape or (), strict=True))
    w = dict(zip(kernel.axes, kernel.shape or (), strict=True))
    y = dict(zip(op.result.axes, op.result.shape or (), strict=True))
    return ConvInfo(
        batch=x["N"],
        in_channels=x["C"],
        out_channels=y["C"],
        kernel=(w["H"], w["W"]),
        strides=tuple(op.attrs["strides"]),
        dilation=tuple(op.attrs["dilation"]),
        groups=op.attrs["groups"],
    )


def axis_names(ndim: int) -> str:
    """Names without meaning for a tensor of `ndim` dimensions."""
    return ALPHABET[:ndim]


def required_axes(op: str, attrs: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Axis names that an anchor's own attributes give its data, kernel and result."""
    if op in kinds.CONVOLUTIONS:
        return attrs["data_layout"], attrs["kernel_layout"], attrs["out_layout"] or attrs["data_layout"]
    if op in kinds.POOLS:
        return attrs["layout"], "", attrs["out_layout"] or attrs["layout"]
    if op == kinds.RESIZE:
        return attrs["layout"], "", attrs["layout"]
    return None


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element."""
    digits = "".join(c for c in dtype if c.isdigit())
    return max(1, int(digits) // 8) if digits else 1
