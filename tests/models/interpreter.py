"""Runs a Relax `main` in NumPy, in whatever layouts it is: cheap enough to check hundreds of converted modules.

What a layout attribute tells (convolutions, pools, resize) is brought to NCHW and computed there by TVM's own kernel,
compiled once for each shape; everything else runs on the arrays as they are stored, so a wrong axis shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from layoutsearch.layout.layout import Layout
from layoutsearch.schedule.winograd import minimal

Array = np.ndarray
Value = Any


def interpret(module: tvm.IRModule, inputs: Sequence[Array]) -> list[Array]:
    """Outputs of `main`, flattened."""
    main = module["main"]
    env: dict[relax.Var, Value] = dict(zip(main.params, inputs, strict=True))
    for block in main.body.blocks:
        for binding in block.bindings:
            env[binding.var] = _value(binding.value, env)
    return _flat(_value(main.body.body, env))


def _flat(value: Value) -> list[Array]:
    return [a for v in value for a in _flat(v)] if isinstance(value, tuple) else [value]


def _value(expr: relax.Expr, env: Mapping[relax.Var, Value]) -> Value:
    if isinstance(expr, relax.Var):
        return env[expr]
    if isinstance(expr, tvm.ir.GenericConst):
        return expr.value.numpy()
    if isinstance(expr, relax.Tuple):
        return tuple(_value(f, env) for f in expr.fields)
    if isinstance(expr, relax.TupleGetItem):
        return _value(expr.tuple_value, env)[expr.index]
    if isinstance(expr, relax.ShapeExpr):
        return tuple(int(v) for v in expr.values)
    if isinstance(expr, (tirx.IntImm, tirx.FloatImm)):
        return expr.value
    assert isinstance(expr, relax.Call), expr
    name = expr.op.name.removeprefix("relax.")
    result = _OPS[name](expr, *(_value(a, env) for a in expr.args))
    if isinstance(expr.ty, relax.TensorType):
        result = np.asarray(result, dtype=str(expr.ty.dtype))
        assert result.shape == tuple(int(s) for s in expr.ty.shape.values), (name, result.shape, expr.ty)
    return result


def to_primal(array: Array, layout: str, primal: str) -> Array:
    """A stored array as a logical one with its axes in `primal` order."""
    stored = Layout(layout)
    order = [i for p in primal for i, a in sorted(enumerate(stored.axes), key=lambda x: x[1].is_inner) if
             a.letter.upper() == p]  # fmt: skip
    return array.transpose(order).reshape(stored.logical_shape(array.shape, primal))


def from_primal(array: Array, layout: str, primal: str) -> Array:
    """Inverse of `to_primal`, by index arithmetic over every element."""
    stored = Layout(layout)
    shape = stored.physical_shape(array.shape, primal)
    out = np.empty(shape, array.dtype)
    grid = dict(zip(primal, np.indices(array.shape), strict=True))
    index = []
    for axis in stored.axes:
        coordinate, block = grid[axis.letter.upper()], stored.block(axis.letter)
        index.append(coordinate % block if axis.is_inner else coordinate // block)
    out[tuple(index)] = array
    return out


_LAYOUT_ATTRIBUTES = ("data_layout", "kernel_layout", "out_layout", "layout")


@cache
def _kernel(op: str, attrs: tuple[tuple[str, Any], ...], shapes: tuple[tuple[int, ...], ...], size: Any) -> Any:
    params = [relax.Var(f"p{i}", relax.TensorType(s, "float32")) for i, s in enumerate(shapes)]
    builder = relax.BlockBuilder()
    arguments = {k: list(v) if isinstance(v, tuple) else v for k, v in attrs}
    make: Any = relax.op.image.resize2d if op == "image.resize2d" else getattr(relax.op.nn, op.removeprefix("nn."))
    with builder.function("main", params):
        builder.emit_func_output(builder.emit(make(*params, *([size] if size else []), **arguments)))
    built = tvm.compile(builder.get(), tvm.target.Target("llvm"))
    return relax.VirtualMachine(built, tvm.cpu())["main"]


def _anchor(call: relax.Call, *args: Value) -> Array:
    """Compute a call that carries its layouts in NCHW and OIHW (IOHW if transposed), by TVM's kernel for it."""
    name = call.op.name.removeprefix("relax.")
    fields = {f.name: getattr(call.attrs, f.name) for f in type(call.attrs).__tvm_ffi_type_info__.fields}
    data = str(fields.get("data_layout") or fields["layout"])
    out = str(fields.get("out_layout") or data)
    primal = "NCHW"
    arrays = [to_primal(args[0], data, primal)]
    if "kernel_layout" in fields:
        kernel = "IOHW" if name == "nn.conv2d_transpose" else "OIHW"
        arrays.append(to_primal(args[1], str(fields["kernel_layout"]), kernel))
    attrs = tuple(
        (k, _plain(v)) for k, v in sorted(fields.items()) if k not in (*_LAYOUT_ATTRIBUTES, "out_dtype") and v not in
        (None, "")
    )  # fmt: skip
    size = tuple(args[1]) if name == "image.resize2d" else None
    if name == "nn.adaptive_avg_pool2d":
        attrs = tuple((k, v) for k, v in attrs if v is not None)
    run = _kernel(name, attrs, tuple(a.shape for a in arrays), size)
    result = run(*(tvm.runtime.tensor(np.ascontiguousarray(a, dtype="float32")) for a in arrays)).numpy()
    return from_primal(result, out, primal)


