"""The kernels of a model as one host function, so that the virtual machine is entered once for each inference.

Relax's machine allocates every tensor and calls every kernel by itself, about two microseconds each: a quarter of a
small model. Where `main` is nothing but calls of kernels with static shapes, those calls, in their order, become one
TIR function: tensors between kernels are parts of one workspace, planned here, and kernels are called by symbol with
descriptors on the stack. What `main` takes and returns stays as it was.

For times within the model a marker can be put between kernels: a global function that the device offers, called with
the number of the step that comes next.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.tirx.op import buffer_data

from layoutsearch.materialize.writer import FunctionWriter, with_main
from layoutsearch.schedule.builder import load, mark
from layoutsearch.schedule.indexing import static_shape
from layoutsearch.schedule.templates.stack import STACKS

_NAME = "run_kernels"
_ALIGN = 64
"""Bytes: what kernels may assume of their operands."""
_LARGEST = (1 << 31) - 1
_CALL_TIR_ARGS, _VIEW_PARAMS = 2, 2


@dataclass(eq=False)
class Region:
    """Memory of one or more tensors that are views of each other.

    Attributes:
        bytes: size.
        first, last: steps that make and last read it.
        output: number of the result of `main` that it is, if it is one.
        offset: in the workspace, once placed; within `whole` for a part.
        whole: the region that it is a part of, if it is one.
        returned: whether `main` returns one of its tensors.
    """

    bytes: int
    first: int
    last: int
    output: int | None = None
    offset: int = 0
    whole: Region | None = None
    returned: bool = False

    @property
    def location(self) -> tuple[Region, int]:
        """The region that memory is set aside for, and where in it this one starts."""
        if self.whole is None:
            return self, 0
        region, offset = self.whole.location
        return region, offset + self.offset


@dataclass(frozen=True, eq=False)
class _Tensor:
    """A parameter or constant of `main`, or what a kernel makes (`given` None), with its memory."""

    ty: relax.TensorType
    given: relax.Expr | None = None
    region: Region | None = None


@dataclass(frozen=True)
class SequenceStep:
    """A call of a kernel in `main`.

    Attributes:
        function: name of the kernel.
        call: which of its calls, from 0, those that became memory counted too.
    """

    function: str
    call: int


@dataclass(frozen=True)
class _Step:
    """One call of a kernel: which, what it reads and makes."""

    called: SequenceStep
    tensors: tuple[_Tensor, ...]


class _Unfit(Exception):
    """`main` holds something that cannot be in the sequence."""


def sequence_kernels(module: tvm.IRModule, marker: str = "") -> tvm.IRModule:
    """`module` with one call in `main`, or as it is where `main` holds anything but calls of kernels.

    Args:
        module: its kernels are scheduled.
        marker: name of a global function to call before every kernel with the number of its step, and twice after the
            last one (with n and n + 1 for n kernels), so that what a call of it costs is known; empty for none.
    """
    plan = _plan(module)
    if plan is None:
        return module
    reader, size = plan
    main = module["main"]
    outs = [t.ty for t in reader.results] + ([relax.TensorType((size,), "uint8")] if size else [])
    operands = list(reader.given)
    gv = tvm.ir.GlobalVar(_NAME)
    relax.expr._update_type(gv, relax.FuncType([*(o.ty for o in operands), *outs], relax.TupleType([]), False))
    call = relax.call_tir(gv, relax.Tuple(operands), outs if len(outs) > 1 else outs[0])
    module = with_main(module, _calling(main, call, len(outs)))
    module[gv] = _emit(operands, reader.steps, [t.ty for t in reader.results], size, marker)
    return module


def sequence_steps(module: tvm.IRModule) -> tuple[SequenceStep, ...] | None:
    """The kernels that `sequence_kernels` calls, in order; None where it leaves the module as it is."""
    plan = _plan(module)
    return None if plan is None else tuple(step.called for step in plan[0].steps)


def _plan(module: tvm.IRModule) -> tuple[_Reader, int] | None:
    """What `main` does, its memory placed, and the bytes of the workspace; None where it cannot be a sequence."""
    try:
        reader = _Reader(module, module["main"])
    except _Unfit:
        return None
    for part in reader.regions:
        whole, _ = part.location
        whole.first, whole.last = min(whole.first, part.first), max(whole.last, part.last)
    size = place(r for r in reader.regions if r.output is None and r.whole is None)
    return None if size > _LARGEST else (reader, size)


class _Reader:
    """What `main` does.

    Attributes:
        given: its parameters, then the constants that kernels read.
        steps: calls of kernels, in order.
        regions: memory of what they make.
        results: what `main` returns.

    Raises:
        _Unfit: anything but calls of kernels, shapes that are not static, a result that would have to be copied.
    """

    def __init__(self, module: tvm.IRModule, main: relax.Function) -> None:
        self._functions = {g: f for g, f in module.functions_items() if isinstance(f, tirx.PrimFunc)}
        self.given: dict[relax.Expr, _Tensor] = {p: _Tensor(_static(p.ty), p) for p in main.params}
        self._made: dict[relax.Var, tuple[_Tensor, ...]] = {}
        self.steps: list[_Step] = []
        self.regions: list[Region] = []
        self._number = 0
        self._calls: Counter[str] = Counter()
        body = main.body.body
        results = list(body.fields) if isinstance(body, relax.Tuple) else [body]
        self._returned = set(results)
        for block in main.body.blocks:
            for binding in block.bindings:
                if not isinstance(binding, relax.VarBinding):
                    raise _Unfit
                self._bind(binding.var, binding.value)
        self.results = [self._tensor(e) for e in results]
        for number, result in enumerate(self.results):
            if result.region is None or result.region.output is not None or result.region.whole is not None:
                raise _Unfit
            result.region.output = number

    def _bind(self, var: relax.Var, value: relax.Expr) -> None:
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in self._made:
            self._made[var] = (self._made[value.tuple_value][value.index],)
            return
        is_call = isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op)
        if not is_call or value.op.name != "relax.call_tir" or len(value.args) != _CALL_TIR_ARGS:
            raise _Unfit
        callee, operands = value.args
        if callee not in self._functions or not isinstance(operands, relax.Tuple) or not operands.fields:
            raise _Unfit
        read = [self._tensor(e) for e in operands.fields]
        for tensor in read:
            if tensor.region is not None:
                tensor.region.last = self._number
        types = var.ty.fields if isinstance(var.ty, relax.TupleType) else [var.ty]
        function = self._functions[callee]
        called = SequenceStep(callee.name_hint, self._calls[callee.name_hint])
        self._calls[callee.name_hint] += 1
        if len(function.params) == len(read) + 1 == _VIEW_PARAMS and relax.analysis.has_reshape_pattern(function):
            if read[0].region is None:
                raise _Unfit
            made: tuple[_Tensor, ...] = (_Tensor(_static(types[0]), None, read[0].region),)
        else:
            made = tuple(self._new(_static(ty)) for ty in types)
            if not (function.attrs.get(STACKS) and self._stacked(read, made[0])):
                self.steps.append(_Step(called, (*read, *made)))
        self._made[var] = made
        if var in self._returned:
            for tensor in made:
                assert tensor.region is not None
                tensor.region.returned = True
        self._number += 1

    def _stacked(self, parts: Sequence[_Tensor], whole: _Tensor) -> bool:
        """Make the parts in their places in the whole; False where one of them has a place already."""
        regions = [t.region for t in parts if t.region is not None]
        assert whole.region is not None
        if len({id(region) for region in regions}) < len(parts):
            return False
        offset, offsets = 0, []
        for tensor, region in zip(parts, regions, strict=True):
            if region.whole or region.returned or region.bytes != _size(tensor.ty) or offset % _ALIGN:
                return False
            offsets.append(offset)
            offset += region.bytes
        for region, start in zip(regions, offsets, strict=True):
            region.whole, region.offset = whole.region, start
        return True

    def _new(self, ty: relax.TensorType) -> _Tensor:
        size = _size(ty)
        if not size:
            raise _Unfit
        self.regions.append(Region(size, self._number, self._number))
        return _Tensor(ty, None, self.regions[-1])

    def _tensor(self, expr: relax.Expr) -> _Tensor:
        if expr in self._made and len(self._made[expr]) == 1:
            return self._made[expr][0]
        if isinstance(expr, tvm.ir.GenericConst) and expr not in self.given:
            self.given[expr] = _Tensor(_static(expr.ty), expr)
        if expr not in self.given:
            raise _Unfit
        return self.given[expr]


def _size(ty: relax.TensorType) -> int:
    """Bytes of a tensor."""
    return math.prod(int(s) for s in ty.shape.values) * ((tvm.DataType(ty.dtype).bits + 7) // 8)


def _static(ty: relax.Type) -> relax.TensorType:
    """The type, if it is a tensor's with constant extents."""
    known = isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr)
    if not known or not all(isinstance(s, tirx.IntImm) for s in ty.shape.values):
        raise _Unfit
    return ty


