"""The layout assignment problem as a value: nodes with candidates, tensors with shared transforms.

Choose one candidate per node so as to minimise

    sum_i K(i, a_i)  +  sum_(tensor t, layout L) T(t, made -> L) * [L is wanted by a consumer of t, L != made]

A transform is paid once per tensor and wanted layout, however many consumers want it. Everything here is an index:
layouts are numbered per tensor, candidates per node; the caller keeps the meaning.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from layoutsearch.errors import LayoutSearchError


class NoAssignmentError(LayoutSearchError):
    """No assignment of finite cost exists, or none was found in the time given."""


@dataclass(frozen=True)
class Node:
    """An op that chooses among candidates.

    Attributes:
        name: for messages.
        costs: time of each candidate in the caller's unit; `inf` where it is infeasible. May not be empty.
    """

    name: str
    costs: tuple[float, ...]


@dataclass(frozen=True)
class Use:
    """One operand that reads a tensor.

    Attributes:
        node: the consumer's index, or None for a fixed consumer such as a model output.
        wanted: layout index wanted by each candidate of the consumer; a single entry if `node` is None.
    """

    node: int | None
    wanted: tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """A value that one node makes and others read.

    Attributes:
        name: for messages.
        producer: the producer's index, or None if the layout is fixed (a model input).
        made: layout index made by each candidate of the producer; a single entry if `producer` is None.
        uses: the operands that read it. A node may appear several times, once per operand.
        cost: `cost[made][wanted]`, time of the transform; `inf` where there is none, 0 on the diagonal. Any square
            array-like is accepted and stored as tuples; its side is the number of layouts of this tensor.
    """

    name: str
    producer: int | None
    made: tuple[int, ...]
    uses: tuple[Use, ...]
    cost: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "cost", tuple(tuple(float(c) for c in row) for row in self.cost))

    @property
    def n_layouts(self) -> int:
        """Number of layouts this tensor may have."""
        return len(self.cost)

    @cached_property
    def matrix(self) -> npt.NDArray[np.float64]:
        """`cost` as an array of shape (n_layouts, n_layouts)."""
        return np.array(self.cost, dtype=np.float64).reshape(len(self.cost), len(self.cost))


@dataclass(frozen=True)
class Transform:
    """A transform an assignment pays for: indices of the tensor and of its two layouts, and its time."""

    tensor: int
    source: int
    wanted: int
    cost: float


@dataclass(frozen=True)
class Breakdown:
    """What an assignment costs: the total, the kernel of every node, and every transform that is paid."""

    total: float
    kernels: tuple[float, ...]
    transforms: tuple[Transform, ...]


@dataclass(frozen=True)
class LayoutProblem:
    """An instance; checked when it is made.

    Raises:
        ValueError: an index out of range, a table of the wrong length, a NaN, a negative transform, a diagonal that is
            not zero, or a node that reads the tensor it makes. The message names the node or tensor.
    """

    nodes: tuple[Node, ...]
    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        object.__setattr__(self, "tensors", tuple(self.tensors))
        for i, node in enumerate(self.nodes):
            if not node.costs:
                raise ValueError(f"node {i} ({node.name}) has no candidate; expected at least one")
            if any(math.isnan(c) or c == -math.inf for c in node.costs):
                raise ValueError(f"node {i} ({node.name}) has a cost that is NaN or -inf; use inf for infeasible")
        for t, tensor in enumerate(self.tensors):
            self._check_tensor(f"tensor {t} ({tensor.name})", tensor)

    def _check_tensor(self, where: str, tensor: Tensor) -> None:
        n = tensor.n_layouts
        if any(len(row) != n for row in tensor.cost):
            raise ValueError(f"{where}: the cost matrix is not square; expected one row and column per layout")
        for f, row in enumerate(tensor.cost):
            if row[f] != 0:
                raise ValueError(f"{where}: cost[{f}][{f}] is {row[f]}; keeping a layout costs 0")
            if any(math.isnan(c) or c < 0 for c in row):
                raise ValueError(f"{where}: row {f} of the cost matrix has a NaN or a negative entry")
        self._check_table(f"{where}: made", tensor.producer, tensor.made, n)
        for u, use in enumerate(tensor.uses):
            self._check_table(f"{where}: wanted of use {u}", use.node, use.wanted, n)
            if use.node is not None and use.node == tensor.producer:
                raise ValueError(f"{where}: node {use.node} reads the tensor it makes")

    def _check_table(self, where: str, node: int | None, table: Sequence[int], n_layouts: int) -> None:
        if node is not None and not 0 <= node < len(self.nodes):
            raise ValueError(f"{where}: there is no node {node}; the problem has {len(self.nodes)} nodes")
        expected = 1 if node is None else len(self.nodes[node].costs)
        if len(table) != expected:
            raise ValueError(f"{where} has {len(table)} entries, expected {expected}, one per candidate")
        bad = [v for v in table if not 0 <= v < n_layouts]
        if bad:
            raise ValueError(f"{where} names layout {bad[0]}, the tensor has {n_layouts}")

    def evaluate(self, assignment: Sequence[int]) -> Breakdown:
        """Cost of an assignment, with the transforms it pays in order of (tensor, wanted layout).

        The total is `inf` where a chosen candidate or a needed transform is infeasible.

        Raises:
            ValueError: not one valid candidate index per node.
        """
        if len(assignment) != len(self.nodes):
            raise ValueError(f"the assignment has {len(assignment)} entries, the problem {len(self.nodes)} nodes")
        for node, a in zip(self.nodes, assignment, strict=True):
            if not 0 <= a < len(node.costs):
                raise ValueError(f"node {node.name} has no candidate {a}; it has {len(node.costs)}")
        kernels = tuple(node.costs[a] for node, a in zip(self.nodes, assignment, strict=True))
        transforms = []
        for t, tensor in enumerate(self.tensors):
            made = tensor.made[0 if tensor.producer is None else assignment[tensor.producer]]
            wanted = {use.wanted[0 if use.node is None else assignment[use.node]] for use in tensor.uses}
            transforms += [Transform(t, made, w, tensor.cost[made][w]) for w in sorted(wanted - {made})]
        total = math.fsum([*kernels, *(x.cost for x in transforms)])
        return Breakdown(total, kernels, tuple(transforms))


def restricted(problem: LayoutProblem, allowed: Mapping[int, Collection[int]]) -> LayoutProblem:
    """The same problem with only the `allowed` candidates at the given nodes, for pins and uniform baselines.

    Candidates keep their indices (what is not allowed costs `inf`), so a solution of the result is one of `problem`.

    Raises:
        ValueError: a node or candidate that does not exist.
    """
    nodes = list(problem.nodes)
    for i, keep in allowed.items():
        if not 0 <= i < len(nodes):
            raise ValueError(f"there is no node {i}; the problem has {len(nodes)} nodes")
        bad = sorted(a for a in keep if not 0 <= a < len(nodes[i].costs))
        if bad:
            raise ValueError(f"node {nodes[i].name} has no candidate {bad[0]}; it has {len(nodes[i].costs)}")
        kept = frozenset(keep)
        nodes[i] = replace(nodes[i], costs=tuple(c if a in kept else math.inf for a, c in enumerate(nodes[i].costs)))
    return replace(problem, nodes=tuple(nodes))
