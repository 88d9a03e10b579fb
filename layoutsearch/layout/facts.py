"""What a kernel computes, as plain numbers that a person can read: the input of bounds and cost models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from layoutsearch.layout import kinds
from layoutsearch.layout.graph import ConvInfo, OpNode, conv_info, dtype_bytes


@dataclass(frozen=True)
class OperandFacts:
    """A tensor that a kernel reads or makes.

    Attributes:
        shape: logical shape, in the order of `axes`.
        axes: axis names, see `layout.graph`.
        dtype: element type.
        weight: whether it is a constant of the model, which no kernel before has just written.
    """

    shape: tuple[int, ...]
    axes: str
    dtype: str
    weight: bool = False

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return math.prod(self.shape) * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class ConvFacts(ConvInfo):
    """Geometry of a convolution, transposed or not, with the (height, width) that it reads and makes."""

    in_size: tuple[int, int]
    out_size: tuple[int, int]


@dataclass(frozen=True)
class KernelFacts:
    """One fused kernel.

    Attributes:
        kind: of the root: `conv2d_pointwise`, `max_pool2d`, `add`, ...
        epilogue: short names of the operators fused behind the root, in order.
        operands: what is read from outside the kernel, weights included; scalars left out.
        results: what it makes.
        conv: geometry where the root is a convolution.
        window: (height, width) of a pooling root; (1, 1) elsewhere.
        flops: floating-point operations of the root and the epilogue; a multiply-add counts two.
        footprint: bytes that an inference of the model goes over, see `layout.footprint`; 0 where it is not known, so
            that weights come from memory.
    """

    kind: str
    epilogue: tuple[str, ...]
    operands: tuple[OperandFacts, ...]
    results: tuple[OperandFacts, ...]
    conv: ConvFacts | None
    window: tuple[int, int]
    flops: int
    footprint: int = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(o.bytes for o in self.operands if o.weight)

    @property
    def read_bytes(self) -> int:
        """Bytes of the activations that are read."""
        return sum(o.bytes for o in self.operands if not o.weight)

    @property
    def written_bytes(self) -> int:
        """Bytes that are written."""
        return sum(o.bytes for o in self.results)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KernelFacts:
        """Inverse of `to_json`, tuples restored."""
        conv: dict[str, Any] = {
            k: tuple(v) if isinstance(v, (list, tuple)) else v for k, v in (data["conv"] or {}).items()
        }
        return cls(
            kind=data["kind"],
            epilogue=tuple(data["epilogue"]),
            operands=tuple(_operand(o) for o in data["operands"]),
            results=tuple(_operand(o) for o in data["results"]),
            conv=ConvFacts(**conv) if conv else None,
            window=(data["window"][0], data["window"][1]),
            flops=data["flops"],
            footprint=data.get("footprint", 0),
        )


def _operand(data: Mapping[str, Any]) -> OperandFacts:
    return OperandFacts(tuple(data["shape"]), data["axes"], data["dtype"], data["weight"])


def kernel_facts(ops: Sequence[OpNode], footprint: int = 0) -> KernelFacts:
    """Facts of a kernel that fuses `ops`, root first, in a model of that footprint."""
    root = ops[0]
    inside = {t.name for op in ops for t in op.results}
    operands: dict[Any, OperandFacts] = {}
    for position, op in enumerate(ops):
        for index, operand in enumerate(op.operands):
            info = operand.info
            if operand.tensor in inside or not info.shape:
                continue
            key = operand.tensor if operand.tensor is not None else (position, index)
            operands.setdefault(key, OperandFacts(info.shape, info.axes, info.dtype, operand.tensor is None))
    results = tuple(OperandFacts(t.shape or (), t.axes, t.dtype) for t in ops[-1].results)
    return KernelFacts(
        kind=root.kind,
        epilogue=tuple(op.op.rsplit(".", 1)[-1] for op in ops[1:]),
        operands=tuple(operands.values()),
        results=results,
        conv=_conv_facts(root),
        window=_window(root),
        flops=sum(_flops(op) for op in ops),
        footprint=footprint,
    )


def _conv_facts(op: OpNode) -> ConvFacts | None:
    known = all(o.info.shape for o in op.operands[:2]) and bool(op.results and op.result.shape)
    if op.op not in kinds.CONVOLUTIONS or not known:
        return None
    info = conv_info(op)
    size = []
    for tensor in (op.operands[0].info, op.result):
        extents = dict(zip(tensor.axes, tensor.shape or (), strict=True))
        size.append((extents["H"], extents["W"]))
    return ConvFacts(**asdict(info), in_size=size[0], out_size=size[1])


def _window(op: OpNode) -> tuple[int, int]:
    if op.op == "relax.nn.adaptive_avg_pool2d" and op.operands[0].info.shape and op.result.shape:
        given = dict(zip(op.operands[0].info.axes, op.operands[0].info.shape, strict=True))
        made = dict(zip(op.result.axes, op.result.shape, strict=True))
        return -(-given["H"] // made["H"]), -(-given["W"] // made["W"])
    if op.op in kinds.POOLS:
        size = op.attrs["pool_size"]
        return int(size[0]), int(size[1])
    return 1, 1


def _flops(op: OpNode) -> int:
    if op.op == kinds.EXTERN_CALL:
        return 0
    made = sum(math.prod(t.shape or ()) for t in op.results)
    conv = _conv_facts(op)
    if conv is not None:
        taps = conv.kernel[0] * conv.kernel[1]
        if op.op == kinds.CONV_TRANSPOSE:
            return (
                2 * conv.batch * math.prod(conv.in_size) * conv.in_channels * (conv.out_channels // conv.groups) * taps
            )
        return 2 * made * (conv.in_channels // conv.groups) * taps
    if op.op in kinds.MATMULS and op.operands[0].info.shape:
        return 2 * made * op.operands[0].info.shape[-1]
    return made * math.prod(_window(op))
