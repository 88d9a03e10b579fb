"""Which operators of a model a rule is about: the keys of its `match` table."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

from layoutsearch.layout import kinds
from layoutsearch.layout.graph import ConvInfo, LayoutGraph, OpNode, conv_info

_RANGE = {
    "anyOf": [
        {"type": "integer"},
        {
            "type": "object",
            "properties": {"min": {"type": "integer"}, "max": {"type": "integer"}},
            "additionalProperties": False,
        },
    ]
}
_PAIR = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_TEXT = {"type": "string"}
_YES_OR_NO = {"type": "boolean"}

MATCH_SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "op": _TEXT,
        "kind": _TEXT,
        "id": _TEXT,
        "name": _TEXT,
        "dtype": _TEXT,
        "depthwise": _YES_OR_NO,
        "pointwise": _YES_OR_NO,
        "grouped": _YES_OR_NO,
        "dense": _YES_OR_NO,
        "kernel": _PAIR,
        "stride": _PAIR,
        "dilation": _PAIR,
        "in_channels": _RANGE,
        "out_channels": _RANGE,
        "position": {"enum": ["first", "last"]},
    },
}


def matching(graph: LayoutGraph, match: Mapping[str, Any]) -> frozenset[str]:
    """Bound variables of the operators that all keys of `match` describe.

    `position` picks the first or last, in program order, of those that the other keys describe.
    """
    tests = [(_MATCHERS[key], wanted) for key, wanted in match.items() if key != "position"]
    found = [op.name for op in graph.ops if all(test(op, wanted) for test, wanted in tests)]
    if "position" in match:
        found = found[:1] if match["position"] == "first" else found[-1:]
    return frozenset(found)


def channels_of(op: OpNode) -> tuple[int, int]:
    """Channels that an operator reads and makes; 1 where an axis C has no part in it."""
    if op.op in kinds.CONVOLUTIONS:
        info = conv_info(op)
        return info.in_channels, info.out_channels
    extents = dict(zip(op.result.axes, op.result.shape or (), strict=False))
    channels = extents.get("C", 1)
    if op.op in kinds.REDUCTIONS:
        operand = op.operands[0].info
        channels = dict(zip(operand.axes, operand.shape or (), strict=False)).get("C", 1)
    return channels, channels


def named(pattern: str, *names: str) -> bool:
    """Whether a pattern (`*` and `?`) is of one of the names, such as an operator's id and its bound variable."""
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def _conv(test: Callable[[ConvInfo, Any], bool]) -> Callable[[OpNode, Any], bool]:
    """A test of a convolution's geometry; false for every other operator."""
    return lambda op, wanted: _has_geometry(op) and test(conv_info(op), wanted)


def _has_geometry(op: OpNode) -> bool:
    """Whether it is a convolution of static shapes that the model does not block already."""
    if op.op not in kinds.CONVOLUTIONS:
        return False
    tensors = (op.operands[0].info, op.operands[1].info, op.result)
    return all(t.shape is not None and len(t.axes) == 4 and {"H", "W"} <= set(t.axes) for t in tensors)


def _window(name: str, attribute: str) -> Callable[[OpNode, Any], bool]:
    """A test of a pair that convolutions and pools with a window have."""

    def test(op: OpNode, wanted: Any) -> bool:
        if op.op in kinds.POOLS:
            return attribute in op.attrs and tuple(op.attrs[attribute]) == tuple(wanted)
        return _has_geometry(op) and getattr(conv_info(op), name) == tuple(wanted)

    return test


def _channels(side: int) -> Callable[[OpNode, Any], bool]:
    """A test of the channels of convolutions and pools."""

    def test(op: OpNode, wanted: Any) -> bool:
        if op.op in kinds.POOLS:
            return op.result.shape is not None and _in_range(channels_of(op)[side], wanted)
        return _has_geometry(op) and _in_range(channels_of(op)[side], wanted)

    return test


def _in_range(value: int, wanted: Any) -> bool:
    if isinstance(wanted, int):
        return value == wanted
    return wanted.get("min", value) <= value <= wanted.get("max", value)


def _dtype(op: OpNode) -> str:
    """Element type of what is read first; of the result where nothing is."""
    return op.operands[0].info.dtype if op.operands else op.result.dtype


_MATCHERS: Mapping[str, Callable[[OpNode, Any], bool]] = {
    "op": lambda op, wanted: op.op in (wanted, f"relax.{wanted}"),
    "kind": lambda op, wanted: op.kind == wanted,
    "id": lambda op, wanted: fnmatch.fnmatchcase(op.id, wanted),
    "name": lambda op, wanted: named(wanted, op.id, op.name),
    "dtype": lambda op, wanted: _dtype(op) == wanted,
    "depthwise": _conv(lambda c, wanted: c.depthwise == wanted),
    "pointwise": _conv(lambda c, wanted: (c.kernel == (1, 1) and c.groups == 1) == wanted),
    "grouped": _conv(lambda c, wanted: (c.groups > 1 and not c.depthwise) == wanted),
    "dense": _conv(lambda c, wanted: (c.groups == 1 and c.kernel != (1, 1)) == wanted),
    "kernel": _window("kernel", "pool_size"),
    "stride": _window("strides", "strides"),
    "dilation": _window("dilation", "dilation"),
    "in_channels": _channels(0),
    "out_channels": _channels(1),
}