def _winograd(call: relax.Call, data: Array, weights: Array) -> Array:
    """The direct convolution by the kernels that the transformed weights come from."""
    attrs = call.attrs
    x = to_primal(data, str(attrs.data_layout), "NCHW")
    u = to_primal(weights, str(attrs.kernel_layout), "OIHW").astype("float64")
    back = np.linalg.pinv(np.array(minimal(u.shape[2] - 2).weights))
    top, left, bottom, right = (int(p) for p in attrs.padding)
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    out = np.einsum("nchwyx,ocyx->nohw", windows, back @ u @ back.T, optimize=True)
    return from_primal(out.astype(data.dtype), str(attrs.out_layout or attrs.data_layout), "NCHW")


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tirx.IntImm, tirx.FloatImm)):
        return value.value
    return tuple(_plain(v) for v in value)


def _layout_transform(call: relax.Call, x: Array) -> Array:
    index_map = call.attrs.index_map
    shape = [int(s) for s in call.ty.shape.values]
    grid = dict(zip(index_map.initial_indices, np.indices(x.shape), strict=True))
    out = np.empty(shape, x.dtype)
    out[tuple(np.broadcast_to(_index(e, grid), x.shape) for e in index_map.final_indices)] = x
    return out


def _index(expr: Any, grid: Mapping[Any, Array]) -> Any:
    if isinstance(expr, tirx.IntImm):
        return int(expr)
    if isinstance(expr, tirx.Var):
        return grid[expr]
    a, b = _index(expr.a, grid), _index(expr.b, grid)
    kind = type(expr).__name__
    return {"Add": lambda: a + b, "Sub": lambda: a - b, "Mul": lambda: a * b, "FloorDiv": lambda: a // b,
            "FloorMod": lambda: a % b}[kind]()  # fmt: skip


def _axes(call: relax.Call, x: Array) -> tuple[int, ...]:
    axis = call.attrs.axis
    return tuple(range(x.ndim)) if axis is None else tuple(int(a) for a in axis)


