"""Which layouts a model's inputs and outputs may have, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layoutsearch.layout.candidates import OpSpace
from layoutsearch.layout.graph import LayoutGraph, TensorInfo
from layoutsearch.layout.io_layouts import BorderRules
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.rules import operand_layouts, result_layouts


@dataclass(frozen=True)
class BorderReport:
    """An input or output: `input NAME` or `output NAME`, its layouts, and whether the search chooses among them."""

    what: str
    layouts: tuple[str, ...]
    free: bool

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"what": self.what, "layouts": list(self.layouts), "free": self.free}


def border_reports(
    graph: LayoutGraph,
    rules: BorderRules,
    inputs: Sequence[str],
    outputs: Sequence[str],
    spaces: Mapping[str, OpSpace],
) -> tuple[BorderReport, ...]:
    """Inputs, then outputs, in order; `inputs` and `outputs` are their names in the model's file."""
    found = []
    for name, info in zip(inputs, graph.inputs, strict=True):
        free = info.name in rules.free_inputs
        layouts = _read(graph, info, spaces) if free else [rules.fixed.of_input(info)]
        found.append(_report(f"input {name}", info, layouts, free))
    for position, (name, output) in enumerate(zip(outputs, graph.outputs, strict=True)):
        free = position in rules.free_outputs
        layouts = _made(graph, output.tensor, spaces) if free else [rules.fixed.of_output(position, output)]
        found.append(_report(f"output {name}", output.info, layouts, free))
    return tuple(found)


def _report(what: str, info: TensorInfo, layouts: Sequence[Layout | None], free: bool) -> BorderReport:
    known = layouts if len(info.axes) == 4 else ()
    return BorderReport(what, tuple(dict.fromkeys(str(layout) for layout in known if layout is not None)), free)


def _read(graph: LayoutGraph, info: TensorInfo, spaces: Mapping[str, OpSpace]) -> list[Layout | None]:
    """Layouts that the operators may read a tensor in, its own first."""
    readers = [(op, index, c) for op, index in graph.consumers[info.name] for c in _choices(spaces, op.name)]
    return [info.initial, *(operand_layouts(op, choice)[index] for op, index, choice in readers)]


def _made(graph: LayoutGraph, tensor: str | None, spaces: Mapping[str, OpSpace]) -> list[Layout | None]:
    """Layouts that a tensor may be made in."""
    op = graph.producers.get(tensor or "")
    if op is None:
        return [graph.tensors[tensor].initial] if tensor in graph.tensors else []
    place = [t.name for t in op.results].index(tensor or "")
    return [result_layouts(op, choice)[place] for choice in _choices(spaces, op.name)]


def _choices(spaces: Mapping[str, OpSpace], name: str) -> Sequence[Any]:
    return spaces[name].candidates if name in spaces else (None,)
