"""One skeleton solved exactly under many costs at once.

To draw from a posterior means to solve the same structure some hundred times. What depends on the structure alone (the
variables, the elimination order, which cost enters which cell of which table) is worked out once; the costs then go
through bucket elimination together, with the instance as the first axis of every table. The encoding is that of
`search.factors`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from layoutsearch.search.cost_index import CostIndex, FloatArray, IntArray
from layoutsearch.search.eliminate import Order, elimination_order
from layoutsearch.search.factors import Factor, FactorGraph
from layoutsearch.search.problem import LayoutProblem, NoAssignmentError, Node, Tensor
from layoutsearch.search.skeleton import Skeleton, SkeletonTensor
from layoutsearch.search.solve import solve

# Cells of the largest table of one instance; wider graphs are solved one by one.
_MAX_CELLS = 200_000
# Cells of the largest table of all instances that run together: 8 bytes each, a few of them live at a time.
_TOGETHER = 2_000_000
# As in `factors`: a node with more cells over its ports becomes one variable.
_NODE_CELLS = 4096
# Readers of a tensor up to which it is one table; above, yes/no variables say "somebody pays for this layout".
_DIRECT_READERS = (8, 2)
_TENSOR_CELLS = 20_000
# Seconds for an instance that is solved alone.
_SOLVE_S = 20.0


@dataclass(frozen=True)
class _Table:
    """A factor: the sum (or, over a last axis, the minimum) of gathered costs, for every cell of `shape`."""

    scope: tuple[int, ...]
    shape: tuple[int, ...]
    gathers: tuple[IntArray, ...]

    def fill(self, costs: FloatArray) -> FloatArray:
        """Tables of all instances; costs (instances, entries)."""
        total: FloatArray = sum(_gather(costs, index) for index in self.gathers)  # type: ignore[assignment]
        return total.reshape(len(costs), *self.shape)


def _gather(costs: FloatArray, index: IntArray) -> FloatArray:
    picked = costs[:, index]
    return picked.min(axis=-1) if index.ndim == 2 else picked


@dataclass(frozen=True)
class _Port:
    """A tensor's layout as a function of one variable; `var` is None for a fixed layout."""

    var: int | None
    layouts: tuple[int, ...]


