"""Winograd's convolution as a Relax operator of its own, which takes the place of conv2d once layouts are settled.

The operator has conv2d's attributes; its weights are transformed, (O, I, m + 2, m + 2) in the kernel layout. It is
registered with TVM from here, and only ever seen between the conversion and legalisation.
"""

from __future__ import annotations

from functools import cache

import tvm
from tvm import relax

from layoutsearch.layout import kinds
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.layout import Layout
from layoutsearch.materialize.moves import move_array
from layoutsearch.schedule.compute.conv import conv2d_out_extent
from layoutsearch.schedule.compute.winograd import conv2d_winograd, winograd_weights
from layoutsearch.schedule.winograd import KERNEL, minimal, transform_weights

_WEIGHTS = "layoutsearch.winograd_weights"
_PRIORITY = 11


def winograd_call(call: relax.Call, data: relax.Expr, weights: relax.Expr) -> relax.Call:
    """Conv2d `call` over `data` by transformed `weights`."""
    return relax.Call(_operators()[kinds.CONV_WINOGRAD], [data, weights], call.attrs)


def transformed_weights(kernel: relax.Expr, choice: Candidate) -> relax.Expr:
    """The weights of `choice` from those of the direct convolution, (O, I, 3, 3) in the kernel layout of `choice`.

    A constant is transformed here, in float64; for a variable it is a call.
    """
    assert choice.kernel is not None
    if not isinstance(kernel, tvm.ir.GenericConst):
        attrs = tvm.ir.make_node("ir.DictAttrs", layout=str(choice.kernel), outputs=choice.winograd)
        return relax.Call(_operators()[_WEIGHTS], [kernel], attrs)
    logical = Layout("OIHW")
    direct = move_array(kernel.value.numpy(), choice.kernel, logical)
    return relax.const(move_array(transform_weights(direct, choice.winograd), logical, choice.kernel))


@cache
def _operators() -> dict[str, tvm.ir.Op]:
    """The two operators by name, registered on first use."""
    known = set(tvm.ir.Op.list_op_names())
    found = {}
    for name, infer, legalize, inputs in (
        (kinds.CONV_WINOGRAD, _infer_conv, legalize_conv, 2),
        (_WEIGHTS, _infer_weights, legalize_weights, 1),
    ):
        if name not in known:
            tvm.get_global_func("ir.RegisterOp")(name, "")
            for key, value in (("FInferType", infer), ("FLegalize", legalize), ("FPurity", True)):
                tvm.ir.register_op_attr(name, key, value, _PRIORITY)
        op = tvm.ir.Op.get(name)
        op.set_num_inputs(inputs)
        found[name] = op
    return found


def _shape(expr: relax.Expr) -> list[int]:
    return [int(s) for s in expr.ty.shape.values]


def _infer_conv(call: relax.Call, _builder: relax.BlockBuilder) -> relax.TensorType:
    data, kernel, out = (Layout(str(getattr(call.attrs, f"{n}_layout"))) for n in ("data", "kernel", "out"))
    n, _, h, w = data.logical_shape(_shape(call.args[0]), "NCHW")
    o, *_ = kernel.logical_shape(_shape(call.args[1]), "OIHW")
    top, left, bottom, right = (int(p) for p in call.attrs.padding)
    oh = conv2d_out_extent(h, KERNEL, 1, top + bottom, 1)
    ow = conv2d_out_extent(w, KERNEL, 1, left + right, 1)
    return relax.TensorType(out.physical_shape((n, o, oh, ow), "NCHW"), str(call.args[0].ty.dtype))


def _infer_weights(call: relax.Call, _builder: relax.BlockBuilder) -> relax.TensorType:
    layout, points = Layout(str(call.attrs["layout"])), minimal(int(call.attrs["outputs"])).points
    o, i, _, _ = layout.logical_shape(_shape(call.args[0]), "OIHW")
    return relax.TensorType(layout.physical_shape((o, i, points, points), "OIHW"), str(call.args[0].ty.dtype))


def legalize_conv(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """`call_te` of the convolution."""
    a = call.attrs
    return bb.call_te(
        conv2d_winograd,
        call.args[0],
        call.args[1],
        padding=a.padding,
        data_layout=str(a.data_layout),
        kernel_layout=str(a.kernel_layout),
        out_layout=str(a.out_layout or a.data_layout),
        out_dtype=str(call.ty.dtype),
        primfunc_name_hint="conv2d_winograd",
    )


def legalize_weights(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """`call_te` of the weights' transform."""
    return bb.call_te(
        winograd_weights,
        call.args[0],
        kernel_layout=str(call.attrs["layout"]),
        outputs=int(call.attrs["outputs"]),
        primfunc_name_hint="winograd_weights",
    )
