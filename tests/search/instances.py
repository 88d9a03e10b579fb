"""Layout problems for tests: small random ones and structures of real networks."""

from __future__ import annotations

import itertools
import math

import numpy as np

from layoutsearch.search.problem import LayoutProblem, Node, Tensor, Use


def random_problem(seed: int, *, max_nodes: int = 7, p_inf: float = 0.1) -> LayoutProblem:
    """Shared transforms, diamonds, concats, repeated operands, fixed inputs and outputs, domains of 1 to 4."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, max_nodes + 1))
    sizes = [int(rng.integers(1, 5)) for _ in range(n)]
    integral = rng.random() < 0.3  # many ties

    def draw(high: float) -> float:
        if rng.random() < p_inf:
            return math.inf
        return float(rng.integers(0, 4)) if integral else float(rng.uniform(0, high))

    nodes = tuple(Node(f"n{i}", tuple(draw(10) for _ in range(s))) for i, s in enumerate(sizes))
    tensors = []
    for t in range(int(rng.integers(1, n + 4))):
        n_layouts = int(rng.integers(1, 5))
        cost = [[0.0 if f == w else draw(8) for w in range(n_layouts)] for f in range(n_layouts)]
        producer = None if rng.random() < 0.2 else int(rng.integers(n))
        # Consumers come later in the order, as in a real graph; with replacement, so operands repeat.
        later = list(range(0 if producer is None else producer + 1, n))
        readers: list[int | None] = [int(r) for r in rng.choice(later, size=rng.integers(0, 5))] if later else []
        if rng.random() < 0.3 or not readers:
            readers.append(None)

        def table(node: int | None, n_layouts: int = n_layouts) -> tuple[int, ...]:
            return tuple(int(v) for v in rng.integers(n_layouts, size=1 if node is None else sizes[node]))

        uses = tuple(Use(r, table(r)) for r in readers)
        tensors.append(Tensor(f"t{t}", producer, table(producer), uses, cost))
    return LayoutProblem(nodes, tuple(tensors))


def brute_force(problem: LayoutProblem) -> list[tuple[float, tuple[int, ...]]]:
    """Every assignment of finite cost, cheapest first; written apart from `evaluate`."""
    out = []
    for x in itertools.product(*(range(len(node.costs)) for node in problem.nodes)):
        total = sum(node.costs[a] for node, a in zip(problem.nodes, x, strict=True))
        for tensor in problem.tensors:
            made = tensor.made[0] if tensor.producer is None else tensor.made[x[tensor.producer]]
            paid = set()
            for use in tensor.uses:
                want = use.wanted[0] if use.node is None else use.wanted[x[use.node]]
                if want != made and want not in paid:
                    paid.add(want)
                    total += tensor.cost[made][want]
        if total < math.inf:
            out.append((total, x))
    return sorted(out)
