"""Short names for the few TIR statements the templates emit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import tvm
from tvm import ir, s_tir, tirx
from tvm.tirx import ForKind
from tvm_ffi import structural_map, structural_walk

from layoutsearch.schedule.indexing import Expr

Body = Callable[[Expr], tirx.Stmt]


def const(value: float, dtype: str) -> tirx.Expr:
    """A constant of `dtype`."""
    return tirx.const(value, dtype)


def seq(statements: Iterable[tirx.Stmt]) -> tirx.Stmt:
    """The statements in order."""
    items = list(statements)
    if not items:
        return tirx.Evaluate(tirx.const(0, "int32"))
    return items[0] if len(items) == 1 else tirx.SeqStmt(items)


def loop(name: str, extent: Expr, body: Body, kind: ForKind = ForKind.SERIAL, start: Expr = 0) -> tirx.Stmt:
    """`for name in range(start, start + extent): body(name)`; no loop where the extent is the constant 1."""
    if isinstance(extent, tirx.IntImm):
        extent = int(extent)
    if isinstance(extent, int) and extent == 1:
        return body(start)
    if isinstance(extent, int) and extent == 0:
        return seq([])
    var = tirx.Var(name, "int32")
    low = tirx.const(start, "int32") if isinstance(start, int) else start
    size = tirx.const(extent, "int32") if isinstance(extent, int) else extent
    return tirx.For(var, low, size, kind, body(var))


def unrolled(name: str, extent: Expr, body: Body, start: Expr = 0) -> tirx.Stmt:
    """A fully unrolled loop."""
    return loop(name, extent, body, ForKind.UNROLLED, start)


def vectorized(name: str, extent: int, body: Body) -> tirx.Stmt:
    """A loop turned into vector operations."""
    return loop(name, extent, body, ForKind.VECTORIZED)


def parallel(name: str, extent: int, body: Body, enabled: bool = True) -> tirx.Stmt:
    """A loop spread over the thread pool (serial where not `enabled`)."""
    return loop(name, extent, body, ForKind.PARALLEL if enabled else ForKind.SERIAL)


def vector_run(extent: int, lanes: int, body: Body) -> tirx.Stmt:
    """body(0..extent) by vectors of `lanes`, then by ever narrower ones for the rest."""
    whole, rest = divmod(extent, lanes)
    out = []
    if whole:
        out.append(loop("i", whole, lambda i: vectorized("v", lanes, lambda v: body(i * lanes + v))))
    done = whole * lanes
    while rest:
        piece = 1 << (rest.bit_length() - 1)
        out.append(vectorized("v", piece, lambda v, start=done: body(v + start)))  # type: ignore[misc]
        done, rest = done + piece, rest - piece
    return seq(out)


def bind(name: str, value: Expr) -> tuple[Expr, list[tirx.Stmt]]:
    """Names a value: the variable, and the statement that binds it (none for a constant)."""
    if isinstance(value, int | tirx.IntImm):
        return value, []
    var = tirx.Var(name, "int32")
    return var, [tirx.Bind(var, value)]


def bind_all(**values: Expr) -> tuple[list[Expr], list[tirx.Stmt]]:
    """`bind` for several values at once, in order."""
    names, statements = [], []
    for name, value in values.items():
        var, bound = bind(name, value)
        names.append(var)
        statements += bound
    return names, statements


def registers(name: str, elements: int, dtype: str) -> tirx.Buffer:
    """A small thread-local buffer that LLVM keeps in registers once its indices are constant."""
    return tirx.decl_buffer((elements,), dtype, name, scope="local")


def allocate(buffer: tirx.Buffer) -> tirx.Stmt:
    """Allocates a buffer of a template: on the stack where its scope is `local`, else from the thread's workspace.

    TVM would take what is local, or larger than a kilobyte, from the workspace as well, by two calls for every tile.
    """
    if buffer.scope() != "local":
        return tirx.AllocBuffer(buffer)
    bits = tvm.DataType(str(buffer.dtype)).bits
    elements = math.prod(int(s) for s in buffer.shape)
    # Of what TVM can put on a stack, tensor maps alone have the alignment of a vector.
    pieces = -(-elements * max(8, bits) // (8 * _TENSORMAP_BYTES))
    pointer = ir.PointerType(ir.PrimType(str(buffer.dtype)), "local")
    data = tirx.call_intrin(pointer, "tirx.tvm_stack_alloca", "tensormap", tirx.const(pieces, "int32"))
    return tirx.DeclBuffer(buffer, data=data)


_TENSORMAP_BYTES = 128
_STACK_BYTES = 64 << 10


def thread_scratch(name: str, elements: int, dtype: str) -> tirx.Buffer:
    """A buffer of one task: on the stack where it is small, since the pool's workspace costs more than a small task."""
    small = elements * 8 <= _STACK_BYTES
    return tirx.decl_buffer((elements,), dtype, name, scope="local" if small else "global")


