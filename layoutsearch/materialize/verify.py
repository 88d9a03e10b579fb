"""Requested is not achieved: every operator of a converted module against what was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tvm
from tvm import relax

from layoutsearch.errors import MaterializeError
from layoutsearch.layout import kinds
from layoutsearch.layout.border import Border
from layoutsearch.layout.candidate import Assignment, Candidate
from layoutsearch.layout.graph import LayoutGraph, OpNode, TensorInfo
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.rules import operand_layouts, result_layouts
from layoutsearch.materialize.writer import main_of
from layoutsearch.schedule.winograd import minimal


@dataclass(frozen=True)
class Mismatch:
    """An operator that is not in its requested layout."""

    op: str
    what: str
    requested: str
    achieved: str

    def __str__(self) -> str:
        return f"{self.op}: {self.what} is {self.achieved}, requested {self.requested}"


def find_mismatches(module: tvm.IRModule, graph: LayoutGraph, assignment: Assignment) -> list[Mismatch]:
    """Compare layout attributes and the shapes of all operands and results with the assignment."""
    calls = calls_by_name(module)
    found: list[Mismatch] = []
    needed = _used(graph)
    for op in graph.ops:
        if op.role is Role.FROZEN or op.name not in needed:
            continue
        call = calls.get(op.name)
        if call is None:
            found.append(Mismatch(op.name, "the operator", str(assignment[op.name]), "gone"))
            continue
        found += _algorithm(call, op, assignment) + _attributes(call, op, assignment) + _shapes(call, op, assignment)
    return found


def verify_layouts(module: tvm.IRModule, graph: LayoutGraph, assignment: Assignment) -> None:
    """Raise MaterializeError for the first operator that is not in its requested layout."""
    found = find_mismatches(module, graph, assignment)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise MaterializeError(f"{found[0]}{more}")


def verify_border(module: tvm.IRModule, graph: LayoutGraph, border: Border) -> None:
    """Raise MaterializeError for the first input or output that has not the shape of its layout."""
    main = main_of(module)
    given = [(t.name, t, border.of_input(t)) for t in graph.inputs]
    made = [(f"output {i}", o.info, border.of_output(i, o)) for i, o in enumerate(graph.outputs)]
    have = [s for p in main.params for s in _leaf_shapes(p.ty)] + _leaf_shapes(main.body.body.ty)
    for (name, info, layout), shape in zip([*given, *made], have, strict=True):
        wanted = planned_shape(info, layout, None)
        if wanted is not None and wanted != shape:
            raise MaterializeError(f"{Mismatch(name, f'its shape in {layout}', str(wanted), str(shape))}")


def calls_by_name(module: tvm.IRModule) -> dict[str, relax.Call]:
    """Calls of the module's `main` by bound variable."""
    return {
        binding.var.name: binding.value
        for block in main_of(module).body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call)
    }


def _used(graph: LayoutGraph) -> set[str]:
    """Operators whose result reaches an output; the rest is dead code that a conversion may drop."""
    live, todo = set(), [graph.producers[o.tensor] for o in graph.outputs if o.tensor in graph.producers]
    while todo:
        op = todo.pop()
        if op.name in live:
            continue
        live.add(op.name)
        todo += [graph.producers[o.tensor] for o in op.operands if o.tensor in graph.producers]
    return live


def _algorithm(call: relax.Call, op: OpNode, assignment: Assignment) -> list[Mismatch]:
    choice = assignment[op.name]
    if op.op == kinds.EXTERN_CALL:
        # Its operands are compared below; here, that the function it calls takes and makes just those.
        types = [str(a.ty) for a in call.args] + [str(call.ty)]
        function = call.op.ty if isinstance(call.op, tvm.ir.GlobalVar) else None
        takes = [str(ty) for ty in (*function.params, function.ret)] if function is not None else []
        return [] if takes == types else [Mismatch(op.name, "the function", ", ".join(types), ", ".join(takes))]
    wanted = kinds.CONV_WINOGRAD if choice.winograd else kinds.CONV_EXTERN if choice.extern else op.op
    return [] if call.op.name == wanted else [Mismatch(op.name, "the operator", wanted, call.op.name)]


def _attributes(call: relax.Call, op: OpNode, assignment: Mapping[str, object]) -> list[Mismatch]:
    choice = assignment[op.name]
    wanted: dict[str, Layout | None]
    if op.op in kinds.CONVOLUTIONS:
        wanted = {"data_layout": choice.data, "kernel_layout": choice.kernel, "out_layout": choice.out}  # type: ignore[attr-defined]
    elif op.op in kinds.POOLS:
        wanted = {"layout": choice.data, "out_layout": choice.out}  # type: ignore[attr-defined]
    elif op.op == kinds.RESIZE:
        wanted = {"layout": choice.data}  # type: ignore[attr-defined]
    else:
        return []
    return [
        Mismatch(op.name, name, str(layout), str(getattr(call.attrs, name)))
        for name, layout in wanted.items()
        if str(getattr(call.attrs, name)) != str(layout)
    ]


def _shapes(call: relax.Call, op: OpNode, assignment: Assignment) -> list[Mismatch]:
    choice = assignment[op.name]
    found = []
    operands = [t for a in call.args for t in _leaf_shapes(a.ty)]
    pairs = [
        (f"operand {i}", o.info, lay, got)
        for i, (o, lay, got) in enumerate(zip(op.operands, operand_layouts(op, choice), operands, strict=False))
    ]
    pairs += [
        (f"result {i}", t, lay, got)
        for i, (t, lay, got) in enumerate(
            zip(op.results, result_layouts(op, choice), _leaf_shapes(call.ty), strict=True)
        )
    ]
    for what, info, layout, got in pairs:
        shape = planned_shape(info, layout, choice, is_kernel=what == "operand 1")
        if shape is not None and shape != got:
            found.append(Mismatch(op.name, f"shape of {what} in {layout}", str(shape), str(got)))
    return found


def planned_shape(
    info: TensorInfo, layout: Layout | None, choice: Candidate | None, *, is_kernel: bool = False
) -> tuple[int, ...] | None:
    """Shape in memory of an operand or result of an operator that runs as `choice`; None where it is not static.

    `is_kernel` is for the weights of a convolution, which Winograd's algorithms have transformed, and external
    libraries pack as they like: None.
    """
    if is_kernel and choice is not None and choice.extern:
        return None
    if info.shape is None or layout is None:
        return info.shape
    logical = info.shape
    if is_kernel and choice is not None and choice.winograd:
        points = minimal(choice.winograd).points
        logical = tuple(points if a in "HW" else e for a, e in zip(info.axes, logical, strict=True))
    return layout.physical_shape(logical, info.axes)


def _leaf_shapes(ty: relax.Type) -> list[tuple[int, ...] | None]:
    if isinstance(ty, relax.TupleType):
        return [s for f in ty.fields for s in _leaf_shapes(f)]
    if not isinstance(ty, relax.TensorType):
        return []
    if not isinstance(ty.shape, relax.ShapeExpr) or not all(isinstance(v, tvm.tirx.IntImm) for v in ty.shape.values):
        return [None]
    return [tuple(int(v) for v in ty.shape.values)]
