"""Requested is not achieved: the memory scope of every tensor of a lowered module against what was asked for."""

from __future__ import annotations

import tvm
from tvm import relax

from layoutsearch.errors import MaterializeError
from layoutsearch.layout.candidate import Assignment
from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.layout.scopes import GLOBAL
from layoutsearch.materialize.lower import Lowered
from layoutsearch.materialize.scopes import leaves_of, scope_of
from layoutsearch.materialize.writer import main_of

_CALL_TIR = tvm.ir.Op.get("relax.call_tir")


def verify_scopes(placed: Lowered, graph: LayoutGraph, assignment: Assignment) -> None:
    """Compare the scopes of all tensors, by their types and by the functions that read and write them.

    Raises:
        MaterializeError: names the first operator whose result or weights are elsewhere, and what is in a texture that
            no operator asked for.
    """
    functions = {g.name_hint: f for g, f in placed.module.functions_items()}
    groups = {kernel.function: list(kernel.groups) for kernel in placed.kernels}
    for block in main_of(placed.module).body.blocks:
        for binding in block.bindings:
            call = binding.value
            if not (isinstance(call, relax.Call) and call.op.same_as(_CALL_TIR)):
                continue
            function = call.args[0].name_hint
            group = groups[function].pop(0) if groups.get(function) else ()
            choices = [assignment[name] for name in group if name in assignment]
            operands = list(call.args[1].fields)
            results = [scope_of(ty) for ty in leaves_of(call.ty_args[0])]
            constants = {scope_of(a.ty) for a in operands if isinstance(a, tvm.ir.GenericConst)} - {GLOBAL}
            wanted = {c.scope for c in choices} or {GLOBAL}
            weights = {c.weight_scope for c in choices} - {GLOBAL}
            name = next((op.id for op in graph.ops if op.name in group), function)
            if set(results) != wanted:
                raise MaterializeError(f"op {name}: the result is in {', '.join(results)}, requested {wanted.pop()}")
            if constants != weights:
                raise MaterializeError(
                    f"op {name}: the weights are in {', '.join(constants) or GLOBAL}, "
                    f"requested {', '.join(weights) or GLOBAL}"
                )
            have = [str(param.scope()) for param in functions[function].params]
            typed = [*(scope_of(a.ty) for a in operands), *results]
            if have[: len(typed)] != typed:
                raise MaterializeError(f"op {name}: its kernel has scopes {have} where its types have {typed}")
