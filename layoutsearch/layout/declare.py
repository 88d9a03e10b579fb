"""Declarations of external functions as attributes of a Relax module."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tvm
from tvm import relax

from layoutsearch.layout.declared import ATTRIBUTE, CHOSEN, Declared, parse_declaration
from layoutsearch.layout.layout import Layout

Declare = Callable[[relax.Function], Mapping[str, Any] | Sequence[Mapping[str, Any]] | None]


def is_external(function: tvm.ir.BaseFunc) -> bool:
    """Whether a code generator of the user's makes the function."""
    return isinstance(function, relax.Function) and function.attrs is not None and "Codegen" in function.attrs


def declare_layouts(module: tvm.IRModule, declare: Declare) -> tvm.IRModule:
    """A copy of `module` whose external functions (those with attribute `Codegen`) declare their layouts.

    Args:
        module: a Relax module.
        declare: for each external function its declaration, see `layoutsearch.layout.declared`, or None for what is to
            keep its original layouts.

    Raises:
        ModelError: a declaration is wrong.
    """
    result = tvm.IRModule(dict(module.functions.items()), attrs=module.attrs, global_infos=module.global_infos)
    for gv, function in module.functions_items():
        if not is_external(function):
            continue
        value = declare(function)
        if value is None:
            continue
        parse_declaration(value, gv.name_hint, *shapes_of(function))
        result.update_func(gv, function.with_attr(ATTRIBUTE, json.dumps(value)))
    return result


def declared_by(function: relax.Function, name: str) -> tuple[Declared, ...]:
    """The choices of an external function; empty where it declares none.

    Raises:
        ModelError: the declaration is wrong.
    """
    if ATTRIBUTE not in function.attrs:
        return ()
    return parse_declaration(_plain(function.attrs[ATTRIBUTE]), name, *shapes_of(function))


def chosen_by(function: relax.Function) -> Declared:
    """For code generators: the layouts of the parameters and of the result of an external function, as they are now."""
    if CHOSEN not in function.attrs:
        return Declared((), (), None)
    data = json.loads(str(function.attrs[CHOSEN]))
    sources, weights = (tuple(Layout(v) if v else None for v in data[key]) for key in ("sources", "weights"))
    return Declared(sources, weights, Layout(data["destination"]) if data["destination"] else None)


def shapes_of(function: relax.Function) -> tuple[list[tuple[int, ...] | None], tuple[int, ...] | None]:
    """Shapes of the parameters and of the result; None for what is no tensor of a known shape."""
    return [_shape(p.ty) for p in function.params], _shape(function.ret_ty)


def _shape(ty: relax.Type) -> tuple[int, ...] | None:
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    values = list(ty.shape.values)
    return tuple(int(v) for v in values) if all(isinstance(v, tvm.tirx.IntImm) for v in values) else None


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return None if value is None else str(value)
    if hasattr(value, "items"):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if hasattr(value, "__iter__") else value
