"""The layout problem solved a second time, by a textbook program that shares nothing with the package's solvers.

One binary per candidate; per tensor and pair of layouts a variable that is paid, `paid >= made + wanted - 1` for every
reader. Weak but plain: no flows, no sharing of rows, no reductions, no descent.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from layoutsearch.search.problem import LayoutProblem


def textbook_optimum(problem: LayoutProblem) -> float:
    """Cost of the best assignment; `inf` if there is none."""
    first = np.cumsum([0, *(len(node.costs) for node in problem.nodes)])
    objective = [c for node in problem.nodes for c in node.costs]
    rows: list[tuple[dict[int, float], float, float]] = []
    for i, node in enumerate(problem.nodes):
        rows.append(({int(first[i]) + a: 1.0 for a in range(len(node.costs))}, 1.0, 1.0))
    for tensor in problem.tensors:
        for f in range(len(tensor.cost)):
            for w in range(len(tensor.cost)):
                if f == w:
                    continue
                making = _sum(tensor.producer, tensor.made, f, first)
                asking = [_sum(use.node, use.wanted, w, first) for use in tensor.uses]
                if making is None or all(a is None for a in asking):
                    continue
                paid = len(objective)
                objective.append(tensor.cost[f][w])
                for a in asking:
                    if a is None:
                        continue
                    row: dict[int, float] = {paid: 1.0}
                    for column in (*making[0], *a[0]):
                        row[column] = row.get(column, 0.0) - 1.0
                    rows.append((row, making[1] + a[1] - 1.0, math.inf))
    costs = np.array(objective)
    possible = np.isfinite(costs)
    if not len(costs):
        return 0.0
    matrix = lil_matrix((max(1, len(rows)), len(costs)))
    low, high = np.full(matrix.shape[0], -math.inf), np.full(matrix.shape[0], math.inf)
    for k, (row, least, most) in enumerate(rows):
        for column, value in row.items():
            matrix[k, column] = value
        low[k], high[k] = least, most
    result = milp(
        np.where(possible, costs, 0.0),
        integrality=np.ones(len(costs)),
        bounds=Bounds(0.0, possible.astype(float)),
        constraints=LinearConstraint(matrix.tocsr(), low, high),
        options={"mip_rel_gap": 0.0},
    )
    if result.status == 2:
        return math.inf
    assert result.status == 0, result.message
    return float(costs[possible] @ np.round(result.x[possible]))


def _sum(node: int | None, table: tuple[int, ...], layout: int, first: np.ndarray) -> tuple[list[int], float] | None:
    """Columns whose sum says that a node makes or wants a layout, and a constant; None if it never does."""
    if node is None:
        return ([], 1.0) if table[0] == layout else None
    columns = [int(first[node]) + a for a, k in enumerate(table) if k == layout]
    return (columns, 0.0) if columns else None
