"""The layout problem as a factor graph for bucket elimination: variables with small domains, tables over them.

Two things keep the tables small. A node is not one variable but one per *port class*: the distinct ways its candidates
split into layouts on a tensor, so a convolution with 10 input and 10 output layouts is two variables of 10 values, not
one of 100. A tensor with many readers may be encoded by one yes/no variable per wanted layout ("somebody pays for L")
instead of one table over all of its readers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from layoutsearch.search.problem import LayoutProblem, NoAssignmentError, Tensor

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.intp]

# Above this many cells a node's table over its port classes is mostly empty; one variable for the node is smaller.
_NODE_CELLS = 4096
# A single tensor's table over its producer and readers.
_TENSOR_CELLS = 200_000


@dataclass(frozen=True)
class Port:
    """A tensor's layout as a function of one variable: `layouts[value]`. `var` is None for a fixed layout."""

    var: int | None
    layouts: tuple[int, ...]


@dataclass(frozen=True)
class Factor:
    """A table with one axis per variable of `scope`, in that order."""

    scope: tuple[int, ...]
    table: FloatArray


@dataclass(frozen=True)
class NodeVars:
    """How a node is encoded: its variables, and the candidate behind each cell of their joint table."""

    scope: tuple[int, ...]
    candidates: IntArray


@dataclass
class FactorGraph:
    """Domain sizes, tables, and the way back from variables to candidates."""

    domains: list[int] = field(default_factory=list)
    factors: list[Factor] = field(default_factory=list)
    nodes: list[NodeVars] = field(default_factory=list)

    def assignment(self, values: list[int]) -> tuple[int, ...]:
        """The candidate of every node, given the value of every variable."""
        return tuple(int(n.candidates[tuple(values[v] for v in n.scope)]) for n in self.nodes)


class FactorGraphBuilder:
    """Builds factor graphs of one problem; they differ in how tensors with several readers are encoded."""

    def __init__(self, problem: LayoutProblem) -> None:
        self._problem = problem
        self._base = FactorGraph()
        tables: list[list[tuple[int, ...]]] = [[] for _ in problem.nodes]
        for tensor in problem.tensors:
            if tensor.producer is not None:
                tables[tensor.producer].append(tensor.made)
            for use in tensor.uses:
                if use.node is not None:
                    tables[use.node].append(use.wanted)
        self._ports: list[dict[tuple[int, ...], Port]] = [
            self._encode_node(i, list(dict.fromkeys(t))) for i, t in enumerate(tables)
        ]

    def _encode_node(self, i: int, tables: list[tuple[int, ...]]) -> dict[tuple[int, ...], Port]:
        """Add the node's variables and its table; say which variable each of its layout tables follows."""
        graph = self._base
        costs = np.array(self._problem.nodes[i].costs, dtype=np.float64)
        alive = np.flatnonzero(np.isfinite(costs))
        if not alive.size:
            raise NoAssignmentError(f"node {i} ({self._problem.nodes[i].name}) has no feasible candidate")
        classes = {t: tuple(_labels([t[a] for a in alive])) for t in tables}
        partitions = [p for p in dict.fromkeys(classes.values()) if max(p) > 0]
        cells = math.prod(max(p) + 1 for p in partitions)
        if partitions and cells > _NODE_CELLS:
            joint = tuple(_labels(list(zip(*partitions, strict=True))))
            if max(joint) + 1 < cells:
                partitions = [joint]
                classes = dict.fromkeys(classes, joint)
        scope = tuple(range(len(graph.domains), len(graph.domains) + len(partitions)))
        graph.domains += [max(p) + 1 for p in partitions]
        shape = tuple(max(p) + 1 for p in partitions)
        table = np.full(shape, math.inf)
        candidates = np.full(shape, alive[0], dtype=np.intp)
        for k, a in enumerate(alive):
            cell = tuple(p[k] for p in partitions)
            if costs[a] < table[cell]:
                table[cell], candidates[cell] = costs[a], a
        graph.nodes.append(NodeVars(scope, candidates))
        graph.factors.append(Factor(scope, table))
        ports: dict[tuple[int, ...], Port] = {}
        for t, p in classes.items():
            layouts = [0] * (max(p) + 1)
            for k, a in enumerate(alive):
                layouts[p[k]] = t[a]
            ports[t] = Port(scope[partitions.index(p)] if p in partitions else None, tuple(layouts))
        return ports

    def _port(self, node: int | None, table: tuple[int, ...]) -> Port:
        return Port(None, table) if node is None else self._ports[node][table]

    def build(self, max_direct_readers: int) -> FactorGraph:
        """The factor graph where tensors of up to `max_direct_readers` free readers get one table each.

        A tensor whose table would be too large gets yes/no variables whatever the limit says.
        """
        graph = FactorGraph(list(self._base.domains), list(self._base.factors), list(self._base.nodes))
        for tensor in self._problem.tensors:
            source = self._port(tensor.producer, tensor.made)
            uses = list(dict.fromkeys(self._port(use.node, use.wanted) for use in tensor.uses))
            free = list(dict.fromkeys(use.var for use in uses if use.var is not None))
            scope = tuple(([] if source.var is None else [source.var]) + free)
            cells = math.prod(graph.domains[v] for v in scope)
            if len(free) <= 1 or (len(free) <= max_direct_readers and cells <= _TENSOR_CELLS):
                graph.factors.append(_direct(tensor, source, uses, scope, graph.domains))
            else:
                _shared(tensor, source, uses, graph)
        return graph


