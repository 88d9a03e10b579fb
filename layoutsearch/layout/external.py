"""Calls of external functions in the layout graph."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from layoutsearch.layout.declare import declared_by, is_external
from layoutsearch.layout.declared import natural_axes
from layoutsearch.layout.graph import OpNode, declared_choices


def external_attrs(module: tvm.IRModule, value: relax.Expr) -> dict[str, Any] | None:
    """What a node needs to know of the external function that `value` calls; None for other expressions.

    Raises:
        ModelError: the function's declaration is wrong.
    """
    if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.GlobalVar):
        return None
    function = module.functions.get(value.op)
    if function is None or not is_external(function):
        return None
    name = value.op.name_hint
    return {"function": name, "declared": declared_by(function, name), "arguments": len(value.args)}


def external_axes(op: OpNode) -> list[str | None]:
    """Axis names of every operand and of the result (last) that some choice gives; None where there is none."""
    choices = declared_choices(op)
    layouts = [[c.param(i) for c in choices] for i in range(len(op.operands))] + [[c.destination for c in choices]]
    known = [next((lay for lay in column if lay is not None), None) for column in layouts]
    return [natural_axes(layout) if layout is not None else None for layout in known]
