"""Layout inference in Python for the duration of a conversion.

`layout_inference()` replaces the inference of every Relax operator and puts TVM's own back afterwards. Without answers
each function is TVM's, guarded: where it raises, asks for a relayout the pass cannot do, or its converted call would
not type-check, the operator keeps its original layout (the pass's default policy) instead of ending the process. With
`answers` a call found there is answered from the assignment, whatever the operator's own inference would say.

The registry is global to the process: conversions must not run concurrently in one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from layoutsearch.layout import kinds
from layoutsearch.layout.graph import axis_names
from layoutsearch.layout.layout import Layout
from layoutsearch.materialize.objects import (
    InferLayout,
    blocks_of,
    inference_of,
    is_leaf,
    leaves,
    set_inference,
)

# TVM permutes their data but not the parameters that go with them: right only while the axes keep their order.
_ORDERED = frozenset({"relax.nn.layer_norm", "relax.nn.rms_norm"})

Answers = Mapping[relax.Call, Any]


@contextmanager
def layout_inference(answers: Answers | None = None) -> Iterator[None]:
    """Install Python layout inference; restores what was registered before, also on error.

    Args:
        answers: `InferLayoutOutput` (or None, the default policy) by original call, recognised by identity. A call
            that is not in `answers`, when they are given, keeps its original layout.
    """
    saved: list[tuple[tvm.ir.Op, InferLayout | None]] = []
    try:
        for name in tvm.ir.Op.list_op_names():
            op = tvm.ir.Op.get(name)
            if not name.startswith(("relax.", kinds.EXTERN_CALL)) or name in _SKIPPED:
                continue
            original = inference_of(op)
            if original is None and answers is None:
                continue
            saved.append((op, original))
            if answers is not None:
                set_inference(op, _from_answers(answers))
            else:
                assert original is not None
                set_inference(op, _guarded(original))
        yield
    finally:
        for op, original in saved:
            set_inference(op, original)


# Operators without tensor results of their own; giving them an inference would change how the pass treats them.
_SKIPPED = frozenset({"relax.call_tir", "relax.call_pure_packed", "relax.call_dps_packed", "relax.call_py_func"})


def _from_answers(answers: Answers) -> InferLayout:
    def infer(call: relax.Call, desired: Any, var_layouts: Any) -> Any:
        return answers.get(call)

    return infer


def _guarded(original: InferLayout) -> InferLayout:
    def infer(call: relax.Call, desired: Any, var_layouts: Any) -> Any:
        try:
            out = original(call, desired, var_layouts)
            if out is None or not _acceptable(call, out, var_layouts):
                return None
        except (RuntimeError, ValueError, TypeError, KeyError, IndexError):
            # Raised through the FFI by checks inside TVM's own inference: the default policy is always possible.
            return None
        return out

    return infer


def _acceptable(call: relax.Call, out: Any, var_layouts: Any) -> bool:
    for arg, layout in zip(call.args, out.input_layouts, strict=False):
        for have, want in zip(current_layouts(var_layouts, arg), leaves(layout), strict=False):
            if not relayout_possible(have, want):
                return False
    if isinstance(call.ty, relax.TupleType) and is_leaf(out.output_layouts[0]):
        return False
    if call.op.name in _ORDERED and not _in_order(call, out):
        return False
    results = zip(_leaf_types(call.ty), leaves(out.output_layouts[0]), strict=False)
    if any(isinstance(t, relax.TensorType) and str(t.dtype) == "bool" and blocks_of(lay or "") for t, lay in results):
        return False
    return _type_checks(call, out)


def _in_order(call: relax.Call, out: Any) -> bool:
    attrs, ndim = out.new_attrs, call.args[0].ty.ndim
    axes = [int(a) % ndim for a in attrs.axes] if attrs is not None else []
    return axes == sorted(axes)


def current_layouts(var_layouts: Any, expr: relax.Expr) -> list[str | None]:
    """Letter strings of the layouts that `expr`'s tensors have at this point of the pass."""
    if isinstance(expr, relax.Var) and expr in var_layouts:
        return list(leaves(var_layouts[expr]))
    if isinstance(expr, relax.Tuple):
        return [x for f in expr.fields for x in current_layouts(var_layouts, f)]
    return [
        axis_names(t.ndim) if isinstance(t, relax.TensorType) and t.ndim >= 0 else None for t in _leaf_types(expr.ty)
    ]


def relayout_possible(have: str | None, want: str | None) -> bool:
    """Whether ConvertLayout can bring a tensor from `have` to `want` in one step."""
    if have == want or not have or not want:
        return True
    if Layout(have).ndim == Layout(want).ndim:
        return blocks_of(have) == blocks_of(want)
    return True


def _leaf_types(ty: Any) -> list[Any]:
    return [t for f in ty.fields for t in _leaf_types(f)] if isinstance(ty, relax.TupleType) else [ty]


def _stored(ty: Any, letters: str | None) -> Any:
    """Type of a tensor once stored as `letters`."""
    if not letters or not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return ty
    layout, primal = Layout(letters), axis_names(ty.ndim)
    if letters == primal:
        return ty
    extents = dict(zip(primal, ty.shape.values, strict=True))
    shape = []
    for axis in layout.axes:
        if axis.is_inner:
            shape.append(axis.factor)
            continue
        extent, block = extents[axis.letter], layout.block(axis.letter)
        if block > 1 and not isinstance(extent, tvm.tirx.IntImm):
            # TVM pads a symbolic extent; nothing can be compared. The search itself freezes such operators.
            return relax.TensorType(dtype=ty.dtype, ndim=layout.ndim)
        if block > 1 and int(extent) % block:
            raise ValueError(f"block {block} does not divide {extent}")
        shape.append(int(extent) // block if block > 1 else extent)
    return relax.TensorType(shape, ty.dtype)


def _type_checks(call: relax.Call, out: Any) -> bool:
    """Rebuild the converted call on fresh variables and compare its type with the converted type of the original."""
    count = itertools.count()

    def fresh(expr: relax.Expr, layouts: Iterator[str | None]) -> relax.Expr:
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([fresh(f, layouts) for f in expr.fields])
        if isinstance(expr.ty, relax.TupleType):
            return relax.Tuple([relax.Var(f"t{next(count)}", _stored(t, next(layouts))) for t in _leaf_types(expr.ty)])
        return relax.Var(f"t{next(count)}", _stored(expr.ty, next(layouts)))

    replaced = {int(k): v for k, v in out.new_args.items()}
    args = []
    for index, arg in enumerate(call.args):
        if index in replaced:
            args.append(replaced[index])
        elif index < len(out.input_layouts) and isinstance(arg.ty, (relax.TensorType, relax.TupleType)):
            args.append(fresh(arg, leaves(out.input_layouts[index])))
        else:
            args.append(arg)
    attrs = out.new_attrs if out.new_attrs is not None else call.attrs
    converted = relax.BlockBuilder().normalize(relax.Call(call.op, args, attrs, call.ty_args))
    wanted = [_stored(t, lay) for t, lay in zip(_leaf_types(call.ty), leaves(out.output_layouts[0]), strict=False)]
    return all(
        not isinstance(got, relax.TensorType) or want.shape is None or tvm_ffi.structural_equal(got.shape, want.shape)
        for got, want in zip(_leaf_types(converted.ty), wanted, strict=False)
    )
