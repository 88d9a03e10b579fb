"""How much of its operands a kernel has to touch, and how many operations it has to do, at least."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from layoutsearch.layout import kinds
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.facts import ConvFacts, KernelFacts, OperandFacts

_CONVOLUTIONS = frozenset({"conv2d", "conv2d_pointwise", "conv2d_depthwise", "conv2d_grouped"})
_TRANSPOSED = "conv2d_transpose"
_POOLS = frozenset(name.rsplit(".", 1)[-1] for name in kinds.POOLS)
_ADAPTIVE = "adaptive_avg_pool2d"
_RESIZE = kinds.RESIZE.rsplit(".", 1)[-1]
# Where a branch is not taken its operand need not be read.
_ELEMENTWISE = frozenset(name.rsplit(".", 1)[-1] for name in kinds.ELEMENTWISE) - {"where"}
_WHOLE = (
    _ELEMENTWISE
    | {_TRANSPOSED}
    | {name.rsplit(".", 1)[-1] for name in (*kinds.REDUCTIONS, *kinds.SOFTMAX, *kinds.MATMULS, kinds.CONCAT, kinds.PAD)}
)


@dataclass(frozen=True)
class NeededBytes:
    """Bytes that a kernel moves at least: weights (cold), other operands it reads, results it writes."""

    cold: float
    read: float
    written: float


def needed_bytes(facts: KernelFacts) -> NeededBytes:
    """The fewest bytes any schedule touches; of operators that may skip parts of their operands, what they write."""
    if not _is_understood(facts):
        return NeededBytes(0, 0, facts.written_bytes)
    read: float = facts.read_bytes
    if facts.operands and not facts.operands[0].weight:
        read -= (1.0 - _touched_share(facts)) * facts.operands[0].bytes
    return NeededBytes(facts.weight_bytes, read, facts.written_bytes)


def needed_flops(facts: KernelFacts) -> float:
    """The fewest operations of the direct algorithm; 0 where it is not known how many can be skipped.

    A transposed convolution need not do the products that its padding crops.
    """
    if not _is_understood(facts):
        return 0.0
    conv = facts.conv
    if conv is None or facts.kind != _TRANSPOSED:
        return facts.flops
    per_pair = 2 * conv.batch * conv.in_channels * (conv.out_channels // conv.groups)
    counted = per_pair * math.prod(conv.in_size) * math.prod(conv.kernel)
    return max(0, facts.flops - counted) + per_pair * math.prod(_uncropped(conv, axis) for axis in (0, 1))


def winograd_flops(conv: ConvFacts, outputs: int) -> float:
    """Operations of the products of F(m x m, 3 x 3) in whole tiles of m x m outputs, without its transforms."""
    points = outputs + conv.kernel[0] - 1
    tiles = conv.batch * math.prod(-(-extent // outputs) for extent in conv.out_size)
    return 2.0 * tiles * points**2 * conv.in_channels * conv.out_channels


def extra_weight_bytes(facts: KernelFacts, choice: Candidate | None) -> float:
    """Bytes by which the weights of a candidate exceed those of the direct algorithm."""
    conv = facts.conv
    if choice is None or not choice.winograd or conv is None:
        return 0.0
    points = choice.winograd + conv.kernel[0] - 1
    element = facts.operands[0].bytes // math.prod(facts.operands[0].shape)
    return float(element * conv.in_channels * conv.out_channels * (points**2 - math.prod(conv.kernel)))


def _is_understood(facts: KernelFacts) -> bool:
    if not all(op in _ELEMENTWISE for op in facts.epilogue):
        return False
    if facts.kind in _CONVOLUTIONS or facts.kind == _TRANSPOSED:
        return facts.conv is not None
    if facts.kind in _POOLS or facts.kind == _RESIZE:
        return _planes(facts) is not None
    return facts.kind in _WHOLE


def _touched_share(facts: KernelFacts) -> float:
    """Part of the first operand that the root reads."""
    conv = facts.conv
    if conv is not None and facts.kind in _CONVOLUTIONS:
        return math.prod(_conv_touched(conv, axis) / max(1, conv.in_size[axis]) for axis in (0, 1))
    planes = _planes(facts) if facts.kind in _POOLS or facts.kind == _RESIZE else None
    if planes is None:
        return 1.0
    pairs = zip(*planes, facts.window, strict=True)
    if facts.kind == _RESIZE:
        # Upwards every pixel is used; downwards one for each of the result at least.
        return math.prod(min(1.0, made / max(1, given)) for given, made, _ in pairs)
    if facts.kind == _ADAPTIVE:
        return 1.0
    return math.prod(_pool_touched(*pair) / max(1, pair[0]) for pair in pairs)


@lru_cache(maxsize=4096)
def _conv_touched(conv: ConvFacts, axis: int) -> int:
    """Rows (or columns) of the input that some tap reads, if as many as possible of the window lie in the padding."""
    kernel, stride, dilation = conv.kernel[axis], conv.strides[axis], conv.dilation[axis]
    given, made = conv.in_size[axis], conv.out_size[axis]
    distinct = len({q * stride + tap * dilation for q in range(made) for tap in range(kernel)})
    span = (made - 1) * stride + (kernel - 1) * dilation + 1
    padding = max(0, span - given + stride - 1)
    return max(0, min(given, distinct - padding))


def _pool_touched(given: int, made: int, window: int) -> int:
    """Likewise for a pool, whose stride and padding are not known, whatever they are."""
    padding = 2 * (window - 1)
    least = [given]
    if made * window <= given + padding:  # a stride of the window or more
        least.append(made * window - padding)
    if window > 1:  # a smaller stride: no gaps, and less than a stride is left over at the end
        stride = window - 1 if made == 1 else min(window - 1, (given + padding - window) // (made - 1))
        least.append(given - stride + 1)
    return max(0, min(least))


def _uncropped(conv: ConvFacts, axis: int) -> int:
    """(input, tap) pairs of one axis of a transposed convolution whose product lands in the result."""
    kernel, stride, dilation = conv.kernel[axis], conv.strides[axis], conv.dilation[axis]
    given = conv.in_size[axis]
    cropped = max(0, (given - 1) * stride + (kernel - 1) * dilation + 1 - conv.out_size[axis])
    at_once = -(-kernel // stride) if dilation == 1 else kernel
    return max(0, given * kernel - cropped * at_once)


def _planes(facts: KernelFacts) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """(height, width) of the first operand and of the first result; None without such axes."""
    if not facts.operands or not facts.results:
        return None
    given, made = _plane(facts.operands[0]), _plane(facts.results[0])
    return (given, made) if given and made else None


def _plane(tensor: OperandFacts) -> tuple[int, int] | None:
    if len(tensor.axes) != len(tensor.shape) or not {"H", "W"} <= set(tensor.axes):
        return None
    extents = dict(zip(tensor.axes, tensor.shape, strict=True))
    return extents["H"], extents["W"]
