"""Builds fused kernels the way the pipeline does, runs them, and computes the same in NumPy on logical layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tvm
from tvm import relax, tirx

from layoutsearch.layout.layout import Layout
from layoutsearch.materialize.legalize import legalize
from layoutsearch.schedule import BUILD_CONFIG, Schedule, TargetInfo, apply, audit, candidates
from layoutsearch.schedule.indexing import logical_coordinates, physical_indices

Array = np.ndarray
HOST = tvm.target.Target({"kind": "llvm", "mcpu": str(tvm.get_global_func("target.llvm_get_system_cpu")())})
INFO = TargetInfo.from_target(HOST, threads=2)


def sample(func: tirx.PrimFunc, seed: int, count: int = 3, target: TargetInfo = INFO) -> list[Schedule]:
    """The first guess and some others, drawn by the seed."""
    every = candidates(func, target)
    drawn = np.random.default_rng(seed).permutation(len(every))[: count - 1]
    return [every[0], *(every[int(i)] for i in drawn if i)]


def scheduled(func: tirx.PrimFunc, schedule: Schedule, target: TargetInfo = INFO) -> tirx.PrimFunc:
    """The kernel under a schedule, checked to hold no scalar loop nest and to be ready for a Relax module."""
    out = apply(func, schedule, target)
    assert audit(out) == []
    assert out.attrs["tirx.is_scheduled"]
    assert "global_symbol" not in out.attrs
    return out


def close(got: Array, want: Array, tolerance: float = 2e-6) -> None:
    """Equal up to `tolerance` of the largest wanted magnitude."""
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * max(1.0, np.abs(want).max())


def to_layout(x: Array, layout: str, primal: str) -> Array:
    """A logical array (axes in `primal` order) stored in `layout`."""
    target = Layout(layout)
    split: list[int] = []
    where: dict[str, int] = {}
    for letter, extent in zip(primal, x.shape, strict=True):
        block = target.block(letter)
        where[letter] = len(split)
        split.append(extent // block)
        if target.is_blocked and letter in target.blocks:
            where[letter.lower()] = len(split)
            split.append(block)
    return np.ascontiguousarray(x.reshape(split).transpose([where[a.letter] for a in target.axes]))


def from_layout(x: Array, layout: str, primal: str) -> Array:
    """Inverse of `to_layout`."""
    source = Layout(layout)
    order = []
    for letter in primal:
        for axis_letter in (letter, letter.lower()):
            order += [i for i, a in enumerate(source.axes) if a.letter == axis_letter]
    return x.transpose(order).reshape(source.logical_shape(x.shape, primal))


def fused(
    build: Callable[..., relax.Expr],
    *shapes: Sequence[int],
    dtypes: Sequence[str] | None = None,
    outputs: Callable[[relax.BlockBuilder, relax.Var], relax.Expr] | None = None,
) -> tirx.PrimFunc:
    """The one PrimFunc of the group of operators that `build(*params)` makes, legalised and fused.

    `outputs(builder, value)` may turn the value into a tuple of several.
    """
    dtypes = dtypes or ["float32"] * len(shapes)

    def params(prefix: str) -> list[relax.Var]:
        return [
            relax.Var(f"{prefix}{i}", relax.TensorType(list(s), d))
            for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))
        ]

    inner = relax.BlockBuilder()
    with inner.function("main", args := params("p")):
        with inner.dataflow():
            value = inner.emit(build(*args))
            out = inner.emit_output(outputs(inner, value) if outputs else value)
        inner.emit_func_output(out)
    group = inner.get()["main"].with_attr("Primitive", 1).without_attr("global_symbol")
    outer = relax.BlockBuilder()
    name = outer.add_func(group, "group")
    with outer.function("main", args := params("q")):
        with outer.dataflow():
            out = outer.emit_output(relax.Call(name, args))
        outer.emit_func_output(out)
    mod = relax.transform.FuseTIR()(legalize(outer.get()))
    (func,) = [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]
    return func


def compile_kernel(func: tirx.PrimFunc, target: tvm.target.Target) -> tvm.runtime.Module:
    """A callable module of one scheduled kernel."""
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main").with_attr("s_tir", True)})
    with tvm.transform.PassContext(config=BUILD_CONFIG):
        return tvm.tirx.build(mod, target=target, pipeline="s_tir")


def run(func: tirx.PrimFunc, arrays: Sequence[Array], target: tvm.target.Target = HOST) -> list[Array]:
    """Outputs of a scheduled kernel on `arrays`; they start as NaN, so an element left out shows."""
    outputs = []
    for param in func.params[len(arrays) :]:
        shape = [int(s) for s in param.shape]
        fill = np.nan if "float" in str(param.dtype) else 77
        outputs.append(tvm.runtime.tensor(np.full(shape, fill).astype(str(param.dtype))))
    compile_kernel(func, target)["main"](*(tvm.runtime.tensor(a) for a in arrays), *outputs)
    return [o.numpy() for o in outputs]


def conv2d(
    x: Array, w: Array, strides: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Array:
    """Reference convolution, NCHW by OIHW, padding (top, left, bottom, right), in float64."""
    (sh, sw), (dh, dw), (top, left, bottom, right) = strides, dilation, padding
    x = np.pad(x.astype("float64"), ((0, 0), (0, 0), (top, bottom), (left, right)))
    o, i, kh, kw = w.shape
    oh, ow = (x.shape[2] - dh * (kh - 1) - 1) // sh + 1, (x.shape[3] - dw * (kw - 1) - 1) // sw + 1
    out = np.zeros((x.shape[0], o, oh, ow))
    per_group = o // groups
    for g in range(groups):
        xs, ws = x[:, g * i : (g + 1) * i], w[g * per_group : (g + 1) * per_group].astype("float64")
        for ky in range(kh):
            for kx in range(kw):
                window = xs[
                    :, :, ky * dh : ky * dh + sh * (oh - 1) + 1 : sh, kx * dw : kx * dw + sw * (ow - 1) + 1 : sw
                ]
                out[:, g * per_group : (g + 1) * per_group] += np.einsum("nihw,oi->nohw", window, ws[:, :, ky, kx])
    return out


def conv2d_transpose(
    x: Array,
    w: Array,
    strides: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Array:
    """Reference transposed convolution, NCHW by IOHW (O per group), in float64: a scatter of every input element."""
    (sh, sw), (dh, dw), (top, left, bottom, right) = strides, dilation, padding
    n, c, h, wd = x.shape
    _, o, kh, kw = w.shape
    full = np.zeros((n, o * groups, (h - 1) * sh + dh * (kh - 1) + 1, (wd - 1) * sw + dw * (kw - 1) + 1))
    full = np.pad(full, ((0, 0), (0, 0), (0, output_padding[0]), (0, output_padding[1])))
    per_group = c // groups
    for g in range(groups):
        xs, ws = x[:, g * per_group : (g + 1) * per_group], w[g * per_group : (g + 1) * per_group]
        for ky in range(kh):
            for kx in range(kw):
                part = np.einsum("nihw,io->nohw", xs.astype("float64"), ws[:, :, ky, kx].astype("float64"))
                full[:, g * o : (g + 1) * o, ky * dh : ky * dh + sh * h : sh, kx * dw : kx * dw + sw * wd : sw][
                    :, :, :h, :wd
                ] += part
    return full[:, :, top : full.shape[2] - bottom or None, left : full.shape[3] - right or None]


def transform(source: str, target: str, shape: Sequence[int], dtype: str = "float32") -> tirx.PrimFunc:
    """layout_transform of a logical NCHW `shape` from one layout to another."""
    stored = Layout(source).physical_shape(shape, "NCHW")

    def index_map(*indices: tirx.Expr) -> list[tirx.Expr]:
        return physical_indices(Layout(target), logical_coordinates(Layout(source), indices))

    # A lambda of fixed arity, as IndexMap asks for the number of its arguments.
    maps = {
        4: lambda a, b, c, d: index_map(a, b, c, d),
        5: lambda a, b, c, d, e: index_map(a, b, c, d, e),
    }
    return fused(lambda x: relax.op.layout_transform(x, maps[len(stored)]), stored, dtypes=[dtype])
