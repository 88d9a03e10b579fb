"""Everything without a template of its own: parallel outside, vectorised inside, reductions in registers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from tvm import s_tir, tirx
from tvm.tirx import ForKind

from layoutsearch.schedule import builder as b
from layoutsearch.schedule.anatomy import Anatomy, Opaque, Stage, inline_loads, read, value_at, written
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.templates.maps import SMALL, emit_map
from layoutsearch.schedule.templates.reductions import Reduction

_EXPENSIVE = ("exp", "log", "sqrt", "tanh", "sigmoid", "pow", "erf", "sin", "cos", "tan")


def inline_pointwise(stages: Sequence[Stage | Opaque], kept: Callable[[tirx.Buffer], bool]) -> list[Stage | Opaque]:
    """Moves cheap data-parallel stages into their consumers; what is left has to be materialised.

    Stages that write a `kept` buffer, one that something else reads, stay.
    """
    current = list(stages)
    for position in range(len(stages)):
        # Earlier stages vanish as they are inlined, so the position is found again by what the stage writes.
        buffers = written(stages[position])
        stage = next(s for s in current if written(s)[0].same_as(buffers[0]))
        if any(kept(buffer) for buffer in buffers):
            continue
        consumers = [s for s in current if s is not stage and any(r in buffers for r in read(s))]
        if not consumers:
            current.remove(stage)
        elif isinstance(stage, Stage) and _may_inline(stage, consumers):
            moved = {id(s): _inline_into(s, stage) for s in consumers if isinstance(s, Stage)}
            current = [moved.get(id(s), s) for s in current if s is not stage]
    return current


def _may_inline(stage: Stage, consumers: Sequence[Stage | Opaque]) -> bool:
    if not stage.is_identity_store or any(isinstance(s, Opaque) for s in consumers):
        return False
    return not _is_expensive(stage.value) or _reads_once(consumers, stage.buffer)


def _inline_into(consumer: Stage, producer: Stage) -> Stage:
    value = inline_loads(consumer.value, {producer.buffer: lambda at: value_at(producer, at)})
    return dataclasses.replace(consumer, value=value)


def _reads_once(consumers: Sequence[Stage | Opaque], buffer: tirx.Buffer) -> bool:
    """Whether inlining would not compute any element twice."""
    (consumer, *others) = consumers
    if others or not isinstance(consumer, Stage):
        return False
    loads = [load for load in consumer.loads if load.source.same_as(buffer)]
    produced = math.prod(int(s) for s in buffer.shape)
    return len(loads) == 1 and math.prod(e for _, e in (*consumer.spatial, *consumer.reduction)) <= produced


def _is_expensive(value: tirx.Expr) -> bool:
    text = value.script() if hasattr(value, "script") else str(value)
    return any(f"{name}(" in text for name in _EXPENSIVE)


def emit_stages(stages: Sequence[Stage | Opaque], anatomy: Anatomy, target: TargetInfo) -> list[tirx.Stmt]:
    """The loop nests of the stages, as few of them as inlining leaves."""
    given = {id(s) for s in stages}
    elsewhere = {buffer for s in anatomy.stages if id(s) not in given for buffer in read(s)}

    def kept(buffer: tirx.Buffer) -> bool:
        return buffer in elsewhere or not anatomy.is_intermediate(buffer)

    left = inline_pointwise(stages, kept)
    out: list[tirx.Stmt] = []
    finished: Stage | None = None
    for position, stage in enumerate(left):
        if stage is finished:
            continue
        if isinstance(stage, Opaque):
            out.append(_parallel_nest(stage.statement, target))
        elif stage.reduction:
            finished = _finishing(stage, left[position + 1 :], kept)
            out.append(Reduction(stage, finished, target).emit())
        else:
            out.append(emit_map(stage, target))
    return out


def _finishing(stage: Stage, later: Sequence[Stage | Opaque], kept: Callable[[tirx.Buffer], bool]) -> Stage | None:
    """The pointwise stage right behind a reduction that alone reads its result, each element where it is made."""
    readers = [s for s in later if any(r.same_as(stage.buffer) for r in read(s))]
    if len(readers) != 1 or readers[0] is not later[0] or kept(stage.buffer):
        return None
    (reader,) = readers
    if not isinstance(reader, Stage) or not reader.is_identity_store:
        return None
    if [int(s) for s in reader.buffer.shape] != [int(s) for s in stage.buffer.shape]:
        return None
    places = [load.indices for load in reader.loads if load.source.same_as(stage.buffer)]
    in_place = all(_at_own_axes(indices, reader) for indices in places)
    return reader if in_place and _at_own_axes(stage.indices, stage) else None


def _at_own_axes(indices: Sequence[tirx.Expr], stage: Stage) -> bool:
    """Whether the indices are the stage's own data-parallel axes, in order."""
    return len(indices) == len(stage.spatial) and all(
        i.same_as(v) or (e == 1 and isinstance(i, tirx.IntImm))
        for i, (v, e) in zip(indices, stage.spatial, strict=True)
    )


def _parallel_nest(nest: tirx.Stmt, target: TargetInfo) -> tirx.Stmt:
    """The nest as it is, its first data-parallel loop spread over the threads where its block says which those are."""
    loops: list[tirx.For] = []
    node = nest
    while isinstance(node, tirx.For):
        loops.append(node)
        node = node.body
    if not isinstance(node, s_tir.SBlockRealize) or target.threads < 2:
        return nest
    free = {v for v, a in zip(node.iter_values, node.block.iter_vars, strict=True) if int(a.iter_type) == 0}
    size = math.prod(int(n.extent) for n in loops if isinstance(n.extent, tirx.IntImm))
    which = next((i for i, n in enumerate(loops) if not b.is_one(n.extent)), None)
    if which is None or size <= SMALL or loops[which].loop_var not in free:
        return nest
    for i in range(len(loops) - 1, -1, -1):
        kind = ForKind.PARALLEL if i == which else loops[i].kind
        node = tirx.For(loops[i].loop_var, loops[i].min, loops[i].extent, kind, node)
    return node
