"""The objects of TVM's layout inference, built from Python, and the registration of inference functions.

TVM has no Python classes for `InferLayoutOutput` and `LayoutDecision`; they are made here by type key through the FFI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm_ffi import core as ffi_core

from layoutsearch.layout.layout import Layout

INFER_LAYOUT = "FRelaxInferLayout"
# Later registrations of an attribute win by a higher level; TVM's own are made at 10.
PRIORITY = 11

_make = tvm_ffi.get_global_func("ffi.MakeObjectFromPackedArgs")
_slayout = tvm_ffi.get_global_func("s_tir.SLayout")
_INT32 = tvm.ir.PrimType("int32")

Decision = Any
InferLayout = Callable[[Any, Any, Any], Any]


def _object(key: str, **fields: Any) -> Any:
    flat = [part for item in fields.items() for part in item]
    return _make(ffi_core._object_type_key_to_index(key), *flat)


def decision(letters: str) -> Decision:
    """A layout decision over A, B, C...; the empty string is the undefined layout of a scalar."""
    return _object("relax.transform.LayoutDecision", layout=_slayout(letters, _INT32), is_unknown_dim=False)


def _decisions(value: Any) -> Any:
    if isinstance(value, str):
        return decision(value)
    if isinstance(value, (list, tuple)):
        return [_decisions(v) for v in value]
    return value


def infer_output(
    inputs: Sequence[Any], outputs: Sequence[Any], attrs: Any = None, new_args: Mapping[int, Any] | None = None
) -> Any:
    """An `InferLayoutOutput`: layouts as letter strings, nested as the arguments are."""
    return _object(
        "relax.transform.InferLayoutOutput",
        input_layouts=[_decisions(i) for i in inputs],
        output_layouts=[_decisions(o) for o in outputs],
        new_attrs=attrs,
        new_args={tvm.tirx.IntImm("int32", k): v for k, v in (new_args or {}).items()},
    )


def is_leaf(layout: Any) -> bool:
    """Whether a nested layout is a single decision."""
    return type(layout).__name__.endswith("LayoutDecision")


def leaves(layout: Any) -> Iterator[str | None]:
    """Letter strings of a nested layout; None where the rank is unknown."""
    if layout is None:
        return
    if is_leaf(layout):
        yield None if layout.is_unknown_dim else letters_of(layout.layout)
        return
    for part in layout:
        yield from leaves(part)


def letters_of(slayout: Any) -> str:
    """The name of TVM's layout object, empty for an undefined one."""
    if slayout is None:
        return ""
    text = str(slayout)
    return text[len("SLayout(") : -1] if text.startswith("SLayout(") else text


def blocks_of(letters: str) -> dict[str, int]:
    """Blocks of a letter string."""
    return Layout(letters).blocks if letters else {}


def inference_of(op: tvm.ir.Op) -> InferLayout | None:
    """The operator's layout inference; `has_attr` also answers True where there is none."""
    return op.get_attr(INFER_LAYOUT) if op.has_attr(INFER_LAYOUT) else None


def set_inference(op: tvm.ir.Op, function: InferLayout | None) -> None:
    """Replace the operator's layout inference; None removes it."""
    if inference_of(op) is not None:
        op.reset_attr(INFER_LAYOUT)
    if function is not None:
        tvm.ir.register_op_attr(op.name, INFER_LAYOUT, function, PRIORITY)
