"""Legalisation of Relax operators into TIR for every layout a candidate may name.

TVM's own rules refuse packed conv2d and any conv2d_transpose that is not NCHW/IOHW. Ours cover convolutions, matmul and
layout_transform in all of them; every other operator keeps TVM's rule.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax, te, tirx

from layoutsearch.schedule.compute.conv import conv2d, conv2d_transpose
from layoutsearch.schedule.compute.matmul import matmul

LegalizeFunction = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


def _stock(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """TVM's own rule for the operator."""
    return call.op.get_attr("FLegalize")(bb, call)


def _is_static(*tensors: relax.Expr) -> bool:
    return all(
        isinstance(t.ty, relax.TensorType)
        and t.ty.shape is not None
        and all(isinstance(s, tirx.IntImm) for s in t.ty.shape)
        for t in tensors
    )


def _conv2d(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if not _is_static(*call.args):
        return _stock(bb, call)
    a = call.attrs
    return bb.call_te(
        conv2d,
        call.args[0],
        call.args[1],
        strides=a.strides,
        padding=a.padding,
        dilation=a.dilation,
        groups=int(a.groups),
        data_layout=str(a.data_layout),
        kernel_layout=str(a.kernel_layout),
        out_layout=str(a.out_layout or a.data_layout),
        out_dtype=str(call.ty.dtype),
        primfunc_name_hint="conv2d",
    )


def _conv2d_transpose(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if not _is_static(*call.args):
        return _stock(bb, call)
    a = call.attrs
    return bb.call_te(
        conv2d_transpose,
        call.args[0],
        call.args[1],
        strides=a.strides,
        padding=a.padding,
        output_padding=a.output_padding,
        dilation=a.dilation,
        groups=int(a.groups),
        data_layout=str(a.data_layout),
        kernel_layout=str(a.kernel_layout),
        out_layout=str(a.out_layout or a.data_layout),
        out_dtype=str(call.ty.dtype),
        primfunc_name_hint="conv2d_transpose",
    )


def _matmul(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    a, b = call.args
    # Vectors as operands and an empty reduction stay with TVM's rule.
    if not _is_static(a, b) or len(a.ty.shape) < 2 or len(b.ty.shape) < 2 or int(a.ty.shape[-1]) == 0:
        return _stock(bb, call)
    return bb.call_te(matmul, a, b, out_dtype=str(call.ty.dtype), primfunc_name_hint="matmul")


def _layout_transform(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    (data,) = call.args
    if not _is_static(data):
        return _stock(bb, call)
    index_map, shape = call.attrs.index_map, list(data.ty.shape)
    inverse, padded = index_map.non_surjective_inverse(shape)
    if not (isinstance(padded, tirx.IntImm) and int(padded) == 0):
        return _stock(bb, call)

    def layout_transform(x: te.Tensor) -> te.Tensor:
        return te.compute(
            index_map.map_shape(shape), lambda *i: x(*inverse.map_indices(list(i))), name="layout_transform"
        )

    return bb.call_te(layout_transform, data, primfunc_name_hint="layout_transform")


LEGALIZE_MAP: dict[str, LegalizeFunction] = {
    "relax.nn.conv2d": _conv2d,
    "relax.nn.conv2d_transpose": _conv2d_transpose,
    "relax.matmul": _matmul,
    "relax.layout_transform": _layout_transform,
}
"""Operator name -> rule, for `relax.transform.LegalizeOps`."""


def legalize(mod: tvm.IRModule) -> tvm.IRModule:
    """Turns every operator call of `mod` into a call of a TIR function, in whatever layout its attributes name."""
    return relax.transform.LegalizeOps(LEGALIZE_MAP)(mod)
