"""Every kernel of a converted module as a private Relax function, equal kernels once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import relax

from layoutsearch.layout import kinds
from layoutsearch.layout.groups import FusionOp, fusion_groups
from layoutsearch.materialize.writer import FunctionWriter, main_of, substitute, with_main


@dataclass(frozen=True)
class Kernel:
    """A fused function of the module.

    Attributes:
        function: name of the private function.
        groups: for each call, the bound variables of the operators inside, root first.
    """

    function: str
    groups: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Fused:
    """A module whose `main` calls kernels, and what is in each."""

    module: tvm.IRModule
    kernels: tuple[Kernel, ...]


def fuse(module: tvm.IRModule) -> Fused:
    """Move the operators of every fusion group of `main` into one function with attribute `Primitive`.

    Calls that are no operators of TVM, and operators with tuple results, stay where they are.
    """
    main = main_of(module)
    writer = FunctionWriter()
    kernels = _Kernels()
    env: dict[relax.Var, relax.Expr] = {}
    for block in main.body.blocks:
        dataflow = isinstance(block, relax.DataflowBlock)
        bindings = list(block.bindings)
        groups = fusion_groups(_fusion_ops(bindings)) if dataflow else []
        last = {group[-1]: group for group in groups}
        inside = {name for group in groups for name in group[:-1]}
        values = {b.var.name: b for b in bindings}
        for binding in bindings:
            name = binding.var.name
            if name in inside:
                continue
            group = last.get(name)
            if group is None or not _fusible(binding.value):
                value = substitute(binding.value, env)
                match = binding.ty if isinstance(binding, relax.MatchCast) else None
                output = not isinstance(binding.var, relax.DataflowVar)
                env[binding.var] = writer.bind(name, value, output=output, match=match)
                continue
            called, args = kernels.call([values[n] for n in group], group)
            call = relax.Call(called, [substitute(a, env) for a in args])
            env[binding.var] = writer.bind(name, call, output=not isinstance(binding.var, relax.DataflowVar))
        writer.end_block(dataflow)
    function = writer.function(main.params, substitute(main.body.body, env), main.attrs)
    module = with_main(module, function)
    for gv, kernel in kernels.functions.items():
        module[gv] = kernel
    return Fused(module, kernels.table())


def _fusible(value: relax.Expr) -> bool:
    return (
        isinstance(value, relax.Call)
        and isinstance(value.op, tvm.ir.Op)
        and value.op.get_attr("FLegalize") is not None
        and isinstance(value.ty, relax.TensorType)
        and isinstance(value.ty.shape, relax.ShapeExpr)
    )


def _fusion_ops(bindings: Sequence[relax.Binding]) -> list[FusionOp]:
    found = []
    for binding in bindings:
        value = binding.value
        fusible = _fusible(value) and not isinstance(binding, relax.MatchCast)
        shape = tuple(int(s) for s in value.ty.shape.values) if fusible and _static(value.ty) else None
        found.append(
            FusionOp(
                name=binding.var.name,
                op=_operator(value) if fusible else "",
                inputs=tuple(v.name for v in _variables(value)),
                shape=shape,
                escapes=not isinstance(binding.var, relax.DataflowVar),
            )
        )
    return found


def _operator(value: relax.Call) -> str:
    """Name of the operator, as of the canonical module: a kernel's operators do not depend on its algorithm."""
    return kinds.CONV if value.op.name in (kinds.CONV_WINOGRAD, kinds.CONV_EXTERN) else value.op.name


def _static(ty: relax.TensorType) -> bool:
    return all(isinstance(s, tvm.tirx.IntImm) for s in ty.shape.values)


def _variables(expr: relax.Expr) -> list[relax.Var]:
    if isinstance(expr, relax.Var):
        return [expr]
    if isinstance(expr, relax.Tuple):
        return [v for f in expr.fields for v in _variables(f)]
    if isinstance(expr, relax.TupleGetItem):
        return _variables(expr.tuple_value)
    if isinstance(expr, relax.Call):
        return [v for a in expr.args for v in _variables(a)]
    return []


