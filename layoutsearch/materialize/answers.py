"""What layout inference answers for a call whose choice is known: operand and result layouts, rewritten attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tvm
from tvm import relax

from layoutsearch.layout import kinds
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.graph import OpNode
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.rules import operand_layouts, result_layouts
from layoutsearch.materialize.externs import proxy_attrs
from layoutsearch.materialize.objects import infer_output


def answer(call: relax.Call, op: OpNode, choice: Candidate) -> Any:
    """The `InferLayoutOutput` that makes ConvertLayout run `call` exactly as `choice` says."""
    wanted = iter(
        layout.over_letters(o.info.axes) if layout is not None else o.info.axes
        for layout, o in zip(operand_layouts(op, choice), op.operands, strict=True)
    )
    inputs = [_nest(arg.ty, wanted) for arg in call.args if _is_tensor(arg.ty)]
    made = iter(
        layout.over_letters(t.axes) if layout is not None else t.axes
        for layout, t in zip(result_layouts(op, choice), op.results, strict=True)
    )
    outputs = [_nest(call.ty, made)]
    if op.op == kinds.EXTERN_CALL:
        return infer_output(inputs, outputs, proxy_attrs(call, op, result_layouts(op, choice)[0]))
    rewrite = _REWRITES.get(op.op)
    changed, new_args = rewrite(call, op, choice) if rewrite is not None else ({}, {})
    return infer_output(inputs, outputs, _with(call.attrs, changed), new_args)


def view_answer(call: relax.Call, source: str, target: str, layout: Layout) -> Any:
    """The answer for a transpose that is a view: the same memory under the axis names of its two sides."""
    attrs = _with(call.attrs, {"axes": list(range(layout.ndim))})
    return infer_output([layout.over_letters(source)], [layout.over_letters(target)], attrs)


def _is_tensor(ty: Any) -> bool:
    if isinstance(ty, relax.TupleType):
        return all(_is_tensor(f) for f in ty.fields) and len(ty.fields) > 0
    return isinstance(ty, relax.TensorType)


def _nest(ty: Any, layouts: Any) -> Any:
    if isinstance(ty, relax.TupleType):
        return [_nest(f, layouts) for f in ty.fields]
    return next(layouts)


def _with(attrs: Any, changed: Mapping[str, Any]) -> Any:
    """A copy of `attrs` with some fields changed; the object itself when nothing changes."""
    if not changed:
        return attrs
    fields = {f.name: getattr(attrs, f.name) for f in type(attrs).__tvm_ffi_type_info__.fields}
    key = type(attrs).__tvm_ffi_type_info__.type_key
    return tvm.ir.make_node(key, **{**fields, **changed})


def physical_axes(layout: Layout, axis: str) -> list[int]:
    """Positions in memory order of a primal axis and its inner block."""
    return [i for i, a in enumerate(layout.axes) if a.letter.upper() == axis]


Rewrite = Callable[[relax.Call, OpNode, Candidate], tuple[dict[str, Any], dict[int, Any]]]


def _conv(call: relax.Call, op: OpNode, choice: Candidate) -> tuple[dict[str, Any], dict[int, Any]]:
    layouts = {"data_layout": str(choice.data), "kernel_layout": str(choice.kernel), "out_layout": str(choice.out)}
    return layouts, {}


def _pool(call: relax.Call, op: OpNode, choice: Candidate) -> tuple[dict[str, Any], dict[int, Any]]:
    return {"layout": str(choice.data), "out_layout": str(choice.out)}, {}


def _resize(call: relax.Call, op: OpNode, choice: Candidate) -> tuple[dict[str, Any], dict[int, Any]]:
    return {"layout": str(choice.data)}, {}


def _one_axis(call: relax.Call, op: OpNode, choice: Candidate) -> tuple[dict[str, Any], dict[int, Any]]:
    axes = op.result.axes
    position = physical_axes(choice.data, axes[op.attrs["axis"] % len(axes)])[0]
    return {"axis": position}, {}


def _split(call: relax.Call, op: OpNode, choice: Candidate) -> tuple[dict[str, Any], dict[int, Any]]:
    changed, _ = _one_axis(call, op, choice)
    axis = op.result.axes[op.attrs["axis"] % len(op.result.axes)]
    sections = op.attrs["indices_or_sections"]
    if choice.data.block(axis) > 1 and not isinstance(sections, int):
        block = choice.data.block(axis)
        changed["indices_or_sections"] = [tvm.tirx.IntImm("int64", i // block) for i in sections]
    return changed, {}


def _reduction(call: relax.Call, op: OpNode, choice: Candidate) -> tuple[dict[str, Any], dict[int, Any]]:
    axes = op.operands[0].info.axes
    reduced = op.attrs["axis"] if op.attrs["axis"] is not None else range(len(axes))
    if len(axes) != 4:
        return {}, {}
    return {"axis": sorted(p for a in reduced for p in physical_axes(choice.data, axes[a % len(axes)]))}, {}


def _pad(call: relax.Call, op: OpNode, choice: Candidate) -> tuple[dict[str, Any], dict[int, Any]]:
    flat = op.attrs["pad_width"]
    width = {axis: (flat[2 * i], flat[2 * i + 1]) for i, axis in enumerate(op.result.axes)}
    widths = [w for a in choice.data.axes for w in ((0, 0) if a.is_inner else width[a.letter])]
    return {"pad_width": widths}, {}


def _slice(call: relax.Call, op: OpNode, choice: Candidate) -> tuple[dict[str, Any], dict[int, Any]]:
    names = op.result.axes
    positions = [physical_axes(choice.data, names[a % len(names)])[0] for a in op.attrs["axes"]]
    return {}, {1: relax.Tuple([tvm.tirx.IntImm("int64", p) for p in positions])}


_REWRITES: Mapping[str, Rewrite] = {
    **dict.fromkeys(kinds.CONVOLUTIONS, _conv),
    **dict.fromkeys(kinds.POOLS, _pool),
    kinds.RESIZE: _resize,
    kinds.CONCAT: _one_axis,
    **dict.fromkeys(kinds.SOFTMAX, _one_axis),
    kinds.SPLIT: _split,
    **dict.fromkeys(kinds.REDUCTIONS, _reduction),
    kinds.PAD: _pad,
    kinds.SLICE: _slice,
}
