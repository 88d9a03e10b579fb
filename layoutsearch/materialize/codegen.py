"""External functions on their way to an executable: hidden from TVM's lowering, then made by their code generators."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from typing import Any

import tvm
from tvm import relax

from layoutsearch.errors import ModelError
from layoutsearch.layout.candidate import EXTERN
from layoutsearch.layout.declare import is_external
from layoutsearch.materialize.externs import rewritten
from layoutsearch.materialize.writer import with_main

IMPORT = "LAYOUTSEARCH_IMPORT"
"""Environment variable with Python modules that register code generators, separated by commas."""
_HIDDEN = "layoutsearch.external "
_DPS = "relax.call_dps_packed"


def hide(module: tvm.IRModule) -> tuple[tvm.IRModule, dict[tvm.ir.GlobalVar, relax.Function]]:
    """The module without external functions, calls of them as calls of packed functions that nothing looks into."""
    functions = {g: f for g, f in module.functions_items() if is_external(f)}
    if not functions:
        return module, {}

    def visit(_name: str, value: relax.Expr) -> relax.Expr:
        if isinstance(value, relax.Call) and value.op in functions:
            out = functions[value.op].ret_ty
            return relax.call_dps_packed(_HIDDEN + value.op.name_hint, relax.Tuple(list(value.args)), out)
        return value

    rest = {g: f for g, f in module.functions_items() if g not in functions}
    return rewritten(tvm.IRModule(rest, attrs=module.attrs), visit), functions


def show(module: tvm.IRModule, functions: dict[tvm.ir.GlobalVar, relax.Function]) -> tvm.IRModule:
    """Inverse of `hide`."""
    if not functions:
        return module
    by_name = {_HIDDEN + g.name_hint: g for g in functions}

    def visit(_name: str, value: relax.Expr) -> relax.Expr:
        is_call = isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) and value.op.name == _DPS
        if is_call and value.args[0].global_symbol in by_name:
            return relax.Call(by_name[value.args[0].global_symbol], list(value.args[1].fields))
        return value

    # The calls have to find their functions when types are inferred.
    shown = rewritten(tvm.IRModule({**dict(module.functions_items()), **functions}, attrs=module.attrs), visit)
    return with_main(shown, shown["main"])


def run_codegen(module: tvm.IRModule) -> tvm.IRModule:
    """The module with external functions made by their code generators, `relax.ext.NAME`; TVM's `RunCodegen`.

    Raises:
        ModelError: a code generator is not registered.
    """
    names = {str(f.attrs["Codegen"]) for _, f in module.functions_items() if is_external(f)}
    if not names:
        return module
    require_generators(names)
    return relax.transform.RunCodegen()(module)


def generated(function: relax.Function) -> list[Any]:
    """The runtime modules that the code generator of one external function makes of it.

    Raises:
        ModelError: it is not registered.
    """
    name = str(function.attrs["Codegen"])
    require_generators([name])
    return list(tvm.get_global_func(f"relax.ext.{name}")([function], {}, {}))


def function_types(function: relax.Function) -> list[relax.TensorType]:
    """Types of the parameters and of the result."""
    return [*(p.ty for p in function.params), function.ret_ty]


def require_generators(names: Iterable[str]) -> None:
    """Import what registers code generators; raise ModelError where one stays unknown."""
    for name in sorted(names):
        if _is_registered(name):
            continue
        if name in EXTERN:
            importlib.import_module(f"layoutsearch.contrib.{name}.codegen")
            continue
        for plugin in filter(None, os.environ.get(IMPORT, "").split(",")):
            try:
                importlib.import_module(plugin.strip())
            except ImportError as error:
                raise ModelError(f"{IMPORT} names {plugin}, which cannot be imported: {error}") from None
        if not _is_registered(name):
            raise ModelError(
                f"no code generator relax.ext.{name} is registered for the model's external functions; name the Python "
                f"module that registers it in {IMPORT}"
            )


def _is_registered(name: str) -> bool:
    return tvm.get_global_func(f"relax.ext.{name}", allow_missing=True) is not None


def inlined(module: tvm.IRModule) -> tvm.IRModule:
    """The module with external functions as what they compute, in `main`: for a reference made by TVM alone."""
    plain = {
        g: f.without_attr("Codegen").without_attr("global_symbol") if is_external(f) else f
        for g, f in module.functions_items()
    }
    external = {g: plain[g] for g, f in module.functions_items() if is_external(f)}
    if not external:
        return module
    main = next(f for g, f in plain.items() if g.name_hint == "main")
    made = with_main(module, main.inline_functions(external))
    rest = {g: f for g, f in made.functions_items() if not is_external(f)}
    lifted = relax.transform.LambdaLift()(tvm.IRModule(rest, attrs=module.attrs))
    helpers = {g: f for g, f in lifted.functions_items() if isinstance(f, relax.Function) and g.name_hint != "main"}
    main = lifted["main"].inline_functions({g: f.without_attr("Composite") for g, f in helpers.items()})
    rest = {g: f for g, f in lifted.functions_items() if g not in helpers}
    return relax.transform.Normalize()(with_main(tvm.IRModule(rest, attrs=module.attrs), main))
