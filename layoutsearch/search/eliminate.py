"""Bucket elimination: the exact optimum by dynamic programming, where the graph is narrow enough.

Variables are eliminated one by one in a min-fill order; each elimination minimises one variable out of the sum of all
tables that mention it. Time and memory are the largest such table, which is known before any is built.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from layoutsearch.search.factors import Factor, FactorGraph, FactorGraphBuilder, FloatArray, IntArray
from layoutsearch.search.problem import LayoutProblem, NoAssignmentError

MAX_CELLS = 10**7
# Cells of all tables together, as a multiple of the limit for one: bounds time where many tables are near the limit.
_TOTAL_FACTOR = 10
# numpy arrays have at most 32 axes before version 2.
_MAX_AXES = 30
# Encodings to try: tensors with more free readers than this get yes/no variables. The narrowest graph wins.
_DIRECT_READERS = (8, 2, 1)


@dataclass(frozen=True)
class Order:
    """An elimination order: the variables, and the cells of the largest table and of all tables."""

    variables: tuple[int, ...]
    largest: int
    total: int


def least_cells(graph: FactorGraph) -> int:
    """A size that some table reaches in every elimination order.

    In any set of variables, the one that goes first has all its neighbours in the set still around it. So the smallest
    such table is a lower bound, for every set; removing the smallest again and again passes through the best set.
    """
    neighbours = _neighbours(graph)
    cells = [
        d * math.prod(graph.domains[u] for u in around) for d, around in zip(graph.domains, neighbours, strict=True)
    ]
    heap = [(c, v) for v, c in enumerate(cells)]
    heapq.heapify(heap)
    least = 0
    while heap:
        c, v = heapq.heappop(heap)
        if c != cells[v]:
            continue
        least = max(least, c)
        cells[v] = 0
        for u in neighbours[v]:
            neighbours[u].discard(v)
            cells[u] //= graph.domains[v]
            heapq.heappush(heap, (cells[u], u))
    return least


def _neighbours(graph: FactorGraph) -> list[set[int]]:
    neighbours: list[set[int]] = [set() for _ in graph.domains]
    for factor in graph.factors:
        for v in factor.scope:
            neighbours[v].update(factor.scope)
    for v, around in enumerate(neighbours):
        around.discard(v)
    return neighbours


def elimination_order(graph: FactorGraph, max_cells: int, *, by_cells: bool = False) -> Order | None:
    """Greedy order: least fill-in first (ties: smallest table, then lowest index), or smallest table first.

    None as soon as a table of more than `max_cells` cells would be needed.
    """
    neighbours = _neighbours(graph)

    def key(v: int) -> tuple[int, int]:
        around = neighbours[v]
        cells = graph.domains[v] * math.prod(graph.domains[u] for u in around)
        fill = sum(len(around) - 1 - len(around & neighbours[u]) for u in around) // 2
        return (cells, fill) if by_cells else (fill, cells)

    keys = [key(v) for v in range(len(graph.domains))]
    heap = [(k, v) for v, k in enumerate(keys)]
    heapq.heapify(heap)
    alive = [True] * len(keys)
    order, largest, total = [], 0, 0
    while heap:
        k, v = heapq.heappop(heap)
        if not alive[v] or k != keys[v]:
            continue
        cells = k[0] if by_cells else k[1]
        largest, total = max(largest, cells), total + cells
        if largest > max_cells or total > _TOTAL_FACTOR * max_cells or len(neighbours[v]) >= _MAX_AXES:
            return None
        alive[v] = False
        order.append(v)
        around = neighbours[v]
        touched = set(around)
        for u in around:
            neighbours[u] |= around
            neighbours[u] -= {u, v}
        for u in around:
            touched |= neighbours[u]
        for u in sorted(touched):
            new = key(u)
            if new != keys[u]:
                keys[u] = new
                heapq.heappush(heap, (new, u))
    return Order(tuple(order), largest, total)


def _sum(factors: list[Factor], scope: tuple[int, ...], domains: list[int]) -> FloatArray:
    """Sum of the factors as one table with the axes of `scope`."""
    axis = {v: k for k, v in enumerate(scope)}
    out = np.zeros(tuple(domains[v] for v in scope))
    for factor in factors:
        order = sorted(range(len(factor.scope)), key=lambda k: axis[factor.scope[k]])
        shape = [1] * len(scope)
        for v in factor.scope:
            shape[axis[v]] = domains[v]
        out += np.transpose(factor.table, order).reshape(shape)
    return out


def minimize(graph: FactorGraph, order: Order) -> tuple[list[int], float]:
    """Values of all variables at the minimum of the sum of all factors, and that minimum (may be `inf`).

    Of equal choices the lowest value is taken, so the result is the same every time.
    """
    position = {v: k for k, v in enumerate(order.variables)}
    buckets: list[list[Factor]] = [[] for _ in order.variables]
    constant = 0.0

    def put(factor: Factor) -> None:
        nonlocal constant
        if factor.scope:
            buckets[min(position[v] for v in factor.scope)].append(factor)
        else:
            constant += float(factor.table)

    for factor in graph.factors:
        put(factor)
    trail: list[tuple[int, tuple[int, ...], IntArray]] = []
    for k, v in enumerate(order.variables):
        rest = sorted({u for factor in buckets[k] for u in factor.scope} - {v}, key=position.__getitem__)
        table = _sum(buckets[k], (*rest, v), graph.domains)
        buckets[k] = []
        choice = table.argmin(axis=-1)
        # A byte or two per cell is all that has to stay until the way back.
        small = np.uint8 if graph.domains[v] <= 256 else np.int32
        trail.append((v, tuple(rest), choice.astype(small)))
        put(Factor(tuple(rest), np.take_along_axis(table, choice[..., None], axis=-1)[..., 0]))
    values = [0] * len(graph.domains)
    for v, rest_of_v, choice in reversed(trail):
        values[v] = int(choice[tuple(values[u] for u in rest_of_v)])
    return values, constant


def eliminate(problem: LayoutProblem, *, max_cells: int = MAX_CELLS) -> tuple[int, ...] | None:
    """An optimal assignment, or None if every way to eliminate needs a table of more than `max_cells` cells.

    Raises:
        NoAssignmentError: every assignment costs `inf`.
    """
    builder = FactorGraphBuilder(problem)
    best: tuple[Order, FactorGraph] | None = None
    for readers in _DIRECT_READERS:
        graph = builder.build(readers)
        if least_cells(graph) > max_cells:
            continue
        for by_cells in (False, True):
            order = elimination_order(graph, best[0].largest if best else max_cells, by_cells=by_cells)
            if order and (best is None or (order.largest, order.total) < (best[0].largest, best[0].total)):
                best = (order, graph)
    if best is None:
        return None
    values, minimum = minimize(best[1], best[0])
    if minimum == math.inf:
        raise NoAssignmentError(
            "no assignment has a finite cost: every choice meets an infeasible candidate or transform"
        )
    return best[1].assignment(values)