def _reduction(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda call, x: function(x, axis=_axes(call, x), keepdims=bool(call.attrs.keepdims))


def _split(call: relax.Call, x: Array) -> tuple[Array, ...]:
    sections = call.attrs.indices_or_sections
    parts = int(sections) if isinstance(sections, (int, tirx.IntImm)) else [int(i) for i in sections]
    return tuple(np.split(x, parts, axis=int(call.attrs.axis)))


def _pad(call: relax.Call, x: Array, value: Any = None) -> Array:
    flat = [int(w) for w in call.attrs.pad_width]
    widths = list(zip(flat[::2], flat[1::2], strict=True))
    return np.pad(x, widths, constant_values=float(call.attrs.pad_value))


def _slice(call: relax.Call, x: Array, axes: Any, begin: Any, end: Any, strides: Any = None) -> Array:
    index = [slice(None)] * x.ndim
    for i, axis in enumerate(axes):
        index[axis] = slice(begin[i], end[i], strides[i] if strides is not None else 1)
    return x[tuple(index)]


def _softmax(call: relax.Call, x: Array) -> Array:
    axis = int(call.attrs.axis)
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def _permute(call: relax.Call, x: Array) -> Array:
    axes = call.attrs.axes
    return x.transpose(None if axes is None else [int(a) for a in axes])


def _matmul(call: relax.Call, a: Array, b: Array) -> Array:
    return a @ b


def _argmax(call: relax.Call, x: Array) -> Array:
    axis = call.attrs.axis
    return x.argmax(axis=None if axis is None else int(axis), keepdims=bool(call.attrs.keepdims))


def _squeeze(call: relax.Call, x: Array) -> Array:
    return x.reshape([int(s) for s in call.ty.shape.values])


def _reshape(call: relax.Call, x: Array, shape: Any = None) -> Array:
    return x.reshape([int(s) for s in call.ty.shape.values])


def _layer_norm(call: relax.Call, x: Array, gamma: Array, beta: Array) -> Array:
    axes = tuple(int(a) for a in call.attrs.axes)
    mean, var = x.mean(axis=axes, keepdims=True), x.var(axis=axes, keepdims=True)
    shape = [x.shape[i] if i in [a % x.ndim for a in axes] else 1 for i in range(x.ndim)]
    return (x - mean) / np.sqrt(var + call.attrs.epsilon) * gamma.reshape(shape) + beta.reshape(shape)


def _batch_norm(call: relax.Call, x: Array, gamma: Array, beta: Array, mean: Array, var: Array) -> tuple[Array, ...]:
    scale = (gamma / np.sqrt(var + call.attrs.epsilon)).reshape(1, -1, 1, 1)
    return (x - mean.reshape(1, -1, 1, 1)) * scale + beta.reshape(1, -1, 1, 1), mean, var


def _numpy(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda call, *args: function(*args)


_ANCHORS = ("nn.conv2d", "nn.conv2d_transpose", "nn.max_pool2d", "nn.avg_pool2d", "nn.adaptive_avg_pool2d")
_OPS: dict[str, Callable[..., Value]] = {
    **dict.fromkeys((*_ANCHORS, "image.resize2d"), _anchor),
    "layoutsearch.conv2d_winograd": _winograd,
    **{
        name: _numpy(getattr(np, name))
        for name in (
            *("add", "subtract", "multiply", "divide", "maximum", "minimum", "power", "greater", "less", "equal"),
            *("less_equal", "greater_equal", "not_equal", "logical_and", "where", "abs", "exp", "sqrt", "tanh"),
            *("negative", "square", "floor", "ceil", "logical_not"),
        )
    },
    "nn.relu": _numpy(lambda x: np.maximum(x, 0)),
    "nn.leakyrelu": lambda call, x: np.where(x > 0, x, x * call.attrs.alpha),
    "sigmoid": _numpy(lambda x: 1 / (1 + np.exp(-x))),
    "nn.silu": _numpy(lambda x: x / (1 + np.exp(-x))),
    "clip": _numpy(np.clip),
    "astype": _numpy(lambda x: x),
    "concat": lambda call, parts: np.concatenate(parts, axis=int(call.attrs.axis)),
    "split": _split,
    "nn.pad": _pad,
    "strided_slice": _slice,
    "nn.softmax": _softmax,
    **{name: _reduction(getattr(np, name)) for name in ("mean", "sum", "max", "min", "prod", "std")},
    "variance": _reduction(np.var),
    "permute_dims": _permute,
    "layout_transform": _layout_transform,
    "matmul": _matmul,
    "argmax": _argmax,
    "take": lambda call, x, indices: np.take(x, indices, axis=int(call.attrs.axis)),
    "stack": lambda call, parts: np.stack(parts, axis=int(call.attrs.axis)),
    "broadcast_to": lambda call, x, shape: np.broadcast_to(x, shape),
    "nn.prelu": lambda call, x, alpha: np.where(x > 0, x, x * alpha.reshape(1, -1, 1, 1)),
    "nn.batch_norm": _batch_norm,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "expand_dims": _reshape,
    "flatten": _reshape,
    "nn.layer_norm": _layer_norm,
}
