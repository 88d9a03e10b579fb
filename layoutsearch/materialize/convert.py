"""The canonical module in the layouts of an assignment, by TVM's ConvertLayout.

Three steps: `prepare` puts in between what the pass has no direct way for, the pass runs with layout inference that
answers from the assignment, `resolve` checks what it inserted and makes one transform of it per (tensor, layout).
"""

from __future__ import annotations

from dataclasses import replace

import tvm
from tvm import relax

from layoutsearch.errors import InfeasibleError
from layoutsearch.layout.border import ORIGINAL, Border
from layoutsearch.layout.candidate import Assignment
from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.rules import check_assignment, made_layouts
from layoutsearch.materialize.answers import answer, view_answer
from layoutsearch.materialize.externs import put_back, set_apart
from layoutsearch.materialize.inference import layout_inference
from layoutsearch.materialize.objects import infer_output
from layoutsearch.materialize.prepare import is_step, prepare
from layoutsearch.materialize.resolve import Materialized, TransformInfo, resolve
from layoutsearch.materialize.verify import verify_border, verify_layouts
from layoutsearch.materialize.writer import main_of

__all__ = ["Materialized", "TransformInfo", "materialize"]


def materialize(
    module: tvm.IRModule, graph: LayoutGraph, assignment: Assignment, border: Border = ORIGINAL
) -> Materialized:
    """Convert the canonical `module` (with its `graph`) to the layouts of `assignment`.

    The result's `main` has the same inputs and outputs, in the layouts of `border`. The conversion itself leaves them
    as they are: `resolve` takes off what the pass puts behind an input, or in front of an output.

    Raises:
        InfeasibleError: a choice is illegal, missing or for an unknown operator; nothing was converted.
        MaterializeError: the converted module is not what was asked for.
    """
    problems = check_assignment(graph, assignment)
    if problems:
        name, reason = problems[0]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InfeasibleError(f"{name}: {reason}{more}")
    module, functions = set_apart(module, graph)
    prepared = prepare(module, graph, assignment)
    converted = _convert(prepared, graph, assignment)
    result = resolve(converted, graph, assignment, border)
    result = replace(result, module=put_back(result.module, functions, graph, assignment))
    verify_layouts(result.module, graph, assignment)
    verify_border(result.module, graph, border)
    return result


def _convert(prepared: tvm.IRModule, graph: LayoutGraph, assignment: Assignment) -> tvm.IRModule:
    answers = {}
    made = made_layouts(graph, assignment)
    for block in main_of(prepared).body.blocks:
        for binding in block.bindings:
            name, value = binding.var.name, binding.value
            if not isinstance(value, relax.Call):
                continue
            if is_step(name):
                letters = "ABCDEFGH"[: value.ty.ndim]
                answers[value] = infer_output([letters], [letters], value.attrs)
            elif name in graph.views:
                view = graph.views[name]
                layout = made[view.tensor or ""]
                if layout is not None:
                    answers[value] = view_answer(value, _axes_before(value, view.info.axes), view.info.axes, layout)
            elif name in assignment and graph.by_name[name].role is not Role.FROZEN:
                answers[value] = answer(value, graph.by_name[name], assignment[name])
    with layout_inference(answers):
        # The callback only switches the pass from its map to per-call decisions; the answers hold them.
        return relax.transform.ConvertLayout({}, lambda call: {})(prepared)


def _axes_before(transpose: relax.Call, after: str) -> str:
    """Axis names of a transpose's operand, from those of its result."""
    axes = transpose.attrs.axes
    order = [int(a) % len(after) for a in axes] if axes is not None else list(reversed(range(len(after))))
    return "".join(after[order.index(i)] for i in range(len(after)))
