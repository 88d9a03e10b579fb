"""Layout changes of a tensor: as index arithmetic, as Relax calls, and applied to constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from layoutsearch.layout import kinds
from layoutsearch.layout.layout import Layout


def logical_index(layout: Layout, index: Sequence[Any]) -> dict[str, Any]:
    """Logical coordinate of each primal axis from a physical index (ints or expressions)."""
    found: dict[str, Any] = {}
    for position, axis in zip(index, layout.axes, strict=True):
        letter = axis.letter.upper()
        block = layout.block(letter)
        part = position if axis.is_inner or block == 1 else position * block
        if axis.is_inner and axis.factor == 1:
            continue
        found[letter] = found[letter] + part if letter in found else part
    return found


def physical_index(layout: Layout, logical: dict[str, Any]) -> list[Any]:
    """Physical index of a logical coordinate."""
    out: list[Any] = []
    for axis in layout.axes:
        value, block = logical[axis.letter.upper()], layout.block(axis.letter)
        if block == 1:
            out.append(0 if axis.is_inner else value)
        else:
            out.append(value % block if axis.is_inner else value // block)
    return out


def move(expr: relax.Expr, source: Layout, target: Layout) -> relax.Call:
    """The call that brings `expr`, stored as `source`, to `target` (two layouts over the same axis names)."""
    if not source.is_blocked and not target.is_blocked and source.ndim == target.ndim:
        return relax.op.permute_dims(expr, [source.name.index(a) for a in target.name])

    def forward(*index: Any) -> list[Any]:
        found = physical_index(target, logical_index(source, index))
        return [tvm.tirx.IntImm("int32", i) if isinstance(i, int) else i for i in found]

    simplified = _simplify(tvm.tirx.IndexMap.from_func(forward, ndim=source.ndim), expr)
    return relax.op.layout_transform(expr, simplified)


def _simplify(index_map: tvm.tirx.IndexMap, expr: relax.Expr) -> tvm.tirx.IndexMap:
    """Simplify index expressions with the ranges of `expr`'s shape, so that 8c to 16c is a plain re-tiling."""
    analyzer = tvm.sym.Analyzer()
    for var, extent in zip(index_map.initial_indices, expr.ty.shape.values, strict=True):
        analyzer.bind(var, tvm.ir.Range(0, tvm.tirx.IntImm("int32", int(extent))))
    final = [analyzer.simplify(i) for i in index_map.final_indices]
    return tvm.tirx.IndexMap(index_map.initial_indices, final, None)


def move_array(array: np.ndarray, source: Layout, target: Layout) -> np.ndarray:
    """`move` for a constant, contiguous in its new layout."""
    primal = source.primal
    logical = _to_logical(array, source)
    extents = dict(zip(primal, logical.shape, strict=True))
    shape: list[int] = []
    where: dict[str, int] = {}
    for letter in primal:
        block = target.block(letter)
        where[letter] = len(shape)
        shape.append(extents[letter] // block)
        where[letter.lower()] = len(shape)
        shape.append(block)
    split = logical.reshape(shape)
    order = [where[a.letter] for a in target.axes]
    order += [where[a.lower()] for a in primal if a.lower() not in {x.letter for x in target.axes}]
    moved = split.transpose(order)
    return np.ascontiguousarray(moved.reshape(moved.shape[: target.ndim]))


def _to_logical(array: np.ndarray, layout: Layout) -> np.ndarray:
    letters = [a.letter for a in layout.axes]
    order, shape = [], []
    for letter in layout.primal:
        order.append(letters.index(letter))
        extent = array.shape[letters.index(letter)]
        if letter.lower() in letters:
            order.append(letters.index(letter.lower()))
            extent *= array.shape[letters.index(letter.lower())]
        shape.append(extent)
    return array.transpose(order).reshape(shape)


def is_move(expr: relax.Expr) -> bool:
    """Whether an expression is a layout change (either of TVM's two operators)."""
    return (
        isinstance(expr, relax.Call)
        and isinstance(expr.op, tvm.ir.Op)
        and expr.op.name in (kinds.TRANSFORM, kinds.PERMUTE)
    )


def moved_index(call: relax.Call, index: Sequence[int]) -> list[int]:
    """Where the element at a physical index of `call`'s operand lands in its result."""
    if call.op.name == kinds.PERMUTE:
        axes = call.attrs.axes
        order = [int(a) for a in axes] if axes is not None else list(reversed(range(len(index))))
        return [index[a] for a in order]
    result = call.attrs.index_map.map_indices([tvm.tirx.IntImm("int32", i) for i in index])
    return [int(tvm.sym.Analyzer().simplify(i)) for i in result]
