"""Outputs that are handed out as they are made: they lie in buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from layoutsearch.errors import SpaceError
from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.layout.io_layouts import BorderRules
from layoutsearch.layout.scopes import GLOBAL
from layoutsearch.search.workloads import KernelNode


def in_buffers(nodes: Sequence[KernelNode], graph: LayoutGraph, rules: BorderRules) -> tuple[KernelNode, ...]:
    """The kernels without the candidates whose result would leave the model in a texture.

    Raises:
        SpaceError: that leaves a kernel none.
    """
    owner = {name: i for i, node in enumerate(nodes) for name in node.members}
    found = list(nodes)
    for place, output in enumerate(graph.outputs):
        producer = graph.producers.get(output.tensor or "")
        if producer is None:
            continue
        index = owner[producer.name]
        node, free = found[index], place in rules.free_outputs
        layout = rules.fixed.of_output(place, output)
        # What is transformed on its way out comes out of a buffer.
        kept = tuple(c for c in node.choices if c is None or c.scope == GLOBAL or not (free or c.out == layout))
        if not kept:
            raise SpaceError(
                f"op {producer.id} is in a texture by its rule, and makes output {place} in the layout that "
                "--io-layout wants: give its rule the scope global too"
            )
        found[index] = replace(node, choices=kept)
    return tuple(found)
