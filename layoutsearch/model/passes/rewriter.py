"""The driver of the rewrite rules: one forward walk over a function that offers every call to the rules of its op.

A rule looks at one call (its operands already rewritten) and returns the expression that replaces it, or None. It may
look behind its operands with `Scope.definition` and emit helper bindings with `Scope.emit`. The walk is repeated by
`canonicalize` until no rule applies, so a rule only ever has to take one step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst, GlobalVar, Op
from tvm.ir.prim import IntImm
from tvm.relax import Expr
from tvm.relax.expr_functor import PyExprMutator, mutator

Rule = Callable[[relax.Call, "Scope"], Expr | None]
"""Maps a call to its replacement, or to None where it does not apply."""
ItemRule = Callable[[relax.TupleGetItem, relax.Call, "Scope"], Expr | None]
"""Like Rule, for one output of a call that returns a tuple."""


def op_name(expr: Expr) -> str:
    """Name of the operator an expression calls (`relax.nn.conv2d`); empty for anything else."""
    return expr.op.name if isinstance(expr, relax.Call) and isinstance(expr.op, Op) else ""


def static_shape(expr: Expr) -> tuple[int, ...] | None:
    """Shape of a tensor expression where every extent is known, else None."""
    ty = expr.ty
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    if not all(isinstance(extent, IntImm) for extent in ty.shape.values):
        return None
    return tuple(int(extent.value) for extent in ty.shape.values)


def dtype_of(expr: Expr) -> str:
    """Element type of a tensor expression; empty where it has none."""
    ty = expr.ty
    return str(ty.dtype) if isinstance(ty, relax.TensorType) and ty.dtype is not None else ""


def is_float(expr: Expr) -> bool:
    """Whether a tensor expression holds floating point numbers."""
    return "float" in dtype_of(expr)


def array_of(expr: Expr) -> np.ndarray | None:
    """Value of a constant tensor, else None."""
    return expr.value.numpy() if isinstance(expr, GenericConst) else None


def scalar_of(expr: Expr) -> float | None:
    """Value of a constant tensor of one element, else None."""
    value = array_of(expr)
    return float(value.reshape(())) if value is not None and value.size == 1 else None


def with_operands(call: relax.Call, args: Sequence[Expr]) -> relax.Call:
    """The same operation on other operands."""
    return relax.Call(call.op, list(args), call.attrs, call.ty_args)


def variables(expr: Expr) -> Iterator[relax.Var]:
    """Every use of a variable in an expression, nested tuples and branches included."""
    if isinstance(expr, relax.Var):
        yield expr
    elif isinstance(expr, relax.Call):
        for child in (expr.op, *expr.args):
            yield from variables(child)
    elif isinstance(expr, relax.Tuple):
        for field in expr.fields:
            yield from variables(field)
    elif isinstance(expr, relax.TupleGetItem):
        yield from variables(expr.tuple_value)
    elif isinstance(expr, relax.If):
        for child in (expr.cond, expr.true_branch, expr.false_branch):
            yield from variables(child)
    elif isinstance(expr, relax.SeqExpr):
        for block in expr.blocks:
            for binding in block.bindings:
                yield from variables(binding.value)
        yield from variables(expr.body)


class Scope:
    """What a rule may ask of the function around the call it looks at."""

    def __init__(self, walk: _Walk, function: relax.Function) -> None:
        self._walk = walk
        self._uses = Counter(variables(function.body))
        self._gained: set[relax.Var] = set()

    def definition(self, expr: Expr) -> Expr:
        """What a variable is bound to, through plain copies; any other expression, and a parameter, as it is."""
        while isinstance(expr, relax.Var):
            value = self._walk.lookup_binding(expr)
            if value is None:
                return expr
            expr = value
        return expr

    def used_once(self, expr: Expr) -> bool:
        """Whether this is the only use of a variable, so that work moved out of it is not done twice."""
        return isinstance(expr, relax.Var) and self._uses.get(expr, 1) == 1 and expr not in self._gained

    def gain(self, expr: Expr) -> None:
        """Note that a rule has used the variables of `expr` anew: their counts are stale until the next walk."""
        self._gained.update(variables(expr))

    def emit(self, expr: Expr) -> relax.Var:
        """Bind a helper expression in front of the call."""
        self.gain(expr)
        return self._walk.builder_.emit(expr)

    def function(self, var: GlobalVar) -> tvm.ir.BaseFunc:
        """The function of the module that a global variable names."""
        return self._walk.module[var]


@mutator
class _Walk(PyExprMutator):
    """One forward walk; `fired` tells whether any rule applied."""

    def __init__(
        self,
        module: tvm.IRModule,
        function: relax.Function,
        rules: Mapping[str, Sequence[Rule]],
        item_rules: Mapping[str, Sequence[ItemRule]],
    ) -> None:
        super().__init__(module)
        self.module = module
        self.rules = rules
        self.item_rules = item_rules
        self.scope = Scope(self, function)
        self.fired = False

    def visit_call_(self, call: relax.Call) -> Expr:
        """Offer a call, its operands resolved, to the rules of its op, until none applies."""
        expr: Expr = self.visit_expr_post_order(call)
        args = [self._resolve(arg) for arg in expr.args]
        if any(new is not old for new, old in zip(args, expr.args, strict=True)):
            expr = with_operands(expr, args)
        expr = self.builder_.normalize(expr)
        replaced = True
        while replaced and isinstance(expr, relax.Call):
            replaced = False
            for rule in (*self.rules.get(op_name(expr), ()), *self.rules.get("*", ())):
                result = rule(expr, self.scope)
                if result is not None:
                    expr = self._accept(result)
                    replaced = True
                    break
        return expr

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> Expr:
        """Offer one output of a call that returns a tuple to the rules of that call's op."""
        item = self.visit_expr_post_order(item)
        source = self.scope.definition(item.tuple_value)
        for rule in self.item_rules.get(op_name(source), ()):
            result = rule(item, source, self.scope)
            if result is not None:
                return self._accept(result)
        return item

    def _accept(self, result: Expr) -> Expr:
        self.fired = True
        self.scope.gain(result)
        return self.builder_.normalize(result)

    def _resolve(self, expr: Expr) -> Expr:
        """Replace variables that are copies, or that an earlier rule has turned into constants."""
        if isinstance(expr, relax.Tuple):
            fields = [self._resolve(field) for field in expr.fields]
            same = all(new is old for new, old in zip(fields, expr.fields, strict=True))
            return expr if same else self.builder_.normalize(relax.Tuple(fields))
        while isinstance(expr, relax.Var):
            value = self.lookup_binding(expr)
            if not isinstance(value, relax.Var | GenericConst):
                break
            expr = value
        return expr


def apply_rules(
    module: tvm.IRModule,
    rules: Mapping[str, Sequence[Rule]],
    item_rules: Mapping[str, Sequence[ItemRule]],
) -> tuple[tvm.IRModule, bool]:
    """Walk once over `main` of `module`.

    Args:
        module: the module; it is not changed.
        rules: rules by op name; those under `*` are offered every call, last.
        item_rules: rules for single outputs, by the name of the op that returns the tuple.

    Returns:
        The rewritten module, and whether any rule applied.
    """
    function = module["main"]
    walk = _Walk(module, function, rules, item_rules)
    rewritten = walk.visit_expr(function)
    if not walk.fired:
        return module, False
    result = tvm.IRModule(dict(module.functions.items()), attrs=module.attrs, global_infos=module.global_infos)
    result.update_func(module.get_global_var("main"), rewritten)
    return result, True
