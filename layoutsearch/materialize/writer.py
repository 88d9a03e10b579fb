"""Writing a Relax function binding by binding, with the names of its variables kept.

`relax.BlockBuilder` renames what it emits; the conversion needs names to survive, since they tie a converted operator
to its node in the layout graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax


class FunctionWriter:
    """Collects bindings into blocks and makes the function."""

    def __init__(self) -> None:
        self._builder = relax.BlockBuilder()
        self._blocks: list[relax.BindingBlock] = []
        self._bindings: list[relax.Binding] = []

    def bind(self, name: str, value: relax.Expr, *, output: bool = False, match: relax.Type | None = None) -> relax.Var:
        """Append `name = value`; `output` makes a variable that is visible outside the dataflow block."""
        value = value if isinstance(value, relax.Var) else self._builder.normalize(value)
        ty = value.ty if match is None else match
        var = relax.Var(name, ty) if output else relax.DataflowVar(name, ty)
        self._bindings.append(relax.VarBinding(var, value) if match is None else relax.MatchCast(var, value, match))
        return var

    def keep(self, binding: relax.Binding) -> None:
        """Append a binding as it is."""
        self._bindings.append(binding)

    def end_block(self, dataflow: bool) -> None:
        """Close the block that the bindings so far belong to."""
        if self._bindings:
            make = relax.DataflowBlock if dataflow else relax.BindingBlock
            self._blocks.append(make(self._bindings))
        self._bindings = []

    def function(
        self, params: Sequence[relax.Var], result: relax.Expr, attrs: tvm.ir.DictAttrs | None = None
    ) -> relax.Function:
        """The function of all closed blocks that returns `result`."""
        body = self._builder.normalize(relax.SeqExpr(self._blocks, result))
        return relax.Function(list(params), body, body.ty, attrs=attrs)


def substitute(expr: relax.Expr, env: dict[relax.Var, relax.Expr]) -> relax.Expr:
    """`expr` with variables replaced; for values of bindings in A-normal form (no nested blocks)."""
    if isinstance(expr, relax.Var):
        return env.get(expr, expr)
    if isinstance(expr, relax.Tuple):
        return relax.Tuple([substitute(f, env) for f in expr.fields])
    if isinstance(expr, relax.TupleGetItem):
        return relax.TupleGetItem(substitute(expr.tuple_value, env), expr.index)
    if isinstance(expr, relax.Call):
        op = expr.op if not isinstance(expr.op, relax.Var) else substitute(expr.op, env)
        return relax.Call(op, [substitute(a, env) for a in expr.args], expr.attrs, expr.ty_args)
    return expr


def main_of(module: tvm.IRModule) -> relax.Function:
    """The module's entry."""
    return module["main"]


def with_main(module: tvm.IRModule, function: relax.Function) -> tvm.IRModule:
    """A copy of `module` with another `main`, under a new GlobalVar so that no old type sticks to it."""
    functions = {g: f for g, f in module.functions_items() if g.name_hint != "main"}
    return tvm.IRModule({**functions, tvm.ir.GlobalVar("main"): function}, attrs=module.attrs)
