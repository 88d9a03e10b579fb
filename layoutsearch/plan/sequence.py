"""The kernels of a model as one host function, so that the virtual machine is entered once for each inference.

Relax's machine allocates every tensor and calls every kernel by itself, about two microseconds each: a quarter of a
small model. Where `main` is nothing but calls of kernels with static shapes, those calls, in their order, become one
TIR function: tensors between kernels are parts of one workspace, planned here, and kernels are called by symbol with
descriptors on the stack. What `main` takes and returns stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tvm
from tvm import relax, tirx
from tvm.tirx.op import buffer_data

from layoutsearch.materialize.writer import FunctionWriter, with_main
from layoutsearch.schedule.builder import mark

_NAME = "run_kernels"
_ALIGN = 64
"""Bytes: what kernels may assume of their operands."""


@dataclass
class _Step:
    """One call of a kernel: its symbol, operands (variables or constants of `main`), and what it makes."""

    symbol: str
    operands: tuple[relax.Expr, ...]
    result: relax.Var
    is_view: bool


@dataclass
class _Region:
    """Memory of one or more variables that are views of each other.

    Attributes:
        bytes: size.
        first, last: steps that make and last read it.
        output: number of the result of `main` that it is, if it is one.
        offset: in the workspace, once planned.
    """

    bytes: int
    first: int
    last: int
    output: int | None = None
    offset: int = 0
    members: list[relax.Var] = field(default_factory=list)


def sequence_kernels(module: tvm.IRModule) -> tvm.IRModule:
    """`module` with one call in `main`, or as it is where `main` holds anything but calls of kernels."""
    main = module["main"]
    steps, results = _steps(module, main), _results(main)
    if not steps or results is None:
        return module
    regions = _regions(steps, results)
    if regions is None:
        return module
    size = _plan({id(r): r for r in regions.values() if r.output is None}.values())
    function, gv = _emit(main, steps, results, regions, size), tvm.ir.GlobalVar(_NAME)
    outs = [r.ty for r in results] + ([relax.TensorType((size,), "uint8")] if size else [])
    operands = [*main.params, *_constants(steps)]
    relax.expr._update_type(gv, relax.FuncType([*(o.ty for o in operands), *outs], relax.TupleType([]), False))
    call = relax.call_tir(gv, relax.Tuple(operands), outs if len(outs) > 1 else outs[0])
    module = with_main(module, _calling(main, call, results, len(outs)))
    module[gv] = function
    return module


def _steps(module: tvm.IRModule, main: relax.Function) -> list[_Step] | None:
    """The calls of `main` in order; None where it does anything else."""
    functions = {g: f for g, f in module.functions_items() if isinstance(f, tirx.PrimFunc)}
    known = {id(p) for p in main.params}
    steps = []
    for block in main.body.blocks:
        for binding in block.bindings:
            value = binding.value
            is_call = isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op)
            if not isinstance(binding, relax.VarBinding) or not is_call or value.op.name != "relax.call_tir":
                return None
            callee, operands = value.args[0], value.args[1]
            if callee not in functions or len(value.args) > 2 or not _is_static(binding.var.ty):
                return None
            fields = tuple(operands.fields) if isinstance(operands, relax.Tuple) else ()
            if not fields or not all(_is_tensor(f) for f in fields):
                return None
            function = functions[callee]
            is_view = len(function.params) == 2 and bool(relax.analysis.has_reshape_pattern(function))
            steps.append(_Step(callee.name_hint, fields, binding.var, is_view))
            known.add(id(binding.var))
    return steps if all(_is_static(p.ty) for p in main.params) else None


def _is_static(ty: relax.Type) -> bool:
    return (
        isinstance(ty, relax.TensorType)
        and isinstance(ty.shape, relax.ShapeExpr)
        and all(isinstance(s, tirx.IntImm) for s in ty.shape.values)
    )


def _is_tensor(expr: relax.Expr) -> bool:
    return isinstance(expr, (relax.Var, tvm.ir.GenericConst)) and _is_static(expr.ty)


def _results(main: relax.Function) -> list[relax.Var] | None:
    """The variables that `main` returns; None where it returns anything else."""
    body = main.body.body
    found = list(body.fields) if isinstance(body, relax.Tuple) else [body]
    return found if found and all(isinstance(v, relax.Var) and _is_static(v.ty) for v in found) else None


def _regions(steps: Sequence[_Step], results: Sequence[relax.Var]) -> dict[relax.Var, _Region] | None:
    """The memory of everything that a step makes; None where a result would have to be copied."""
    regions: dict[relax.Var, _Region] = {}
    views: dict[relax.Var, relax.Expr] = {}
    for number, step in enumerate(steps):
        for operand in step.operands:
            if operand in regions:
                regions[operand].last = number
        source = step.operands[0]
        if step.is_view and source in regions:
            regions[step.result] = regions[source]
        elif step.is_view:
            views[step.result] = source
        else:
            regions[step.result] = _Region(_bytes(step.result), number, number)
        if step.result in regions:
            regions[step.result].members.append(step.result)
    for number, result in enumerate(results):
        region = regions.get(result)
        if region is None or region.output is not None or views:
            return None
        region.output = number
    return regions


def _calling(main: relax.Function, call: relax.Call, results: Sequence[relax.Var], outs: int) -> relax.Function:
    """`main` as that one call."""
    writer = FunctionWriter()
    made = writer.bind("made", call)
    names = [r.name for r in results]
    found = [
        writer.bind(name, relax.TupleGetItem(made, i) if outs > 1 else made, output=True)
        for i, name in enumerate(names)
    ]
    writer.end_block(dataflow=True)
    result = relax.Tuple(found) if isinstance(main.body.body, relax.Tuple) else found[0]
    return writer.function(main.params, result, main.attrs)


def _bytes(var: relax.Var) -> int:
    return math.prod(int(s) for s in var.ty.shape.values) * ((tvm.DataType(var.ty.dtype).bits + 7) // 8)


def _plan(regions: Sequence[_Region]) -> int:
    """Offsets in a workspace for regions that live at the same time not to overlap; its size in bytes.

    Largest first, each at the lowest offset that is free while it lives (Pisarchyk and Lee, Efficient Memory Management
    for Deep Neural Net Inference, 2020).
    """
    placed: list[_Region] = []
    for region in sorted(regions, key=lambda r: (-r.bytes, r.first)):
        offset = 0
        for other in sorted(placed, key=lambda r: r.offset):
            if other.first <= region.last and region.first <= other.last:
                if offset + region.bytes <= other.offset:
                    break
                offset = max(offset, -(-(other.offset + other.bytes) // _ALIGN) * _ALIGN)
        region.offset = offset
        placed.append(region)
    return max((r.offset + r.bytes for r in placed), default=0)


def _constants(steps: Sequence[_Step]) -> Mapping[relax.Expr, None]:
    return {o: None for step in steps for o in step.operands if isinstance(o, tvm.ir.GenericConst)}


def _buffer(name: str, ty: relax.TensorType) -> tirx.Buffer:
    return tirx.decl_buffer([int(s) for s in ty.shape.values], str(ty.dtype), name)


def _emit(
    main: relax.Function,
    steps: Sequence[_Step],
    results: Sequence[relax.Var],
    regions: Mapping[relax.Var, _Region],
    size: int,
) -> tirx.PrimFunc:
    """The host function: inputs, constants, results and the workspace as parameters."""
    buffers: dict[relax.Expr, tirx.Buffer] = {p: _buffer(f"input_{i}", p.ty) for i, p in enumerate(main.params)}
    buffers |= {c: _buffer(f"weight_{i}", c.ty) for i, c in enumerate(_constants(steps))}
    outputs = [_buffer(f"output_{i}", r.ty) for i, r in enumerate(results)]
    workspace = tirx.decl_buffer((size,), "uint8", "workspace")

    def data(expr: relax.Expr) -> tirx.Expr:
        region = regions.get(expr)
        if region is None:
            return buffer_data(buffers[expr])
        if region.output is not None:
            return buffer_data(outputs[region.output])
        return tirx.address_of(tirx.BufferLoad(workspace, [tirx.const(region.offset, "int32")]))

    def array(expr: relax.Expr) -> tirx.Expr:
        """A tensor descriptor on the stack."""
        shape = tirx.tvm_stack_make_shape(*[tirx.const(int(s), "int64") for s in expr.ty.shape.values])
        zero = tirx.const(0, str(expr.ty.dtype))
        return tirx.tvm_stack_make_array(data(expr), shape, 0, len(expr.ty.shape.values), zero, 0)

    calls = [
        tirx.Evaluate(tirx.call_cpacked(step.symbol, *(array(e) for e in (*step.operands, step.result))))
        for step in steps
        if not step.is_view
    ]
    params = [*buffers.values(), *outputs, *([workspace] if size else [])]
    body = calls[0] if len(calls) == 1 else tirx.SeqStmt(calls)
    # Without `noalias` TVM's code generator would take the operands of every kernel in the module for aliases.
    return mark(tirx.PrimFunc(params, body))