class _Encoder:
    """Variables and tables of a skeleton. Entries of the costs: pairs, transforms, a zero, an infinity."""

    def __init__(self, index: CostIndex) -> None:
        self._index, self._skeleton = index, index.skeleton
        self._zero = len(index.pairs) + len(index.transforms)
        self._node_domains: list[int] = []
        self._node_tables: list[_Table] = []
        # Per node: its variables, and the candidates of each cell, in the order of the gathered costs.
        self.nodes: list[tuple[tuple[int, ...], IntArray, IntArray]] = []
        self._ports: dict[tuple[int, tuple[int, ...]], _Port] = {}
        seen_as: list[dict[tuple[int, ...], None]] = [{} for _ in range(self._skeleton.size)]
        for tensor in self._skeleton.tensors:
            for node, table in ((tensor.producer, tensor.made), *((use.node, use.wanted) for use in tensor.uses)):
                if node is not None:
                    seen_as[node][table] = None
        for i, tables in enumerate(seen_as):
            self._encode_node(i, list(tables))

    def _encode_node(self, i: int, tables: list[tuple[int, ...]]) -> None:
        kernels = len(self._skeleton.nodes)
        is_kernel = i < kernels
        size = len(self._skeleton.nodes[i].choices if is_kernel else self._skeleton.inputs[i - kernels].layouts)
        costs = self._index.entries[i] if is_kernel else np.full(size, self._zero, dtype=np.intp)
        labels = {table: _labels(table) for table in tables}
        parts = [p for p in dict.fromkeys(labels.values()) if max(p) > 0]
        if math.prod(max(p) + 1 for p in parts) > _NODE_CELLS:
            joint = _labels(list(zip(*parts, strict=True)))
            labels, parts = dict.fromkeys(labels, joint), [joint]
        scope = tuple(range(len(self._node_domains), len(self._node_domains) + len(parts)))
        shape = tuple(max(p) + 1 for p in parts)
        self._node_domains += shape
        members: list[list[int]] = [[] for _ in range(math.prod(shape))]
        for c in range(size):
            at = tuple(p[c] for p in parts)
            members[int(np.ravel_multi_index(at, shape)) if at else 0].append(c)
        width = max(map(len, members))
        candidates = np.array([m + [0] * (width - len(m)) for m in members], dtype=np.intp)
        unused = np.array([[False] * len(m) + [True] * (width - len(m)) for m in members])
        entries = np.where(unused, self._zero + 1, costs[candidates])
        self._node_tables.append(_Table(scope, shape, (entries,)))
        self.nodes.append((scope, candidates, entries))
        for table, label in labels.items():
            layouts = [0] * (max(label) + 1)
            for value, layout in zip(label, table, strict=True):
                layouts[value] = layout
            self._ports[i, table] = _Port(scope[parts.index(label)] if label in parts else None, tuple(layouts))

    def encode(self, direct_readers: int) -> tuple[list[_Table], list[int]]:
        """All tables and the domains of all variables."""
        tables, domains = list(self._node_tables), list(self._node_domains)
        for t, tensor in enumerate(self._skeleton.tensors):
            source = self._port(tensor.producer, tensor.made)
            uses = list(dict.fromkeys(self._port(use.node, use.wanted) for use in tensor.uses))
            readers = list(dict.fromkeys(use.var for use in uses if use.var is not None))
            scope = (*(() if source.var is None else (source.var,)), *readers)
            cells = math.prod(domains[v] for v in scope)
            if len(readers) <= 1 or (len(readers) <= direct_readers and cells <= _TENSOR_CELLS):
                tables.append(self._direct(t, source, uses, scope, tuple(domains[v] for v in scope)))
            else:
                tables += self._shared(t, source, uses, domains)
        return tables, domains

    def _port(self, node: int | None, table: tuple[int, ...]) -> _Port:
        return _Port(None, table) if node is None else self._ports[node, table]

    def _entries(self, t: int, source: _Port, wanted: int) -> IntArray:
        """The cost of making a layout from each value of the source."""
        first, index = len(self._index.pairs), self._index
        keys = self._skeleton.keys
        entries = [first + index.transform[keys[t, s, wanted]] if s != wanted else self._zero for s in source.layouts]
        return np.array(entries, dtype=np.intp)

    def _direct(
        self, t: int, source: _Port, uses: list[_Port], scope: tuple[int, ...], shape: tuple[int, ...]
    ) -> _Table:
        """One table over the producer and every reader."""
        gathers = []
        for layout in sorted({w for use in uses for w in use.layouts}):
            asked = np.zeros(shape, dtype=np.bool_)
            for use in uses:
                hit = np.array(use.layouts) == layout
                asked |= hit[0] if use.var is None else _along(hit, scope.index(use.var), len(shape))
            entries = self._entries(t, source, layout)
            spread = entries[0] if source.var is None else _along(entries, scope.index(source.var), len(shape))
            index = np.where(asked, spread, self._zero)
            if (index != self._zero).any():
                gathers.append(index.reshape(-1))
        return _Table(scope, shape, tuple(gathers) or (np.full(math.prod(shape), self._zero, dtype=np.intp),))

    def _shared(self, t: int, source: _Port, uses: list[_Port], domains: list[int]) -> list[_Table]:
        """One yes/no variable per wanted layout: yes costs the transform, and a reader that wants it forbids no."""
        tables = []
        fixed = {use.layouts[0] for use in uses if use.var is None}
        over = () if source.var is None else (source.var,)
        for layout in sorted({w for use in uses for w in use.layouts}):
            entries = self._entries(t, source, layout)
            shape = (len(entries),) if over else ()
            if layout in fixed:
                tables.append(_Table(over, shape, (entries,)))
                continue
            asked = len(domains)
            domains.append(2)
            paid = np.stack([np.full_like(entries, self._zero), entries], axis=-1)
            tables.append(_Table((*over, asked), (*shape, 2), (paid.reshape(-1),)))
            for use in uses:
                if use.var is not None and layout in use.layouts:
                    forbid = np.full((len(use.layouts), 2), self._zero, dtype=np.intp)
                    forbid[np.array(use.layouts) == layout, 0] = self._zero + 1
                    tables.append(_Table((use.var, asked), forbid.shape, (forbid.reshape(-1),)))
        return tables


