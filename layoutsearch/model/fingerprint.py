"""Names that last: one for a whole canonical module, one for each of its operations.

Both are made of what determines the layouts and kernels of a model: operators, attributes, shapes, element types and
scalars. Weights and the names of variables do not enter, so a retrained model keeps its plan.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import GenericConst, GlobalVar, Op
from tvm.ir.prim import FloatImm, IntImm

from layoutsearch.model.kinds import kind_of

FORMAT = 1
"""Enters every hash; changed together with what is hashed."""


def _value_text(value: object) -> str:
    """Text of an attribute or an immediate that does not depend on the process."""
    if isinstance(value, IntImm | FloatImm):
        return repr(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value) if not isinstance(value, str) else f"'{value}'"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{_value_text(value[k])}" for k in sorted(value)) + "}"
    if hasattr(value, "__iter__"):
        return "[" + ",".join(_value_text(item) for item in value) + "]"
    return str(value)


def _attrs_text(attrs: object) -> str:
    if attrs is None:
        return ""
    if hasattr(attrs, "items"):
        return _value_text({str(k): v for k, v in attrs.items()})
    fields = sorted(field.name for field in type(attrs).__tvm_ffi_type_info__.fields)  # type: ignore[attr-defined]
    return ";".join(f"{name}={_value_text(getattr(attrs, name))}" for name in fields)


def _type_text(ty: tvm.ir.Type) -> str:
    if isinstance(ty, relax.TupleType):
        return "(" + ",".join(_type_text(field) for field in ty.fields) + ")"
    if isinstance(ty, relax.TensorType):
        shape = _value_text(ty.shape.values) if isinstance(ty.shape, relax.ShapeExpr) else f"rank {ty.ndim}"
        return f"{ty.dtype}{shape}"
    return str(ty)


class _Writer:
    """Writes expressions as text; variables by number in order of definition."""

    def __init__(self, module: tvm.IRModule) -> None:
        self._module = module
        self._numbers: dict[relax.Var, int] = {}

    def define(self, var: relax.Var) -> str:
        number = self._numbers.setdefault(var, len(self._numbers))
        return f"%{number}:{_type_text(var.ty)}"

    def callee(self, op: relax.Expr) -> str:
        """An operator by name, a function of the module by its structure, an external one by its symbol."""
        if isinstance(op, Op):
            return str(op.name)
        if isinstance(op, GlobalVar):
            func = self._module[op]
            if isinstance(func, relax.Function):
                return f"function({_Writer(self._module).function(func)})"
            return f"func {tvm_ffi.structural_hash(func.without_attr('global_symbol') if func.attrs else func):016x}"
        return f"extern {op.global_symbol}" if isinstance(op, relax.ExternFunc) else self.expr(op)

    def function(self, func: relax.Function) -> str:
        """A Relax function: its parameters and its body."""
        return "\n".join([*(self.define(param) for param in func.params), self.expr(func.body)])

    def operand(self, expr: relax.Expr) -> str:
        """An operand by its type alone, except what is no tensor."""
        if isinstance(expr, relax.Tuple):
            return "(" + ",".join(self.operand(field) for field in expr.fields) + ")"
        if isinstance(expr, relax.Var | GenericConst) and isinstance(expr.ty, relax.TensorType | relax.TupleType):
            return _type_text(expr.ty)
        return self.expr(expr)

    def expr(self, expr: relax.Expr) -> str:
        if isinstance(expr, relax.Var):
            return f"%{self._numbers[expr]}" if expr in self._numbers else f"free {expr.name}"
        if isinstance(expr, GenericConst):
            value = expr.value.numpy()
            return f"{_type_text(expr.ty)}={value.item()!r}" if value.ndim == 0 else _type_text(expr.ty)
        if isinstance(expr, relax.Call):
            types = ",".join(_type_text(ty) for ty in expr.ty_args)
            args = ",".join(self.expr(arg) for arg in expr.args)
            return f"{self.callee(expr.op)}({args})<{_attrs_text(expr.attrs)}>[{types}]"
        if isinstance(expr, relax.Tuple):
            return "(" + ",".join(self.expr(field) for field in expr.fields) + ")"
        if isinstance(expr, relax.TupleGetItem):
            return f"{self.expr(expr.tuple_value)}.{expr.index}"
        if isinstance(expr, relax.ShapeExpr):
            return _value_text(expr.values)
        if isinstance(expr, relax.If):
            branches = f"{self.expr(expr.true_branch)} else {self.expr(expr.false_branch)}"
            return f"if {self.expr(expr.cond)} then {branches}"
        if isinstance(expr, relax.SeqExpr):
            lines = [f"{self.define(var)}={self.expr(value)}" for var, value in _bindings(expr)]
            return "{" + ";".join([*lines, self.expr(expr.body)]) + "}"
        if isinstance(expr, GlobalVar | Op | relax.ExternFunc):
            return self.callee(expr)
        return _value_text(getattr(expr, "value", expr))


def _bindings(sequence: relax.SeqExpr) -> Iterator[tuple[relax.Var, relax.Expr]]:
    for block in sequence.blocks:
        for binding in block.bindings:
            yield binding.var, binding.value


def fingerprint(canonical: tvm.IRModule) -> str:
    """Identity of a canonical module.

    Args:
        canonical: a module from `canonicalize`.

    Returns:
        A sha256 in hexadecimal. Equal for modules that differ only in the values of tensors with at least one
        dimension and in the names of variables.
    """
    text = f"layoutsearch fingerprint {FORMAT}\n{_Writer(canonical).function(canonical['main'])}"
    return hashlib.sha256(text.encode()).hexdigest()


def op_ids(canonical: tvm.IRModule) -> dict[str, str]:
    """Ids of the operations of a canonical module, such as `conv2d_pointwise:5f3a9c21:0`.

    The hash covers operator, attributes, shapes and types of the operands; the number after it counts equal operations
    in program order. So an id survives edits elsewhere in the graph that add no operation equal to its own before it.

    Args:
        canonical: a module from `canonicalize`.

    Returns:
        An id for every variable of `main` that is bound to a call, by the name of the variable, in program order.
    """
    writer = _Writer(canonical)
    counts: Counter[str] = Counter()
    ids: dict[str, str] = {}
    for var, call in _bindings(canonical["main"].body):
        if not isinstance(call, relax.Call):
            continue
        operands = ",".join(writer.operand(arg) for arg in call.args)
        types = ",".join(_type_text(ty) for ty in call.ty_args)
        text = f"{FORMAT} {writer.callee(call.op)}({operands})<{_attrs_text(call.attrs)}>[{types}]"
        stem = f"{kind_of(call)}:{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        ids[var.name] = f"{stem}:{counts[stem]}"
        counts[stem] += 1
    return ids
