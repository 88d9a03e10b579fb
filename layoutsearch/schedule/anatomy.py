"""Takes a fused PrimFunc apart: its stages, the anchor among them, and the pointwise epilogue behind the anchor.

A fused PrimFunc is a root block with a list of loop nests, one block each, as `te` and FuseTIR make it. The templates
do not transform these loops: they read what is computed and emit new ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm import ir, s_tir, tirx
from tvm_ffi import structural_map

from layoutsearch.schedule.builder import buffer_loads, stored_buffers, substitute
from layoutsearch.schedule.compute.conv import ANCHOR
from layoutsearch.schedule.indexing import Expr
from layoutsearch.schedule.value import ScheduleError


@dataclass(frozen=True, eq=False)
class Stage:
    """One block: `buffer[indices] = value` over `spatial` axes, reduced over `reduction` axes from `init`.

    Attributes:
        name: The block's name.
        spatial: (variable, extent) of the data-parallel axes, in order.
        reduction: (variable, extent) of the reduction axes, in order.
        buffer: What it writes.
        indices: Where, in terms of the spatial variables.
        value: What; for a reduction the update, which loads `buffer[indices]`.
        init: First value of a reduction; None for a data-parallel block.
        annotations: The block's annotations.
    """

    name: str
    spatial: tuple[tuple[ir.Var, int], ...]
    reduction: tuple[tuple[ir.Var, int], ...]
    buffer: tirx.Buffer
    indices: tuple[tirx.Expr, ...]
    value: tirx.Expr
    init: tirx.Expr | None
    annotations: dict[str, Any]

    @cached_property
    def loads(self) -> list[ir.TensorLoad]:
        """Loads of the value, those of the block's own output left out."""
        return [load for load in buffer_loads(self.value) if not load.source.same_as(self.buffer)]

    @cached_property
    def is_identity_store(self) -> bool:
        """Whether a data-parallel block writes exactly at its own spatial variables, each once."""
        axes = [var for var, _ in self.spatial]
        return (
            not self.reduction
            and len(axes) == len(self.indices)
            and all(
                i.same_as(v) or (isinstance(i, tirx.IntImm) and int(i) == 0 and e == 1)
                for i, v, e in zip(self.indices, axes, (e for _, e in self.spatial), strict=True)
            )
        )


@dataclass(frozen=True, eq=False)
class Opaque:
    """A nest that is not one assignment per point (sort, scan, argmax); kept as it is."""

    name: str
    statement: tirx.Stmt
    reads: tuple[tirx.Buffer, ...]
    writes: tuple[tirx.Buffer, ...]


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The stages of a fused PrimFunc.

    Attributes:
        func: The function.
        stages: Its blocks, in order.
        intermediates: Buffers allocated inside.
    """

    func: tirx.PrimFunc
    stages: tuple[Stage | Opaque, ...]
    intermediates: tuple[tirx.Buffer, ...]

    @classmethod
    def of(cls, func: tirx.PrimFunc) -> Anatomy:
        """Reads a function.

        Raises:
            ScheduleError: the function is not a list of blocks under a root block.
        """
        func = _narrow(func)
        root = func.body
        if not isinstance(root, s_tir.SBlockRealize) or root.block.iter_vars:
            raise ScheduleError("the kernel has no root block; expected an unscheduled function made by te and FuseTIR")
        body = root.block.body
        nests = list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]
        return cls(func, tuple(_stage(n) for n in nests), tuple(root.block.alloc_buffers))

    @cached_property
    def anchor(self) -> tuple[int, dict[str, Any]] | None:
        """Position and attributes of the annotated anchor block."""
        for position, stage in enumerate(self.stages):
            if isinstance(stage, Stage) and ANCHOR in stage.annotations:
                return position, json.loads(str(stage.annotations[ANCHOR]))
        return None

    def is_intermediate(self, buffer: tirx.Buffer) -> bool:
        """Whether the buffer is allocated inside the function."""
        return any(buffer.same_as(b) for b in self.intermediates)

    def producer(self, buffer: tirx.Buffer) -> Stage | Opaque | None:
        """The stage that writes the buffer."""
        for stage in self.stages:
            if any(buffer.same_as(b) for b in written(stage)):
                return stage
        return None


def _narrow(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with 32-bit loop variables and indices.

    Operators and the templates mix index widths otherwise. Kernels that hold 64-bit integers as data stay as they are.
    """
    holds_int64 = any(str(p.dtype) in ("int64", "uint64") for p in func.params if tirx.is_buffer_var(p))
    if isinstance(func.body, s_tir.SBlockRealize):
        holds_int64 |= any(str(b.dtype) in ("int64", "uint64") for b in func.body.block.alloc_buffers)
    if holds_int64:
        return func
    mod = tirx.transform.ForceNarrowIndexToInt32()(ir.IRModule({"main": func}))
    return mod["main"]


def written(stage: Stage | Opaque) -> tuple[tirx.Buffer, ...]:
    """Buffers a stage writes."""
    return stage.writes if isinstance(stage, Opaque) else (stage.buffer,)


def read(stage: Stage | Opaque) -> tuple[tirx.Buffer, ...]:
    """Buffers a stage reads."""
    return stage.reads if isinstance(stage, Opaque) else tuple(load.source for load in stage.loads)


