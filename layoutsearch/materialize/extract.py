"""One kernel of a canonical module as a module of its own, to be built and timed alone."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax

from layoutsearch.errors import MaterializeError
from layoutsearch.layout import kinds
from layoutsearch.layout.declare import is_external
from layoutsearch.materialize.fuse import kernel_function
from layoutsearch.materialize.writer import main_of

_PERMUTE = tvm.ir.Op.get(kinds.PERMUTE)


class Extractor:
    """Takes operators out of one canonical module."""

    def __init__(self, canonical: tvm.IRModule) -> None:
        self._functions = {g: f for g, f in canonical.functions_items() if is_external(f)}
        self._bindings = {b.var.name: b for block in main_of(canonical).body.blocks for b in block.bindings}

    def extract(self, names: Sequence[str]) -> tuple[tvm.IRModule, dict[str, str]]:
        """A module whose `main` computes the operators `names` (bound variables, in program order, the last escapes).

        Operands from outside become parameters, weights included, in the order they are read; scalar constants stay.
        In `main` operator i is bound to `t{i}`, transposes between two of them to `v{i}`.

        Returns:
            The module, and for each parameter that was a variable its name in the canonical module.

        Raises:
            MaterializeError: an operator is not there.
        """
        missing = [n for n in names if n not in self._bindings]
        if missing:
            raise MaterializeError(f"there is no operator {missing[0]} to take out of the module")
        views = self._views_between(names)
        bindings = [b for name, b in self._bindings.items() if name in views or name in names]
        function, args = kernel_function(bindings, views)
        function = function.with_attr("global_symbol", "main")
        called = {b.value.op for b in bindings if isinstance(b.value, relax.Call)}
        external = {g: f for g, f in self._functions.items() if g in called}
        module = tvm.IRModule({tvm.ir.GlobalVar("main"): function, **external})
        read = {p.name: a.name for p, a in zip(function.params, args, strict=True) if isinstance(a, relax.Var)}
        return module, read

    def _views_between(self, names: Sequence[str]) -> frozenset[str]:
        """Transposes that hand what one of the operators made to another of them."""
        found: set[str] = set()

        def leads_back(expr: relax.Expr) -> bool:
            binding = self._bindings.get(expr.name) if isinstance(expr, relax.Var) else None
            if binding is None:
                return False
            if expr.name in names:
                return True
            value = binding.value
            is_view = isinstance(value, relax.Call) and value.op.same_as(_PERMUTE) and leads_back(value.args[0])
            if is_view:
                found.add(expr.name)
            return is_view

        for name in names:
            value = self._bindings[name].value
            for arg in value.args if isinstance(value, relax.Call) else ():
                leads_back(arg)
        return frozenset(found)