def _calling(main: relax.Function, call: relax.Call, outs: int) -> relax.Function:
    """`main` as that one call."""
    body, writer = main.body.body, FunctionWriter()
    made = writer.bind("made", call)
    names = [v.name for v in (body.fields if isinstance(body, relax.Tuple) else [body])]
    found = [
        writer.bind(name, relax.TupleGetItem(made, i) if outs > 1 else made, output=True)
        for i, name in enumerate(names)
    ]
    writer.end_block(dataflow=True)
    result = relax.Tuple(found) if isinstance(body, relax.Tuple) else found[0]
    return writer.function(main.params, result, main.attrs)


def place(regions: Iterable[Region]) -> int:
    """Offsets in a workspace for regions that live at the same time not to overlap; its size in bytes.

    Largest first, each at the lowest offset that is free while it lives (Pisarchyk and Lee, Efficient Memory Management
    for Deep Neural Net Inference, 2020).
    """
    placed: list[Region] = []
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


def _buffer(name: str, ty: relax.TensorType) -> tirx.Buffer:
    return tirx.decl_buffer([int(s) for s in ty.shape.values], str(ty.dtype), name)


def _emit(
    given: Sequence[relax.Expr], steps: Sequence[_Step], results: Sequence[relax.TensorType], size: int, marker: str
) -> tirx.PrimFunc:
    """The host function: what `main` is given, results and the workspace as parameters."""
    operands = {expr: _buffer(f"given_{i}", expr.ty) for i, expr in enumerate(given)}
    outputs = [_buffer(f"output_{i}", ty) for i, ty in enumerate(results)]
    workspace = tirx.decl_buffer((max(1, size),), "uint8", "workspace")

    def data(tensor: _Tensor) -> tirx.Expr:
        if tensor.region is None:
            return buffer_data(operands[tensor.given])
        region, start = tensor.region.location
        if region.output is None:
            return tirx.address_of(tirx.BufferLoad(workspace, [tirx.const(region.offset + start, "int32")]))
        output = outputs[region.output]
        extents = static_shape(output.shape)
        at = np.unravel_index(start * math.prod(extents) // region.bytes, extents)
        return tirx.address_of(load(output, *map(int, at))) if start else buffer_data(output)

    def array(tensor: _Tensor) -> tirx.Expr:
        """A tensor descriptor on the stack."""
        extents = [int(s) for s in tensor.ty.shape.values]
        shape = tirx.tvm_stack_make_shape(*[tirx.const(s, "int64") for s in extents])
        zero = tirx.const(0, str(tensor.ty.dtype))
        return tirx.tvm_stack_make_array(data(tensor), shape, 0, len(extents), zero, 0)

    calls = [tirx.Evaluate(tirx.call_cpacked(step.called.function, *map(array, step.tensors))) for step in steps]
    if marker:
        marks = [tirx.Evaluate(tirx.call_packed(marker, tirx.const(n, "int32"))) for n in range(len(steps) + 2)]
        calls = [one for pair in zip(marks, calls, strict=False) for one in pair] + marks[-2:]
    params = [*operands.values(), *outputs, *([workspace] if size else [])]
    # Without `noalias` TVM's code generator would take the operands of every kernel in the module for aliases.
    return mark(tirx.PrimFunc(params, calls[0] if len(calls) == 1 else tirx.SeqStmt(calls)))
