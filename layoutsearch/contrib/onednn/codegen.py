"""The Relax code generator `relax.ext.onednn`: external functions of one convolution, with what is fused behind it.

module = partition(module)                       # convolutions become external functions
module = declare_layouts(module, declaration)    # in the layouts that oneDNN likes
tvm.compile(..., relax_pipeline=layoutsearch.pipeline(plan)).export_library(path, **export_options())
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax.dpl import is_op, wildcard
from tvm.relax.dpl.pattern import DFPattern

from layoutsearch.contrib.onednn.conv import TAGS, Conv, kernel_of_tag, tag_of_kernel, why_not
from layoutsearch.contrib.onednn.epilogue import Epilogue, Unsupported, read_epilogue
from layoutsearch.contrib.onednn.kernel import conv_kernel, with_epilogue
from layoutsearch.contrib.onednn.library import link_input
from layoutsearch.errors import ModelError
from layoutsearch.layout import kinds
from layoutsearch.layout.declare import chosen_by

NAME = "onednn"
_COMPOSITE = f"{NAME}.conv2d"


def patterns() -> list[tuple]:
    """Patterns for `FuseOpsByPattern`, longest first: conv2d, + bias, + sum, + relu."""
    return [_pattern(adds, relu) for adds in (2, 1, 0) for relu in (True, False)]


def _pattern(adds: int, relu: bool) -> tuple[str, DFPattern, dict[str, DFPattern], Callable[..., bool]]:
    found = conv = is_op(kinds.CONV)(wildcard(), wildcard())
    operands = [wildcard() for _ in range(adds)]
    for operand in operands:
        found = is_op("relax.add")(found, operand)
    found = is_op("relax.nn.relu")(found) if relu else found
    return _COMPOSITE, found, {"conv": conv, **{f"operand{i}": o for i, o in enumerate(operands)}}, _fits


def _fits(context: Any) -> bool:
    """Whether oneDNN computes a match: float32 of known shapes, operands of the result's shape or one a channel."""
    parts = {str(k): v for k, v in context.annotated_expr.items()}
    conv = parts.pop("conv")
    tensors = [conv, *conv.args, *parts.values()]
    if any(not is_static(t.ty) or str(t.ty.dtype) != "float32" for t in tensors):
        return False
    attrs, out = conv.attrs, shape_of(conv)
    if (str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout or "NCHW")) != ("NCHW", "OIHW", "NCHW"):
        return False
    return all(shape_of(operand) in (out, (1, out[1], 1, 1)) for operand in parts.values())


def is_static(ty: relax.Type) -> bool:
    """Whether a type is a tensor's with constant extents."""
    shape = ty.shape if isinstance(ty, relax.TensorType) else None
    return isinstance(shape, relax.ShapeExpr) and all(isinstance(s, tirx.IntImm) for s in shape.values)


def shape_of(expr: relax.Expr) -> tuple[int, ...]:
    """Shape of a tensor."""
    return tuple(int(s) for s in expr.ty.shape.values)


def partition(module: tvm.IRModule) -> tvm.IRModule:
    """The module with its float32 convolutions as external functions, each by itself with what is fused behind it."""
    return relax.transform.FuseOpsByPattern(patterns(), bind_constants=False, annotate_codegen=True)(module)


@dataclass(frozen=True)
class _External:
    """An external function taken apart.

    Attributes:
        conv: the convolution in its original layouts.
        epilogue: what follows it, on parameters of the function.
        data, weights: parameters of the function.
    """

    conv: Conv
    epilogue: Epilogue
    data: relax.Var
    weights: relax.Var


def _external(function: relax.Function) -> _External:
    """Raises Unsupported for anything but a convolution with an epilogue."""
    env: dict[relax.Var, relax.Expr] = {}
    bindings: list[relax.Binding] = []
    _collect(function.body, env, bindings)

    def behind(expr: relax.Expr) -> relax.Var:
        while expr in env:
            expr = env[expr]
        if expr not in set(function.params):
            raise Unsupported("an operand that is no parameter")
        return expr

    if not bindings or bindings[0].value.op.name != kinds.CONV:
        raise Unsupported("no convolution in it")
    root = bindings[0].value
    conv = Conv.of(root.attrs, list(shape_of(root.args[0])), shape_of(root.args[1]))
    read = read_epilogue(bindings, conv.out_layout, conv.out)
    posts = tuple(replace(p, operand=behind(p.operand)) if p.operand is not None else p for p in read.posts)
    epilogue = Epilogue(behind(read.bias) if read.bias is not None else None, posts)
    return _External(conv, epilogue, behind(root.args[0]), behind(root.args[1]))


