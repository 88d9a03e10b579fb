"""The form of the function: one `main` with its bindings in as few dataflow blocks as can be, and stable names."""

from __future__ import annotations

from collections import Counter

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from layoutsearch.errors import ModelError
from layoutsearch.model.kinds import kind_of

_KEPT_ATTRIBUTES = ("Codegen", "Composite", "Primitive")


def main_function(module: tvm.IRModule) -> relax.Function:
    """The function `main` of a module.

    Raises:
        ModelError: there is none, or it is not a Relax function.
    """
    names = {var.name_hint: func for var, func in module.functions.items()}
    if isinstance(names.get("main"), relax.Function):
        return names["main"]
    known = ", ".join(sorted(n for n, f in names.items() if isinstance(f, relax.Function))) or "none"
    raise ModelError(f"the module has no Relax function named main (Relax functions: {known}); rename the one to tune")


def _inline_helpers(module: tvm.IRModule) -> tvm.IRModule:
    """Inline private Relax functions into `main`, except those that stand for a kernel or an external call."""
    helpers = {
        var: func
        for var, func in module.functions.items()
        if isinstance(func, relax.Function)
        and var.name_hint != "main"
        and not (func.attrs and any(key in func.attrs for key in (*_KEPT_ATTRIBUTES, "global_symbol")))
    }
    if not helpers:
        return module
    result = tvm.IRModule(dict(module.functions.items()), attrs=module.attrs, global_infos=module.global_infos)
    result.update_func(module.get_global_var("main"), module["main"].inline_functions(helpers))
    return result


def _with_entry_symbol(module: tvm.IRModule) -> tvm.IRModule:
    """`main` is public: dead code elimination keeps what it reaches, and the compiled module exports it."""
    main = module["main"]
    if main.attrs and "global_symbol" in main.attrs:
        return module
    result = tvm.IRModule(dict(module.functions.items()), attrs=module.attrs, global_infos=module.global_infos)
    result.update_func(module.get_global_var("main"), main.with_attr("global_symbol", "main"))
    return result


def to_dataflow(module: tvm.IRModule) -> tvm.IRModule:
    """Bring `main` into A-normal form inside dataflow blocks; adjacent blocks become one."""
    main_function(module)
    module = _with_entry_symbol(_inline_helpers(module))
    steps = [relax.transform.Normalize(), relax.transform.ConvertToDataflow(min_size=1)]
    return clean(tvm.transform.Sequential(steps)(module))


def clean(module: tvm.IRModule) -> tvm.IRModule:
    """Remove copies, equal computations, and what nothing reads."""
    steps = [
        relax.transform.CanonicalizeBindings(),
        relax.transform.EliminateCommonSubexpr(call_only=True),
        relax.transform.CanonicalizeBindings(),
        relax.transform.DeadCodeElimination(["main"]),
    ]
    return tvm.transform.Sequential(steps)(module)


@mutator
class _Rename(PyExprMutator):
    """Name every bound variable after what it is bound to, numbered in program order for each kind."""

    def __init__(self, function: relax.Function) -> None:
        super().__init__()
        self.taken = {param.name for param in function.params}
        self.params = set(function.params)
        self.counts: Counter[str] = Counter()
        self.stem = "value"

    def _fresh(self) -> str:
        while True:
            name = f"{self.stem}_{self.counts[self.stem]}"
            self.counts[self.stem] += 1
            if name not in self.taken:
                return name

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Remember what the variable is bound to before its definition is visited."""
        value = binding.value
        if isinstance(value, relax.Call):
            stem = kind_of(value)
        else:
            stem = {relax.TupleGetItem: "item", relax.Tuple: "tuple", relax.If: "branch"}.get(type(value), "value")
        new_value = self.visit_expr(value)
        self.stem = stem
        var = self.visit_var_def(binding.var)
        self.builder_.emit_normalized(relax.VarBinding(var, self.builder_.normalize(new_value)))

    def visit_match_cast_(self, binding: relax.MatchCast) -> None:
        """As for a plain binding."""
        value = self.visit_expr(binding.value)
        self.stem = "cast"
        var = self.visit_var_def(binding.var)
        self.builder_.emit_normalized(relax.MatchCast(var, value, binding.ty))

    def visit_dataflow_var_def_(self, var: relax.DataflowVar) -> relax.Var:
        """A fresh variable of the same type."""
        renamed = relax.DataflowVar(self._fresh(), var.ty)
        self.set_var_remap(var, renamed)
        return renamed

    def visit_var_def_(self, var: relax.Var) -> relax.Var:
        """A fresh variable of the same type; parameters keep their names."""
        if var in self.params:
            return var
        renamed = relax.Var(self._fresh(), var.ty)
        self.set_var_remap(var, renamed)
        return renamed


def rename(module: tvm.IRModule) -> tvm.IRModule:
    """Give every bound variable of `main` a unique name that does not depend on the source of the module."""
    result = tvm.IRModule(dict(module.functions.items()), attrs=module.attrs, global_infos=module.global_infos)
    result.update_func(module.get_global_var("main"), _Rename(module["main"]).visit_expr(module["main"]))
    return result