def indices_of(values: Sequence[Expr]) -> list[tirx.Expr]:
    """Indices as TIR expressions."""
    return [tirx.const(v, "int32") if isinstance(v, int) else v for v in values]


def store(buffer: tirx.Buffer, value: tirx.Expr, *indices: Expr) -> tirx.Stmt:
    """`buffer[indices] = value`."""
    return tirx.BufferStore(buffer, value, indices_of(indices))


def load(buffer: tirx.Buffer, *indices: Expr) -> tirx.Expr:
    """`buffer[indices]`."""
    return tirx.BufferLoad(buffer, indices_of(indices))


def prefetch(place: ir.TensorLoad) -> tirx.Stmt:
    """Ask for the line of an element in the second cache; an address past the end of its buffer does no harm."""
    flags = [tirx.const(v, "int32") for v in (0, 2, 1)]
    return tirx.Evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", tirx.address_of(place), *flags))


def is_one(value: Expr) -> bool:
    """Whether the expression is the constant 1."""
    return isinstance(value, int | tirx.IntImm) and int(value) == 1


def unravel(index: Expr, extents: Sequence[int]) -> list[Expr]:
    """Coordinates of a flat `index` into a box of `extents`, last one fastest."""
    out: list[Expr] = []
    varying = [i for i, extent in enumerate(extents) if extent != 1]
    for axis in range(len(extents) - 1, -1, -1):
        if axis not in varying:
            out.append(0)
        elif axis == varying[0]:
            out.append(index)
        else:
            out.append(index % extents[axis])
            index = index // extents[axis]
    return out[::-1]


def substitute(expr: tirx.Expr, values: Mapping[tirx.Var, Expr]) -> tirx.Expr:
    """`expr` with variables replaced."""
    if not values:
        return expr
    table = {
        var: tirx.const(v, var.ty.dtype) if isinstance(v, int) else v.astype(var.ty.dtype) for var, v in values.items()
    }
    return structural_map(expr, (ir.Var, lambda v: table.get(v, v)))


def buffer_loads(node: tirx.Expr | tirx.Stmt) -> list[ir.TensorLoad]:
    """Every buffer load in the expression or statement."""
    found: list[ir.TensorLoad] = []

    def visit(value: ir.TensorLoad) -> None:
        found.append(value)

    structural_walk(node, (ir.TensorLoad, visit))
    return found


def stored_buffers(node: tirx.Stmt) -> list[tirx.Buffer]:
    """The buffer of every store in the statement."""
    found: list[tirx.Buffer] = []

    def visit(value: tirx.BufferStore) -> None:
        found.append(value.buffer)

    structural_walk(node, (tirx.BufferStore, visit))
    return found


def uses_any(expr: tirx.Expr | int, variables: Iterable[tirx.Var]) -> bool:
    """Whether the expression mentions one of the variables."""
    if isinstance(expr, int):
        return False
    wanted = set(variables)
    hit = False

    def visit(value: tirx.Var) -> None:
        nonlocal hit
        hit = hit or value in wanted

    structural_walk(expr, (ir.Var, visit))
    return hit


BUILD_CONFIG = {"tirx.disable_cse_tir": True}
"""PassContext options for building scheduled kernels: TVM's own elimination of common subexpressions takes a third of
the build time of an unrolled kernel and finds nothing that LLVM does not."""

_OPAQUE = 8


def finish(func: tirx.PrimFunc, allocations: Sequence[tirx.Buffer], stages: Sequence[tirx.Stmt]) -> tirx.PrimFunc:
    """`func` with the emitted `stages` as its body, marked as scheduled and without a global symbol."""
    return kernel(func.params, allocations, stages, func.ret_type, func.attrs)


def kernel(
    params: Sequence[tirx.Var],
    allocations: Sequence[tirx.Buffer],
    stages: Sequence[tirx.Stmt],
    ret_type: ir.Type,
    attrs: ir.DictAttrs,
) -> tirx.PrimFunc:
    """A scheduled function of `params` whose body are the emitted `stages`."""
    # Relax passes look for a root block; the operator pattern keeps them from fusing the kernel any further. The
    # block's own list of allocations is not used: TVM shrinks those to what it sees accessed by inner blocks.
    root = s_tir.SBlock([], [], [], "root", seq([*(tirx.AllocBuffer(b) for b in allocations), *stages]))
    body = s_tir.SBlockRealize([], tirx.const(True, "bool"), root)
    return mark(tirx.PrimFunc(params, body, ret_type, attrs))


def mark(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The attributes every scheduled kernel carries."""
    for name, value in {"tirx.is_scheduled": True, "tirx.noalias": True, "s_tir": True, "op_pattern": _OPAQUE}.items():
        func = func.with_attr(name, value)
    return func.without_attr("global_symbol")