def _collect(body: relax.SeqExpr, env: dict[relax.Var, relax.Expr], found: list[relax.Binding]) -> relax.Expr:
    """Operators in order, those of functions within included; `env` has what other variables stand for."""
    functions: dict[relax.Var, relax.Function] = {}
    for block in body.blocks:
        for binding in block.bindings:
            var, value = binding.var, binding.value
            if isinstance(value, relax.Function):
                functions[var] = value
            elif isinstance(value, relax.Var):
                env[var] = value
            elif isinstance(value, relax.Call) and value.op in functions:
                inner = functions[value.op]
                env.update(zip(inner.params, value.args, strict=True))
                env[var] = _collect(inner.body, env, found)
            elif isinstance(value, relax.Call) and value.op.name in (kinds.TRANSFORM, kinds.PERMUTE):
                # Between the parameters as they are stored and what they are: the attribute says the same.
                env[var] = value.args[0]
            elif isinstance(value, relax.Call):
                found.append(binding)
            else:
                raise Unsupported(f"a {type(value).__name__}")
    return body.body


def declaration(function: relax.Function) -> list[dict[str, Any]] | None:
    """For `declare_layouts`: every layout in which oneDNN has a fast implementation of `function`.

    Weights are declared as oneDNN likes them wherever TVM has that layout: constants are then packed when compiled.
    """
    if str(function.attrs["Codegen"]) != NAME:
        return None
    external = _external(function)
    found = []
    for layout in TAGS:
        conv = replace(external.conv, data_layout=layout, out_layout=layout)
        if why_not(conv) is not None:
            continue
        try:
            with_epilogue(conv.packed(), external.epilogue)
        except Unsupported:
            continue
        whole = {p.operand for p in external.epilogue.posts if p.shape == "f"}
        kernel = kernel_of_tag(conv.packed().weights, conv)
        rest = [layout if p in whole else None for p in function.params[2:]]
        found.append({"sources": [layout], "weights": [kernel, *rest], "destination": layout})
    return found or None


@tvm_ffi.register_global_func(f"relax.ext.{NAME}", override=True)
def generate(functions: Sequence[relax.Function], _options: Any, _names: Any) -> list[Any]:
    """A runtime module with all functions; called by TVM's `RunCodegen`.

    Raises:
        ModelError: oneDNN does not compute a function.
    """
    prims = {}
    for function in functions:
        name = str(function.attrs["global_symbol"])
        try:
            prims[name] = _kernel(function).with_attr("global_symbol", name)
        except Unsupported as reason:
            raise ModelError(f"external function {name}: oneDNN: {reason}") from None
    target = tvm.target.Target.current(allow_none=True) or tvm.target.Target("llvm")
    return [tvm.compile(tvm.IRModule(prims), target).mod]


def _kernel(function: relax.Function) -> tirx.PrimFunc:
    external, choice = _external(function), chosen_by(function)
    params = list(function.params)
    data, weights = params.index(external.data), params.index(external.weights)
    source, kernel = (str(choice.param(i) or order) for i, order in ((data, "NCHW"), (weights, "OIHW")))
    destination = str(choice.destination or "NCHW")
    for post in external.epilogue.posts:
        if post.shape == "f" and str(choice.param(params.index(post.operand)) or "NCHW") != destination:
            raise Unsupported(f"parameter {params.index(post.operand)} is not declared {destination} as the result is")
    conv = replace(external.conv, data_layout=source, out_layout=destination)
    tag = tag_of_kernel(kernel, conv)
    if tag is None:
        raise Unsupported(f"weights in {kernel}")
    if why_not(conv) is not None:
        raise Unsupported(str(why_not(conv)))
    best = conv.packed()
    # Weights that nobody brought into oneDNN's layout are packed in every call.
    conv = replace(conv, weights=tag) if tag == best.weights else replace(best, given=tag)
    return conv_kernel(conv, external.epilogue, params, function.ret_ty, external.data, external.weights)


def export_options(target: Any = "llvm") -> dict[str, list[str]]:
    """Arguments of `export_library` for an executable with oneDNN's functions.

    Raises:
        ToolchainError: oneDNN or a C compiler is missing.
    """
    extra = link_input(tvm.target.Target(target))
    return {"addons": list(extra.files), "options": list(extra.options)}
