"""oneDNN's convolution as a Relax operator of its own, which takes the place of conv2d once layouts are settled.

The operator has conv2d's attributes; its weights are packed, a flat array, and their logical shape is a type argument.
It is registered with TVM from here, and only ever seen between the conversion and the lowering.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import tvm
from tvm import relax, tirx
from tvm.ir import GenericConst

from layoutsearch.contrib.onednn.conv import Conv, why_not
from layoutsearch.contrib.onednn.epilogue import Unsupported, read_epilogue
from layoutsearch.contrib.onednn.kernel import conv_kernel, pack_kernel, with_epilogue
from layoutsearch.contrib.onednn.library import pack
from layoutsearch.layout import kinds
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.layout import Layout

_WEIGHTS = "layoutsearch.onednn_weights"
_PRIORITY = 11


def conv_call(call: relax.Call, data: relax.Expr, weights: relax.Expr, kernel: tuple[int, ...]) -> relax.Call:
    """Conv2d `call` over `data` by packed `weights` of logical shape `kernel`."""
    return relax.Call(
        _operators()[kinds.CONV_EXTERN], [data, weights], call.attrs, [relax.TensorType(kernel, "float32")]
    )


def packed_weights(call: relax.Call, data: relax.Expr, weights: relax.Expr) -> relax.Expr:
    """(O, I / groups, H, W) `weights` of conv2d `call` as oneDNN likes them.

    A constant is packed here; for a variable it is a call.

    Raises:
        ToolchainError: oneDNN is missing, or refuses.
    """
    conv = Conv.of(call.attrs, list(_shape(data)), _shape(weights)).packed()
    if isinstance(weights, GenericConst):
        return relax.const(pack(conv.text, weights.value.numpy()))
    attrs = tvm.ir.make_node("ir.DictAttrs", text=conv.text, elements=conv.chosen.bytes // 4)
    return relax.Call(_operators()[_WEIGHTS], [weights], attrs)


def lower_kernel(function: relax.Function) -> tirx.PrimFunc | None:
    """The fused kernel `function` as TIR, if it is one of oneDNN's; None if not.

    Raises:
        Unsupported: oneDNN has no such epilogue, or nothing but its reference implementation.
    """
    bindings = [b for block in function.body.blocks for b in block.bindings]
    root = bindings[0].value
    if root.op.name == _WEIGHTS:
        return pack_kernel(str(root.attrs["text"]), root.args[0].ty, bindings[-1].var.ty)
    if root.op.name != kinds.CONV_EXTERN:
        return None
    data, weights = root.args
    conv = Conv.of(root.attrs, list(_shape(data)), tuple(int(s) for s in root.ty_args[0].shape.values)).packed()
    epilogue = read_epilogue(bindings, conv.out_layout, conv.out)
    return conv_kernel(conv, epilogue, list(function.params), bindings[-1].var.ty, data, weights)


def why_not_kernel(function: relax.Function, choice: Candidate) -> str | None:
    """Why oneDNN cannot compute a kernel as `choice`, or None where it can.

    Args:
        function: the kernel in its original layouts, conv2d first.
        choice: of the convolution.

    Raises:
        ToolchainError: oneDNN is missing.
    """
    bindings = [b for block in function.body.blocks for b in block.bindings]
    root = bindings[0].value
    kernel = Layout(str(root.attrs.kernel_layout)).logical_shape(_shape(root.args[1]), "OIHW")
    conv = Conv.of(root.attrs, list(_shape(root.args[0])), kernel)
    try:
        if any(b.value.op.name == kinds.PERMUTE for b in bindings):
            raise Unsupported("a transpose")
        epilogue = read_epilogue(bindings, conv.out_layout, conv.out)
        wanted = replace(conv, data_layout=str(choice.data), out_layout=str(choice.out))
        with_epilogue(wanted.packed() if why_not(wanted) is None else wanted, epilogue)
    except Unsupported as reason:
        return f"oneDNN: {reason}"
    return None


@cache
def _operators() -> dict[str, tvm.ir.Op]:
    """The two operators by name, registered on first use."""
    known = set(tvm.ir.Op.list_op_names())
    found = {}
    for name, infer, inputs in ((kinds.CONV_EXTERN, _infer_conv, 2), (_WEIGHTS, _infer_weights, 1)):
        if name not in known:
            tvm.get_global_func("ir.RegisterOp")(name, "")
            for key, value in (("FInferType", infer), ("FLegalize", _never), ("FPurity", True)):
                tvm.ir.register_op_attr(name, key, value, _PRIORITY)
        op = tvm.ir.Op.get(name)
        op.set_num_inputs(inputs)
        found[name] = op
    return found


def _never(_builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Legalisation, by which fusion knows what becomes a kernel: `lower_kernel` comes before it."""
    return call


def _infer_conv(call: relax.Call, _builder: relax.BlockBuilder) -> relax.TensorType:
    conv = Conv.of(call.attrs, list(_shape(call.args[0])), tuple(int(s) for s in call.ty_args[0].shape.values))
    return relax.TensorType(Layout(conv.out_layout).physical_shape(conv.out, "NCHW"), "float32")


def _infer_weights(call: relax.Call, _builder: relax.BlockBuilder) -> relax.TensorType:
    return relax.TensorType((int(call.attrs["elements"]),), "float32")


def _shape(expr: relax.Expr) -> tuple[int, ...]:
    return tuple(int(s) for s in expr.ty.shape.values)
