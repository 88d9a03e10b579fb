"""What can be decided without searching: infeasible and duplicate candidates go, forced nodes become constants, and
what is left falls apart into independent problems."""

from __future__ import annotations

import math
from dataclasses import dataclass

from layoutsearch.search.problem import LayoutProblem, NoAssignmentError, Node, Tensor, Use


@dataclass(frozen=True)
class Part:
    """An independent part: its own problem, and the nodes and candidates of the original behind its indices."""

    problem: LayoutProblem
    nodes: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Reduced:
    """The parts left to solve, and an assignment that is right for every other node."""

    assignment: tuple[int, ...]
    parts: tuple[Part, ...]


def _kept_candidates(problem: LayoutProblem) -> list[tuple[int, ...]]:
    """Per node, the candidates worth a look: of those alike in every layout only the cheapest (the first of equals)."""
    seen_as: list[list[tuple[int, ...]]] = [[] for _ in problem.nodes]
    for tensor in problem.tensors:
        if tensor.producer is not None:
            seen_as[tensor.producer].append(tensor.made)
        for use in tensor.uses:
            if use.node is not None:
                seen_as[use.node].append(use.wanted)
    kept = []
    for i, node in enumerate(problem.nodes):
        cheapest: dict[tuple[int, ...], int] = {}
        for a, cost in enumerate(node.costs):
            layouts = tuple(table[a] for table in seen_as[i])
            if math.isfinite(cost) and (layouts not in cheapest or cost < node.costs[cheapest[layouts]]):
                cheapest[layouts] = a
        if not cheapest:
            raise NoAssignmentError(
                f"node {i} ({node.name}) has no feasible candidate: all {len(node.costs)} cost inf; allow another"
            )
        kept.append(tuple(sorted(cheapest.values())))
    return kept


def _components(problem: LayoutProblem, free: list[bool]) -> list[list[int]]:
    """Free nodes grouped by the tensors that join them, in order of their first node."""
    parent = list(range(len(free)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for tensor in problem.tensors:
        around = [i for i in (tensor.producer, *(use.node for use in tensor.uses)) if i is not None and free[i]]
        for i in around[1:]:
            parent[max(root(i), root(around[0]))] = min(root(i), root(around[0]))
    groups: dict[int, list[int]] = {}
    for i in range(len(free)):
        if free[i]:
            groups.setdefault(root(i), []).append(i)
    return list(groups.values())


def reduce_problem(problem: LayoutProblem) -> Reduced:
    """Split a problem into independent parts.

    Raises:
        NoAssignmentError: a node has no feasible candidate; the message names it.
    """
    kept = _kept_candidates(problem)
    free = [len(k) > 1 for k in kept]
    parts = []
    groups = _components(problem, free)
    home = {i: g for g, group in enumerate(groups) for i in group}
    tensors: list[list[Tensor]] = [[] for _ in groups]
    local = {i: k for group in groups for k, i in enumerate(group)}

    def table(node: int | None, full: tuple[int, ...]) -> tuple[int | None, tuple[int, ...]]:
        if node is None:
            return None, full
        return (local[node] if free[node] else None), tuple(full[a] for a in kept[node])

    for tensor in problem.tensors:
        around = [i for i in (tensor.producer, *(use.node for use in tensor.uses)) if i is not None and free[i]]
        if around:
            producer, made = table(tensor.producer, tensor.made)
            uses = dict.fromkeys(Use(*table(use.node, use.wanted)) for use in tensor.uses)
            tensors[home[around[0]]].append(Tensor(tensor.name, producer, made, tuple(uses), tensor.cost))
    for g, group in enumerate(groups):
        nodes = tuple(Node(problem.nodes[i].name, tuple(problem.nodes[i].costs[a] for a in kept[i])) for i in group)
        parts.append(Part(LayoutProblem(nodes, tuple(tensors[g])), tuple(group), tuple(kept[i] for i in group)))
    return Reduced(tuple(k[0] for k in kept), tuple(parts))
