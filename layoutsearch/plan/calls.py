"""Which kernels a compiled module calls, in order, and where each finds its operands and leaves its results.

Three forms are read: `main` of `call_tir`s, `main` after the virtual machine's passes, and the one host function that
`sequence_kernels` makes of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import ir, relax, tirx

from layoutsearch.layout import kinds
from layoutsearch.layout.declare import is_external

CONSTANT = "constant"
UNKNOWN = "unknown"
OPAQUE = ""
"""Name of what is called and is no kernel: an external function, say, that may write to what it is given."""
_RESHAPES = ("relax.reshape", "vm.builtin.reshape")


@dataclass(frozen=True)
class Place:
    """Memory of one tensor.

    Attributes:
        base: what memory it is: `parameter i`, `constant`, `unknown i` for what something else than a kernel made, or
            another name for what is allocated on the way.
        offset: in bytes from its start.
        bytes: size; 0 where it is not static.
        shape: of the tensor there; None where it is not static.
    """

    base: str
    offset: int
    bytes: int
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class KernelCall:
    """One call of a PrimFunc or an external function: what it is given, results last."""

    function: str
    places: tuple[Place, ...]


@dataclass(frozen=True)
class CallTrace:
    """What a module does.

    Attributes:
        parameters: of `main`, in order, tuples flattened.
        calls: of PrimFuncs and external functions, in order.
        results: of `main`, tuples flattened.
        strays: operators that move data and were not lowered to a kernel.
    """

    parameters: tuple[Place, ...]
    calls: tuple[KernelCall, ...]
    results: tuple[Place, ...]
    strays: tuple[str, ...]

    @property
    def kernels(self) -> tuple[KernelCall, ...]:
        """The calls of PrimFuncs."""
        return tuple(call for call in self.calls if call.function != OPAQUE)


def trace_calls(module: tvm.IRModule, external: Collection[str] = ()) -> CallTrace:
    """The calls of a lowered module's `main`, those of a host function of kernels in the place of its own.

    Calls of external functions are among them, also once their code generators have run: these are the symbols of
    `external`.
    """
    return _Tracer(module, external).run()


def _size(shape: tuple[int, ...] | None, dtype: str) -> int:
    return 0 if shape is None else math.prod(shape) * ((tvm.DataType(dtype).bits + 7) // 8)


def _types(ty: Any) -> Iterator[Any]:
    """Leaves of a type."""
    if isinstance(ty, relax.TupleType):
        for field in ty.fields:
            yield from _types(field)
    else:
        yield ty


def _place(base: str, ty: Any) -> Place:
    known = isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr)
    static = known and all(isinstance(s, tirx.IntImm) for s in ty.shape.values)
    shape = tuple(int(s) for s in ty.shape.values) if static else None
    return Place(base, 0, _size(shape, str(ty.dtype)) if static else 0, shape)


Places = tuple[Place, ...]


class _Tracer:
    def __init__(self, module: tvm.IRModule, external: Collection[str]) -> None:
        self._module = module
        self._external = {*external, *(g.name_hint for g, f in module.functions_items() if is_external(f))}
        self._functions = {g: f for g, f in module.functions_items() if isinstance(f, tirx.PrimFunc)}
        self._env: dict[relax.Var, Places] = {}
        self._names = itertools.count()
        self._calls: list[KernelCall] = []
        self._strays: list[str] = []

    def run(self) -> CallTrace:
        main = self._module["main"]
        numbers = itertools.count()
        for param in main.params:
            self._env[param] = tuple(_place(f"parameter {next(numbers)}", ty) for ty in _types(param.ty))
        parameters = tuple(p for param in main.params for p in self._env[param])
        for block in main.body.blocks:
            for binding in block.bindings:
                self._env[binding.var] = self._value(binding.value, binding.var.ty)
        results = self._value(main.body.body, main.body.body.ty)
        return CallTrace(parameters, tuple(self._calls), results, tuple(self._strays))

    def _fresh(self, ty: Any, kind: str = "tensor") -> Places:
        return tuple(_place(f"{kind} {next(self._names)}", leaf) for leaf in _types(ty))

    def _value(self, value: relax.Expr, ty: Any) -> Places:
        if isinstance(value, relax.Var):
            return self._env.get(value) or self._fresh(ty)
        if isinstance(value, relax.Tuple):
            return tuple(p for f in value.fields for p in self._value(f, f.ty))
        if isinstance(value, relax.TupleGetItem):
            whole = self._value(value.tuple_value, value.tuple_value.ty)
            before = sum(len(list(_types(f))) for f in value.tuple_value.ty.fields[: value.index])
            count = len(list(_types(value.tuple_value.ty.fields[value.index])))
            return whole[before : before + count]
        if isinstance(value, tvm.ir.GenericConst):
            return (_place(CONSTANT, value.ty),)
        if isinstance(value, relax.Call):
            return self._call(value, ty)
        return self._fresh(ty)

    def _call(self, call: relax.Call, ty: Any) -> Places:
        name = getattr(call.op, "name", "")
        if name == "relax.call_tir":
            made = self._fresh(ty)
            operands = self._value(call.args[1], call.args[1].ty)
            self._kernel(call.args[0], (*operands, *made))
            return made
        if name == "relax.call_dps_packed" and call.args[0].global_symbol in self._external:
            made = self._fresh(ty)
            operands = self._value(call.args[1], call.args[1].ty)
            self._calls.append(KernelCall(call.args[0].global_symbol, (*operands, *made)))
            return made
        symbol = getattr(call.op, "global_symbol", getattr(call.op, "name_hint", ""))
        if symbol in self._external:
            # A call of a function has a result, one of a symbol is given where to put it.
            made = self._fresh(ty) if isinstance(call.op, ir.GlobalVar) else ()
            operands = tuple(p for a in call.args for p in self._value(a, a.ty))
            self._calls.append(KernelCall(symbol, (*operands, *made)))
            return made
        if call.op in self._functions:
            self._kernel(call.op, tuple(p for a in call.args for p in self._value(a, a.ty)))
            return self._fresh(ty)
        if name in (kinds.PERMUTE, kinds.TRANSFORM):
            self._strays.append(name)
        if name in _RESHAPES or getattr(call.op, "global_symbol", "") in _RESHAPES:
            # The same memory under another shape.
            (of,), (seen,) = self._value(call.args[0], call.args[0].ty), self._fresh(ty)
            return (Place(of.base, of.offset, seen.bytes, seen.shape),)
        if name.rpartition(".")[2].startswith("alloc_"):
            return self._fresh(ty)
        given = tuple(p for a in call.args if isinstance(a, relax.Var) for p in self._value(a, a.ty))
        if given:
            self._calls.append(KernelCall(OPAQUE, given))
        return self._fresh(ty, UNKNOWN)

    def _kernel(self, function: ir.GlobalVar, places: Places) -> None:
        steps = _host_calls(self._functions[function])
        if steps is None:
            self._calls.append(KernelCall(function.name_hint, places))
            return
        for symbol, arguments in steps:
            found = tuple(
                Place(places[i].base, places[i].offset + offset, _size(shape, dtype), shape)
                for i, offset, shape, dtype in arguments
            )
            self._calls.append(KernelCall(symbol, found))


_Argument = tuple[int, int, tuple[int, ...], str]
"""Number of a host function's parameter, bytes from its start, shape, element type."""