class BatchSolver:
    """Exact optima of a skeleton under many costs, which are laid out as `index` says.

    Costs are in us, `inf` is what is impossible; transforms cost at least 0.
    """

    def __init__(self, skeleton: Skeleton) -> None:
        self.index = CostIndex(skeleton)
        self._skeleton = skeleton
        encoder = _Encoder(self.index)
        self._nodes = encoder.nodes
        self._plan: tuple[list[_Table], list[int], Order] | None = None
        for readers in _DIRECT_READERS:
            tables, domains = encoder.encode(readers)
            graph = FactorGraph(domains, [Factor(t.scope, np.zeros(0)) for t in tables])
            order = elimination_order(graph, self._plan[2].largest if self._plan else _MAX_CELLS)
            if order and (self._plan is None or order.total < self._plan[2].total):
                self._plan = (tables, domains, order)

    @property
    def width(self) -> int | None:
        """Cells of the largest table of an instance; None where instances are solved one by one."""
        return self._plan[2].largest if self._plan else None

    def solve(self, kernels: FloatArray, transforms: FloatArray) -> tuple[IntArray, FloatArray]:
        """Optimal assignments and their costs.

        Args:
            kernels: shape (instances, pairs).
            transforms: shape (instances, transforms).

        Returns:
            Solutions, shape (instances, size of the skeleton), and costs, shape (instances,). Where an instance is
            too wide to be proven in time, the cost is its lower bound.

        Raises:
            NoAssignmentError: an instance has no assignment of finite cost.
        """
        if self._plan is None:
            return self._one_by_one(kernels, transforms)
        step = max(1, _TOGETHER // max(1, self._plan[2].largest))
        found = [
            self._together(kernels[k : k + step], transforms[k : k + step], self._plan)
            for k in range(0, len(kernels), step)
        ]
        costs = np.concatenate([c for _, c in found])
        if not np.isfinite(costs).all():
            raise NoAssignmentError("no assignment has a finite cost: a kernel or a transform is impossible throughout")
        return np.concatenate([a for a, _ in found]), costs

    def solve_one(self, kernels: FloatArray, transforms: FloatArray) -> tuple[tuple[int, ...], float]:
        """The same for one instance; costs of shape (pairs,) and (transforms,)."""
        assignments, costs = self.solve(kernels[None], transforms[None])
        return tuple(int(a) for a in assignments[0]), float(costs[0])

    def _together(
        self, kernels: FloatArray, transforms: FloatArray, plan: tuple[list[_Table], list[int], Order]
    ) -> tuple[IntArray, FloatArray]:
        tables, domains, order = plan
        size = len(kernels)
        costs = np.concatenate([kernels, transforms, np.zeros((size, 1)), np.full((size, 1), math.inf)], axis=1)
        position = {v: k for k, v in enumerate(order.variables)}
        buckets: list[list[tuple[tuple[int, ...], FloatArray]]] = [[] for _ in order.variables]
        constant = np.zeros(size)

        def put(scope: tuple[int, ...], table: FloatArray) -> None:
            nonlocal constant
            if scope:
                buckets[min(position[v] for v in scope)].append((scope, table))
            else:
                constant = constant + table

        for table in tables:
            put(table.scope, table.fill(costs))
        trail: list[tuple[int, tuple[int, ...], IntArray]] = []
        for k, v in enumerate(order.variables):
            rest = tuple(sorted({u for scope, _ in buckets[k] for u in scope} - {v}, key=position.__getitem__))
            joint = _sum(buckets[k], (*rest, v), domains, size)
            buckets[k] = []
            best = joint.argmin(axis=-1)
            trail.append((v, rest, best))
            put(rest, np.take_along_axis(joint, best[..., None], axis=-1)[..., 0])
        values = np.zeros((size, len(domains)), dtype=np.intp)
        rows = np.arange(size)
        for v, rest, best in reversed(trail):
            values[:, v] = best[(rows, *(values[:, u] for u in rest))]
        return self._decode(values, costs), constant

    def _decode(self, values: IntArray, costs: FloatArray) -> IntArray:
        rows = np.arange(len(values))
        found = []
        for (scope, candidates, entries), table in zip(self._nodes, self._plan[0] if self._plan else (), strict=False):
            cell = np.zeros(len(values), dtype=np.intp)
            if scope:
                cell = np.ravel_multi_index(tuple(values[:, v] for v in scope), table.shape)
            cheapest = costs[rows[:, None], entries[cell]].argmin(axis=1)
            found.append(candidates[cell, cheapest])
        return np.stack(found, axis=1) if found else np.zeros((len(values), 0), dtype=np.intp)

    def _one_by_one(self, kernels: FloatArray, transforms: FloatArray) -> tuple[IntArray, FloatArray]:
        skeleton, index = self._skeleton, self.index
        found = []
        for ours, moves in zip(kernels, transforms, strict=True):
            nodes = tuple(
                Node(node.root, tuple(ours[entries].tolist()))
                for node, entries in zip(skeleton.nodes, index.entries, strict=True)
            )
            nodes += tuple(Node(i.name, (0.0,) * len(i.layouts)) for i in skeleton.inputs)
            tensors = tuple(self._tensor(t, tensor, moves) for t, tensor in enumerate(skeleton.tensors))
            found.append(solve(LayoutProblem(nodes, tensors), time_limit_s=_SOLVE_S))
        return np.array([s.assignment for s in found], dtype=np.intp), np.array([s.lower_bound for s in found])

    def _tensor(self, t: int, tensor: SkeletonTensor, moves: FloatArray) -> Tensor:
        side = len(tensor.layouts)
        matrix = np.where(np.eye(side, dtype=np.bool_), 0.0, math.inf)
        for i in range(side):
            for j in range(side):
                key = self._skeleton.keys.get((t, i, j))
                if key is not None:
                    matrix[i, j] = moves[self.index.transform[key]]
        return Tensor(tensor.info.name, tensor.producer, tensor.made, tensor.uses, tuple(map(tuple, matrix.tolist())))


def _sum(
    factors: list[tuple[tuple[int, ...], FloatArray]], scope: tuple[int, ...], domains: list[int], size: int
) -> FloatArray:
    """Sum of the tables with the axes (instance, *scope)."""
    axis = {v: k for k, v in enumerate(scope)}
    out = np.zeros((size, *(domains[v] for v in scope)))
    for over, table in factors:
        order = sorted(range(len(over)), key=lambda k: axis[over[k]])
        shape = [size] + [1] * len(scope)
        for v in over:
            shape[1 + axis[v]] = domains[v]
        out += np.transpose(table, [0, *(1 + k for k in order)]).reshape(shape)
    return out


def _along(values: Any, axis: int, ndim: int) -> Any:
    shape = [1] * ndim
    shape[axis] = len(values)
    return values.reshape(shape)


def _labels(keys: Sequence[Any]) -> tuple[int, ...]:
    """Number equal keys alike, in order of first appearance."""
    seen: dict[Any, int] = {}
    return tuple(seen.setdefault(k, len(seen)) for k in keys)
