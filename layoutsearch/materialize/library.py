"""External libraries that compute operators: optional extras, found by name."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import tvm
from tvm import relax, tirx

from layoutsearch.errors import MaterializeError
from layoutsearch.layout import kinds
from layoutsearch.layout.candidate import EXTERN as NAMES
from layoutsearch.materialize.writer import FunctionWriter, main_of, substitute, with_main
from layoutsearch.schedule.dispatch import EXTERN
from layoutsearch.toolchain import LinkInput

_PREFIX = "layoutsearch."


def library(name: str) -> Any:
    """The module `layoutsearch.contrib.NAME`."""
    assert name in NAMES, name
    return importlib.import_module(f"layoutsearch.contrib.{name}")


def libraries_of(functions: Iterable[tvm.ir.BaseFunc]) -> tuple[str, ...]:
    """Names of the libraries of ours that kernels and external functions call: what has to be linked with them."""
    attrs = [f.attrs for f in functions if f.attrs is not None]
    found = {str(a[key]) for a in attrs for key in (EXTERN, "Codegen") if key in a}
    return tuple(sorted(found & set(NAMES)))


def link_input(module: tvm.IRModule, target: tvm.target.Target) -> LinkInput | None:
    """What has to be linked with the kernels of `module`; None where they call no external library.

    Raises:
        ToolchainError: a library is not installed.
    """
    found = [library(name).link_input(target) for name in libraries_of(f for _, f in module.functions_items())]
    if not found:
        return None
    return LinkInput(tuple(f for one in found for f in one.files), tuple(o for one in found for o in one.options))


def lower_kernels(module: tvm.IRModule) -> tvm.IRModule:
    """The fused kernels that external libraries compute as TIR; `module` itself where there are none.

    Raises:
        MaterializeError: a library does not compute what is fused with its operator.
    """
    functions = dict(module.functions_items())
    lowered = {}
    for gv, function in functions.items():
        if isinstance(function, relax.Function) and function.attrs is not None and "Primitive" in function.attrs:
            made = _lowered(gv.name_hint, function)
            if made is not None:
                lowered[gv] = made
    if not lowered:
        return module
    new = {gv: tvm.ir.GlobalVar(gv.name_hint) for gv in lowered}
    for gv, function in lowered.items():
        relax.expr._update_type(new[gv], function.ty)
    rest = {gv: f for gv, f in functions.items() if gv not in lowered}
    module = tvm.IRModule({**rest, **{new[gv]: f for gv, f in lowered.items()}}, attrs=module.attrs)
    return with_main(module, _calling(main_of(module), new))


def _lowered(name: str, function: relax.Function) -> tirx.PrimFunc | None:
    root = function.body.blocks[0].bindings[0].value
    if not root.op.name.startswith(_PREFIX) or root.op.name == kinds.CONV_WINOGRAD:
        return None
    for one in NAMES:
        try:
            made = library(one).lower_kernel(function)
        except ValueError as reason:
            raise MaterializeError(f"{name}: {one} does not compute it: {reason}; tune again") from None
        if made is not None:
            return made
    return None


def _calling(main: relax.Function, new: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar]) -> relax.Function:
    """`main` with calls of the old functions as calls of TIR."""
    writer = FunctionWriter()
    env: dict[relax.Var, relax.Expr] = {}
    for block in main.body.blocks:
        dataflow = isinstance(block, relax.DataflowBlock)
        for binding in block.bindings:
            value = substitute(binding.value, env)
            if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar) and value.op in new:
                value = relax.call_tir(new[value.op], relax.Tuple(list(value.args)), binding.var.ty)
            match = binding.ty if isinstance(binding, relax.MatchCast) else None
            output = not isinstance(binding.var, relax.DataflowVar)
            env[binding.var] = writer.bind(binding.var.name, value, output=output, match=match)
        writer.end_block(dataflow)
    return writer.function(main.params, substitute(main.body.body, env), main.attrs)