def _host_calls(function: tirx.PrimFunc) -> list[tuple[str, list[_Argument]]] | None:
    """The kernels that a host function calls with arrays that it makes; None for a kernel."""
    body = function.body
    found = []
    for statement in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        call: Any = statement.value if isinstance(statement, tirx.Evaluate) else None
        name = getattr(getattr(call, "op", None), "name", "")
        if name == "tirx.tvm_call_packed":
            # A mark between kernels.
            continue
        if name != "tirx.tvm_call_cpacked":
            return None
        found.append((str(call.args[0].value), [_argument(function, a) for a in call.args[1:]]))
    return found


def _argument(function: tirx.PrimFunc, array: Any) -> _Argument:
    data, extents, *_, zero, _offset = array.args
    shape, dtype = tuple(int(e) for e in extents.args), str(zero.ty.dtype)
    (of,) = data.args
    if isinstance(of, ir.Var):
        return _number(function, of), 0, shape, dtype
    # The address of an element.
    strides = itertools.accumulate([int(s) for s in of.source.shape][:0:-1], lambda a, b: a * b, initial=1)
    element = sum(int(i) * s for i, s in zip(reversed(list(of.indices)), strides, strict=True))
    size = (tvm.DataType(str(of.source.dtype)).bits + 7) // 8
    return _number(function, of.source), element * size, shape, dtype


def _number(function: tirx.PrimFunc, buffer: Any) -> int:
    return next(i for i, p in enumerate(function.params) if p.same_as(buffer))