class _Kernels:
    """Kernel functions by structure."""

    def __init__(self) -> None:
        self.functions: dict[tvm.ir.GlobalVar, relax.Function] = {}
        self._by_hash: dict[int, list[tvm.ir.GlobalVar]] = {}
        self._groups: dict[tvm.ir.GlobalVar, list[tuple[str, ...]]] = {}

    def call(
        self, bindings: Sequence[relax.Binding], group: tuple[str, ...]
    ) -> tuple[tvm.ir.GlobalVar, list[relax.Expr]]:
        """The kernel of these bindings and the arguments for it; an equal kernel is used again."""
        function, args = kernel_function(bindings)
        function = function.with_attr("Primitive", 1)
        digest = tvm_ffi.structural_hash(function, map_free_vars=True)
        for known in self._by_hash.get(digest, []):
            if tvm_ffi.structural_equal(self.functions[known], function, map_free_vars=True):
                self._groups[known].append(group)
                return known, args
        gv = tvm.ir.GlobalVar(_kernel_name(bindings, len(self.functions)))
        relax.expr._update_type(gv, function.ty)
        self.functions[gv] = function
        self._by_hash.setdefault(digest, []).append(gv)
        self._groups[gv] = [group]
        return gv, args

    def table(self) -> tuple[Kernel, ...]:
        return tuple(Kernel(gv.name_hint, tuple(groups)) for gv, groups in self._groups.items())


def _kernel_name(bindings: Sequence[relax.Binding], number: int) -> str:
    ops = [b.value.op.name.rsplit(".", 1)[-1] for b in bindings]
    return "_".join(["fused", *ops[:6], str(number)])


def _is_scalar_constant(expr: relax.Expr) -> bool:
    return isinstance(expr, tvm.ir.GenericConst) and isinstance(expr.ty, relax.TensorType) and expr.ty.ndim == 0


def kernel_function(
    bindings: Sequence[relax.Binding], views: frozenset[str] = frozenset()
) -> tuple[relax.Function, list[relax.Expr]]:
    """A function of everything the bindings read from outside, and the arguments that make it the bindings again.

    Bound variables are `t0`, `t1`, ..., those of `views` `v0`, `v1`, ...; scalar constants stay inside, to be compiled
    in.
    """
    params: list[relax.Var] = []
    args: list[relax.Expr] = []
    env: dict[relax.Var, relax.Expr] = {}
    writer = FunctionWriter()

    def outside(expr: relax.Expr) -> relax.Expr:
        if isinstance(expr, relax.Var):
            if expr not in env:
                env[expr] = relax.Var(f"p{len(params)}", expr.ty)
                params.append(env[expr])
                args.append(expr)
            return env[expr]
        if isinstance(expr, tvm.ir.GenericConst) and isinstance(expr.ty, relax.TensorType):
            if _is_scalar_constant(expr):
                return expr
            for known, arg in zip(params, args, strict=True):
                if arg.same_as(expr):
                    return known
            params.append(relax.Var(f"p{len(params)}", expr.ty))
            args.append(expr)
            return params[-1]
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([outside(f) for f in expr.fields])
        if isinstance(expr, relax.TupleGetItem):
            return relax.TupleGetItem(outside(expr.tuple_value), expr.index)
        return expr

    result: relax.Expr | None = None
    counts = {"t": itertools.count(), "v": itertools.count()}
    for i, binding in enumerate(bindings):
        prefix = "v" if binding.var.name in views else "t"
        value = binding.value
        inner = relax.Call(value.op, [outside(a) for a in value.args], value.attrs, value.ty_args)
        result = writer.bind(f"{prefix}{next(counts[prefix])}", inner, output=i == len(bindings) - 1)
        env[binding.var] = result
    writer.end_block(dataflow=True)
    assert result is not None
    function = writer.function(params, result)
    return function, args


def is_transform_kernel(kernel: relax.Function) -> bool:
    """Whether a kernel function is a layout transform and nothing else."""
    calls = [b.value for block in kernel.body.blocks for b in block.bindings]
    return len(calls) == 1 and calls[0].op.name in (kinds.TRANSFORM, kinds.PERMUTE)
