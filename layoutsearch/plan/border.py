"""The layouts in which a plan's module takes its inputs and gives its outputs, and arrays brought to and from them.

A model's samples and the outputs of other runtimes are in the model's own layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from layoutsearch.errors import PlanError
from layoutsearch.layout.border import Border
from layoutsearch.layout.graph import LayoutGraph, TensorInfo
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.rules import why_not_stored
from layoutsearch.materialize.moves import move_array
from layoutsearch.plan.plan import LayoutPlan

Entry = Mapping[str, Any]


def border_of(plan: LayoutPlan, graph: LayoutGraph) -> Border:
    """The plan's border for the graph of its model.

    Raises:
        PlanError: the plan has a layout that an input or output of this model cannot have.
    """
    inputs = {}
    for info, entry in zip(graph.inputs, _entries(plan, "inputs"), strict=False):
        layout = _layout(f"input {entry['name']}", entry, info)
        if layout is not None:
            inputs[info.name] = layout
    outputs = {}
    for position, (output, entry) in enumerate(zip(graph.outputs, _entries(plan, "outputs"), strict=False)):
        layout = _layout(f"output {entry['name']}", entry, output.info)
        if layout is not None:
            outputs[position] = layout
    return Border(inputs, outputs)


def _entries(plan: LayoutPlan, what: str) -> Sequence[Entry]:
    return tuple(plan.model.get(what, ()))


def _layout(what: str, entry: Entry, info: TensorInfo) -> Layout | None:
    """The layout of a tensor; None for the model's own, which plans of before there was a choice do not name."""
    axes, name = entry.get("axes", info.axes), entry.get("layout", info.axes)
    if axes != info.axes:
        raise PlanError(f"{what} has the axes {info.axes}, the plan is for {axes}; tune again")
    if name == axes:
        return None
    try:
        layout = Layout(name)
    except ValueError as error:
        raise PlanError(f"{what}: {error}; restore the plan or tune again") from None
    reason = why_not_stored(layout, info)
    if reason is not None:
        raise PlanError(f"{what} cannot be {layout}: {reason}; restore the plan or tune again")
    return layout


def border_entry(info: TensorInfo, layout: Layout | None) -> dict[str, str]:
    """What a plan says of the layout of an input or output; nothing of one without layouts."""
    if len(info.axes) != 4 or info.shape is None or layout is None:
        return {}
    return {"axes": info.axes, "layout": str(layout)}


def to_plan(plan: LayoutPlan, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Inputs of the model as the plan's module takes them."""
    return [_moved(a, e, forward=True) for a, e in _with_entries(arrays, _entries(plan, "inputs"))]


def from_plan(plan: LayoutPlan, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Outputs of the plan's module as the model gives them."""
    return tuple(_moved(a, e, forward=False) for a, e in _with_entries(arrays, _entries(plan, "outputs")))


def _with_entries(arrays: Sequence[np.ndarray], entries: Sequence[Entry]) -> list[tuple[np.ndarray, Entry]]:
    """Each array with its entry; plans of before there was a choice have none for outputs."""
    return list(zip(arrays, [*entries, *({} for _ in arrays[len(entries) :])], strict=True))


def _moved(array: np.ndarray, entry: Entry, *, forward: bool) -> np.ndarray:
    if not (entry.get("layout") and entry["layout"] != entry["axes"]):
        return array
    axes, layout = Layout(entry["axes"]), Layout(entry["layout"])
    return move_array(array, axes, layout) if forward else move_array(array, layout, axes)
