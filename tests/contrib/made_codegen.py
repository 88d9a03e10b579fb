"""A code generator of a user's, `relax.ext.made`: naive C for conv2d + bias + relu, in whatever layouts it was given.

It takes the layouts from the function's attribute, as code generators are told to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.dpl import is_op, wildcard

from layoutsearch.layout.declare import chosen_by, declare_layouts
from layoutsearch.layout.layout import Layout

_HEAD = """
#include <stdint.h>
typedef struct { int32_t type; uint32_t pad; union { int64_t i; void* p; }; } Any;
typedef struct { void* data; int64_t device; int32_t ndim; int32_t dtype; int64_t* shape; int64_t* strides;
                 uint64_t offset; } Tensor;
static float* of(const Any* a) { return (float*)((Tensor*)(a->type >= 64 ? (char*)a->p + 24 : (char*)a->p))->data; }
#ifdef __cplusplus
#define EXPORT extern "C"
#else
#define EXPORT
#endif
"""
_BODY = """
EXPORT int __tvm_ffi_{name}(void* self, const Any* args, int32_t n, Any* result) {{
  float *x = of(args), *w = of(args + 1), *b = of(args + 2), *y = of(args + 3);
  for (int o = 0; o < {O}; o++) for (int h = 0; h < {H}; h++) for (int v = 0; v < {W}; v++) {{
    float sum = b[o];
    for (int c = 0; c < {C}; c++) for (int r = 0; r < 3; r++) for (int s = 0; s < 3; s++) {{
      int i = h + r - 1, j = v + s - 1;
      if (i >= 0 && i < {H} && j >= 0 && j < {W}) sum += x[{source}] * w[((o * {C} + c) * 3 + r) * 3 + s];
    }}
    y[{destination}] = sum > 0 ? sum : 0;
  }}
  return 0;
}}
"""


def _shape(channels: int, height: int, width: int) -> dict[str, int]:
    return {"N": 1, "C": channels, "H": height, "W": width}


def _at(layout: Layout, names: dict[str, str], shape: dict[str, int]) -> str:
    """Offset in memory of an element, as C."""
    text = "0"
    for axis, extent in zip(layout.axes, layout.physical_shape(tuple(shape.values()), "".join(shape)), strict=True):
        block, name = layout.block(axis.letter.upper()), names[axis.letter.upper()]
        part = f"{name} % {block}" if axis.is_inner else f"{name} / {block}"
        text = f"(({text}) * {extent} + {part})"
    return text


@tvm_ffi.register_global_func("relax.ext.made", override=True)
def generate(functions: Sequence[relax.Function], _options: Any, _names: Any) -> list[Any]:
    code, names = _HEAD, []
    for function in functions:
        choice, name = chosen_by(function), str(function.attrs["global_symbol"])
        source = choice.param(0) or Layout("NCHW")
        out = choice.destination or Layout("NCHW")
        _, channels, height, width = source.logical_shape([int(s) for s in function.params[0].ty.shape.values], "NCHW")
        _, outputs, _, _ = out.logical_shape([int(s) for s in function.ret_ty.shape.values], "NCHW")
        read = _at(source, {"N": "0", "C": "c", "H": "i", "W": "j"}, _shape(channels, height, width))
        made = _at(out, {"N": "0", "C": "o", "H": "h", "W": "v"}, _shape(outputs, height, width))
        sizes = {"O": outputs, "C": channels, "H": height, "W": width}
        code += _BODY.format(name=name, source=read, destination=made, **sizes)
        names.append(name)
    return [tvm.get_global_func("runtime.CSourceModuleCreate")(code, "c", names, [])]


def partition(module: tvm.IRModule, layouts: Callable[[int], Any] | None = None) -> tvm.IRModule:
    """3x3 convolutions with bias and relu as external functions; `layouts(i)` is the declaration of the i-th."""
    found = is_op("relax.nn.relu")(is_op("relax.add")(is_op("relax.nn.conv2d")(wildcard(), wildcard()), wildcard()))
    fused = relax.transform.FuseOpsByPattern([("made.conv", found)], bind_constants=False, annotate_codegen=True)(
        module
    )
    order = [
        b.value.op.name_hint
        for block in fused["main"].body.blocks
        for b in block.bindings
        if isinstance(b.value, relax.Call) and isinstance(b.value.op, tvm.ir.GlobalVar)
    ]
    if layouts is None:
        return fused
    return declare_layouts(fused, lambda f: layouts(order.index(str(f.attrs["global_symbol"]))))