def _labels(keys: list[int] | list[tuple[int, ...]]) -> list[int]:
    """Number equal keys alike, in order of first appearance."""
    seen: dict[int | tuple[int, ...], int] = {}
    return [seen.setdefault(k, len(seen)) for k in keys]


def _along(values: npt.NDArray[np.generic], var: int, scope: tuple[int, ...]) -> npt.NDArray[np.generic]:
    """Values of one variable, shaped to broadcast over a table with the axes of `scope`."""
    shape = [1] * len(scope)
    shape[scope.index(var)] = len(values)
    return values.reshape(shape)


def _source_cost(tensor: Tensor, source: Port, layout: int) -> FloatArray:
    """Cost of making `layout` from each value of the source."""
    return tensor.matrix[list(source.layouts), layout]


def _direct(tensor: Tensor, source: Port, uses: list[Port], scope: tuple[int, ...], domains: list[int]) -> Factor:
    """One table over the producer and every reader."""
    table = np.zeros(tuple(domains[v] for v in scope))
    for layout in sorted({w for use in uses for w in use.layouts}):
        asked: npt.NDArray[np.generic] = np.zeros((1,) * len(scope), dtype=np.bool_)
        for use in uses:
            hit = np.array(use.layouts) == layout
            asked = asked | (hit[0] if use.var is None else _along(hit, use.var, scope))  # type: ignore[operator]
        cost = _source_cost(tensor, source, layout)
        spread = cost[0] if source.var is None else _along(cost, source.var, scope)
        table += np.where(asked, spread, 0.0)
    return Factor(scope, table)


def _shared(tensor: Tensor, source: Port, uses: list[Port], graph: FactorGraph) -> None:
    """One yes/no variable per wanted layout: yes costs the transform, and a reader that wants it forbids no.

    Exact because transforms cost at least 0: the minimum never says yes without need.
    """
    fixed = {use.layouts[0] for use in uses if use.var is None}
    for layout in sorted({w for use in uses for w in use.layouts}):
        cost = _source_cost(tensor, source, layout)
        if not cost.any():
            continue
        source_scope = () if source.var is None else (source.var,)
        if layout in fixed:
            graph.factors.append(Factor(source_scope, cost if source_scope else cost[0]))
            continue
        asked = len(graph.domains)
        graph.domains.append(2)
        paid = np.stack([np.zeros_like(cost), cost], axis=-1)
        graph.factors.append(Factor((*source_scope, asked), paid if source_scope else paid[0]))
        for use in uses:
            if use.var is not None and layout in use.layouts:
                forbid = np.zeros((len(use.layouts), 2))
                forbid[np.array(use.layouts) == layout, 0] = math.inf
                graph.factors.append(Factor((use.var, asked), forbid))
