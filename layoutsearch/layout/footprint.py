"""How much memory an inference goes over: it decides in which cache a kernel finds its weights again."""

from __future__ import annotations

from layoutsearch.layout.graph import LayoutGraph

_SMALLEST, _LARGE = 1 << 16, 64 << 20


def footprint(graph: LayoutGraph) -> int:
    """Bytes of all constants, and of the activations that are alive together at most, rounded up by `footprint_class`.

    A plan may need a little more or less; the classes are far apart.
    """
    weights = sum(operand.info.bytes for op in graph.ops for operand in op.operands if operand.tensor is None)
    last: dict[str, int] = {}
    for step, op in enumerate(graph.ops):
        last.update({operand.tensor: step for operand in op.operands if operand.tensor is not None})
    last.update({operand.tensor: len(graph.ops) for operand in graph.outputs if operand.tensor is not None})
    alive = {t.name: t.bytes for t in graph.inputs}
    most = sum(alive.values())
    for step, op in enumerate(graph.ops):
        alive.update({t.name: t.bytes for t in op.results})
        most = max(most, sum(alive.values()))
        alive = {name: size for name, size in alive.items() if last.get(name, step) > step}
    return footprint_class(weights + most)


def footprint_class(size: int) -> int:
    """The power of two that holds `size` bytes, of four beyond 64 MiB: models as large share measurements."""
    bound = _SMALLEST
    while bound < size:
        bound *= 2 if bound < _LARGE else 4
    return bound
