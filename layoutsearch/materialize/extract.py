"""One kernel of a canonical module as a module of its own, to be built and timed alone."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax

from layoutsearch.errors import MaterializeError
from layoutsearch.materialize.fuse import kernel_function
from layoutsearch.materialize.writer import main_of


class Extractor:
    """Takes operators out of one canonical module."""

    def __init__(self, canonical: tvm.IRModule) -> None:
        self._bindings = {b.var.name: b for block in main_of(canonical).body.blocks for b in block.bindings}

    def extract(self, names: Sequence[str]) -> tuple[tvm.IRModule, dict[str, str]]:
        """A module whose `main` computes the operators `names` (bound variables, in program order, the last escapes).

        Operands from outside become parameters, weights included, in the order they are read; scalar constants stay.
        In `main` operator i is bound to `t{i}`.

        Returns:
            The module, and for each parameter that was a variable its name in the canonical module.

        Raises:
            MaterializeError: an operator is not there.
        """
        missing = [n for n in names if n not in self._bindings]
        if missing:
            raise MaterializeError(f"there is no operator {missing[0]} to take out of the module")
        function, args = kernel_function([self._bindings[n] for n in names])
        function = function.with_attr("global_symbol", "main")
        module = tvm.IRModule({tvm.ir.GlobalVar("main"): function})
        read = {p.name: a.name for p, a in zip(function.params, args, strict=True) if isinstance(a, relax.Var)}
        return module, read
