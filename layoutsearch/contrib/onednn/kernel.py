"""Kernels of oneDNN as TIR: functions that call the runtime with a text and pointers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm import relax, tirx
from tvm.ir import StringImm
from tvm.tirx.op import buffer_data

from layoutsearch.contrib.onednn.conv import Conv, why_not
from layoutsearch.contrib.onednn.epilogue import Epilogue, Post, Unsupported
from layoutsearch.schedule.builder import finish
from layoutsearch.schedule.dispatch import EXTERN

NAME = "onednn"
_CONVOLVE, _PACK = "layoutsearch_onednn_conv", "layoutsearch_onednn_pack"
# Operands that the runtime takes at most: data, weights, bias, result, and others.
_POINTERS = 8


def conv_kernel(
    conv: Conv,
    epilogue: Epilogue,
    params: Sequence[relax.Var],
    result: relax.TensorType,
    data: relax.Var,
    weights: relax.Var,
) -> tirx.PrimFunc:
    """The kernel of a convolution with its epilogue.

    Args:
        conv: the convolution alone, its weights packed.
        epilogue: what follows; its operands are among `params`.
        params: of the kernel, in order; the function takes them, then the result.
        result: type of what it makes.
        data, weights: those of the convolution, among `params`.

    Raises:
        Unsupported: oneDNN has no such epilogue, or nothing but its reference implementation.
    """
    whole, epilogue = with_epilogue(conv, epilogue)
    buffers = {p: _buffer(p.name, p.ty) for p in params}
    out = _buffer("out", result)
    operands = [buffer_data(buffers[p]) for p in (data, weights, *epilogue.operands)]
    operands.append(buffer_data(out))
    if len(operands) > _POINTERS:
        raise Unsupported(f"{len(operands)} operands")
    none = tirx.reinterpret("handle", tirx.const(0, "uint64"))
    pointers = [*operands, *[none] * (_POINTERS - len(operands))]
    return _calling([*buffers.values(), out], _CONVOLVE, whole.text, len(operands), *pointers)


def with_epilogue(conv: Conv, epilogue: Epilogue) -> tuple[Conv, Epilogue]:
    """The convolution with what follows it, and that as oneDNN does it.

    Raises:
        Unsupported: oneDNN does not compute it, or has nothing but its reference implementation.
    """
    reason = why_not(conv)
    if reason is not None:
        raise Unsupported(reason)
    for posts in (epilogue.posts, tuple(map(_in_place, epilogue.posts))):
        # Where operands cannot be read as they are added, one may lie in the result beforehand.
        if sum(p.word == "sum" for p in posts) > 1:
            continue
        whole = replace(conv, bias=epilogue.bias is not None, post=tuple(p.text for p in posts))
        if not whole.chosen.is_reference:
            return whole, Epilogue(epilogue.bias, posts)
    raise Unsupported(f"oneDNN has no fast implementation of it with {' '.join(p.text for p in epilogue.posts)}")


def _in_place(post: Post) -> Post:
    return Post("sum", (), post.operand) if post.word == "add" and post.shape == "f" else post


def pack_kernel(text: str, weights: relax.TensorType, packed: relax.TensorType) -> tirx.PrimFunc:
    """The function that packs weights, (O, I / groups, H, W), for the convolution of `text`."""
    source, target = _buffer("weights", weights), _buffer("packed", packed)
    return _calling([source, target], _PACK, text, buffer_data(source), buffer_data(target))


def _buffer(name: str, ty: relax.TensorType) -> tirx.Buffer:
    return tirx.decl_buffer([int(s) for s in ty.shape.values], str(ty.dtype), name)


def _calling(params: Sequence[tirx.Buffer], symbol: str, *arguments: object) -> tirx.PrimFunc:
    """A function that calls the runtime, and fails where that does."""
    done = tirx.call_extern("int32", symbol, *arguments)
    says = StringImm(f"{symbol} failed; standard error says why")
    body = tirx.AssertStmt(done == 0, StringImm("RuntimeError"), [says])
    return finish(tirx.PrimFunc(list(params), body), [], [body]).with_attr(EXTERN, NAME)