def _stage(nest: tirx.Stmt) -> Stage | Opaque:
    node, loops = nest, {}
    while isinstance(node, tirx.For):
        loops[node.loop_var] = (node.min, node.extent)
        node = node.body
    if not isinstance(node, s_tir.SBlockRealize):
        return _opaque("nest", nest)
    block = node.block
    plain = (
        isinstance(block.body, tirx.BufferStore)
        and not block.alloc_buffers
        and not block.match_buffers
        and isinstance(node.predicate, tirx.IntImm)
        and int(node.predicate) == 1
        and (block.init is None or isinstance(block.init, tirx.BufferStore))
        and sum(isinstance(v, ir.Var) for v in node.iter_values) == len(loops)
        and all(_covers(v, axis.dom, loops) for v, axis in zip(node.iter_values, block.iter_vars, strict=True))
    )
    if not plain:
        return _opaque(block.name_hint, nest)
    spatial = tuple((a.var, int(a.dom.extent)) for a in block.iter_vars if int(a.iter_type) == 0)
    reduction = tuple((a.var, int(a.dom.extent)) for a in block.iter_vars if int(a.iter_type) == 2)
    if len(spatial) + len(reduction) != len(block.iter_vars):
        return _opaque(block.name_hint, nest)
    return Stage(
        block.name_hint,
        spatial,
        reduction,
        block.body.buffer,
        tuple(block.body.indices),
        block.body.value,
        None if block.init is None else block.init.value,
        dict(block.annotations),
    )


def _covers(value: tirx.Expr, domain: ir.Range, loops: dict[ir.Var, tuple[tirx.Expr, tirx.Expr]]) -> bool:
    """Whether the block axis runs exactly over its loop (or is the one point of a unit axis), from zero."""
    if not (isinstance(domain.min, tirx.IntImm) and isinstance(domain.extent, tirx.IntImm) and int(domain.min) == 0):
        return False
    if isinstance(value, tirx.IntImm):
        return int(value) == 0 and int(domain.extent) == 1
    if not isinstance(value, ir.Var) or value not in loops:
        return False
    low, extent = loops[value]
    return all(isinstance(e, tirx.IntImm) for e in (low, extent)) and (int(low), int(extent)) == (0, int(domain.extent))


def _opaque(name: str, nest: tirx.Stmt) -> Opaque:
    return Opaque(name, nest, tuple(load.source for load in buffer_loads(nest)), tuple(stored_buffers(nest)))


def inline_loads(value: tirx.Expr, replace: dict[tirx.Buffer, Any]) -> tirx.Expr:
    """`value` with loads of some buffers replaced; `replace[buffer](indices)` gives the new expression."""

    def visit(load: ir.TensorLoad) -> tirx.Expr:
        make = replace.get(load.source)
        return load if make is None else make(list(load.indices))

    return structural_map(value, (ir.TensorLoad, visit))


def value_at(stage: Stage, indices: Sequence[Expr]) -> tirx.Expr:
    """The value of a data-parallel identity-store stage at `indices` of its output."""
    return substitute(stage.value, {var: i for (var, _), i in zip(stage.spatial, indices, strict=True)})


@dataclass(frozen=True)
class Epilogue:
    """Pointwise stages behind the anchor, evaluated where the accumulator is.

    Attributes:
        anchor: Output buffer of the anchor.
        outputs: The stages whose buffers leave the function; the anchor's own buffer too where it is an output.
        inner: Pointwise stages in between, by buffer.
        writes_anchor: Whether the anchor's own buffer is an output.
    """

    anchor: tirx.Buffer
    outputs: tuple[Stage, ...]
    inner: dict[tirx.Buffer, Stage]
    writes_anchor: bool

    def apply(self, accumulator: tirx.Expr, indices: Sequence[Expr]) -> list[tuple[tirx.Buffer, tirx.Expr]]:
        """(buffer, value) pairs to store at `indices` once the anchor's value there is `accumulator`."""
        out = [(self.anchor, accumulator)] if self.writes_anchor else []
        replace: dict[tirx.Buffer, Any] = {self.anchor: lambda _: accumulator}
        for buffer, stage in self.inner.items():
            replace[buffer] = lambda at, stage=stage: inline_loads(value_at(stage, at), replace)
        out += [(s.buffer, inline_loads(value_at(s, indices), replace)) for s in self.outputs]
        return out


def epilogue(anatomy: Anatomy) -> Epilogue | None:
    """The stages behind the anchor as one pointwise epilogue; None where one of them is something else."""
    if anatomy.anchor is None:
        return None
    position, _ = anatomy.anchor
    anchor = anatomy.stages[position]
    assert isinstance(anchor, Stage)
    inner: dict[tirx.Buffer, Stage] = {}
    outputs: list[Stage] = []
    shape = [int(s) for s in anchor.buffer.shape]
    dependent = {anchor.buffer}
    for stage in anatomy.stages[position + 1 :]:
        if isinstance(stage, Opaque) or not stage.is_identity_store:
            return None
        axes = [var for var, _ in stage.spatial]
        for load in stage.loads:
            same_place = len(load.indices) == len(axes) and all(
                i.same_as(a) or (isinstance(i, tirx.IntImm) and int(i) == 0 and e == 1)
                for i, a, e in zip(load.indices, axes, (e for _, e in stage.spatial), strict=True)
            )
            if load.source in dependent and not same_place:
                return None
        if any(load.source in dependent for load in stage.loads):
            if [int(s) for s in stage.buffer.shape] != shape:
                return None
            dependent.add(stage.buffer)
        if anatomy.is_intermediate(stage.buffer):
            inner[stage.buffer] = stage
        elif stage.buffer in dependent:
            outputs.append(stage)
        else:
            return None
    return Epilogue(anchor.buffer, tuple(outputs), inner, not anatomy.is_intermediate(anchor.buffer))
