"""Kernels that move data and compute nothing, found in what they store."""

from __future__ import annotations

from tvm import ir, tirx
from tvm_ffi import structural_walk

_CHOICES = ("tirx.if_then_else",)


def only_copies(function: tirx.PrimFunc) -> bool:
    """Whether everything that a kernel stores is an element that it loaded, whatever its loops look like.

    Vectors, and their shuffles, are elements too. A constant, as around a padded tensor, is not: what pads computes.
    """
    copies, stores = True, 0

    def visit(store: tirx.BufferStore) -> None:
        nonlocal copies, stores
        stores += 1
        copies = copies and _is_loaded(store.value)

    structural_walk(function.body, (tirx.BufferStore, visit))
    return copies and stores > 0


def _is_loaded(value: tirx.Expr) -> bool:
    if isinstance(value, ir.TensorLoad):
        return True
    if isinstance(value, tirx.Shuffle):
        return all(_is_loaded(v) for v in value.vectors)
    if isinstance(value, tirx.Select):
        return _is_loaded(value.true_value) and _is_loaded(value.false_value)
    if isinstance(value, ir.Call) and getattr(value.op, "name", "") in _CHOICES:
        return all(_is_loaded(v) for v in value.args[1:])
    return False
