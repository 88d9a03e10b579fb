"""Layout problems for tests: small random ones and structures of real networks."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import strategies as st

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
        readers: list[int | None] = [int(r) for r in rng.choice(later, size=rng.integers(0, 7))] if later else []
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


class NetBuilder:
    """Builds problems shaped like real networks: convolutions with separate input and output layouts, flexible ops.

    `alike` makes layouts of about the same quality everywhere, as on a real device; without it every cost is drawn on
    its own, which is far harder.
    """

    def __init__(self, seed: int, n_layouts: int, *, split_blocks: bool = False, alike: bool = True) -> None:
        self.rng = np.random.default_rng(seed)
        self.n = n_layouts
        self.alike = alike
        self.nodes: list[Node] = []
        self.made: list[tuple[int, ...]] = []
        self.sizes: list[float] = []
        self.uses: list[list[Use]] = []
        square = itertools.product(range(n_layouts), repeat=2)
        self.candidates = list(square) if split_blocks else [(k, k) for k in range(n_layouts)]
        self.quality = self.rng.uniform(1, 2, n_layouts)
        conversion = self.rng.uniform(0.6, 1.4, (n_layouts, n_layouts))
        self.conversion = (conversion + conversion.T) / 2

    def _node(
        self, kind: str, size: float, costs: np.ndarray, layouts: list[tuple[int, int]], inputs: list[int]
    ) -> int:
        i = len(self.nodes)
        self.nodes.append(Node(f"{kind}{i}", tuple(float(c) for c in costs)))
        self.made.append(tuple(out for _, out in layouts))
        self.sizes.append(size)
        self.uses.append([])
        for j in inputs:
            self.uses[j].append(Use(i, tuple(into for into, _ in layouts)))
        return i

    def conv(self, size: float, *inputs: int) -> int:
        pairs = self.candidates
        if self.alike:
            quality = np.array([(self.quality[i] + self.quality[o]) / 2 for i, o in pairs])
            factor = quality * self.rng.lognormal(0, 0.25, len(pairs))
        else:
            factor = self.rng.uniform(1, 3, len(pairs))
        return self._node("conv", size, 4 * size * factor, pairs, list(inputs))

    def flexible(self, size: float, *inputs: int) -> int:
        costs = size * 0.3 * self.rng.uniform(0.95, 1.05, self.n)
        return self._node("flex", size, costs, [(k, k) for k in range(self.n)], list(inputs))

    def problem(self) -> LayoutProblem:
        """With the last node's value wanted in layout 0, as a model output."""
        self.uses[-1].append(Use(None, (0,)))
        tensors = []
        for i, uses in enumerate(self.uses):
            shape = (self.n, self.n)
            cost = self.sizes[i] * (self.conversion if self.alike else self.rng.uniform(0.5, 2.5, shape))
            np.fill_diagonal(cost := cost.copy(), 0.0)
            tensors.append(Tensor(f"v{i}", i, self.made[i], tuple(uses), cost))
        return LayoutProblem(tuple(self.nodes), tuple(tensors))


def resnet50(seed: int = 0, n_layouts: int = 5, **kwargs: bool) -> LayoutProblem:
    """Bottleneck blocks; a block's input is read by its first convolution and by the add or the projection."""
    net = NetBuilder(seed, n_layouts, **kwargs)
    x = net.flexible(2.0, net.conv(8.0))
    for blocks, size in zip((3, 4, 6, 3), (8.0, 4.0, 2.0, 1.0), strict=True):
        for b in range(blocks):
            branch = net.conv(size, net.conv(size / 4, net.conv(size / 4, x)))
            x = net.flexible(size, branch, net.conv(size, x) if b == 0 else x)
    net.conv(0.1, net.flexible(0.1, x))
    return net.problem()


def densenet(seed: int = 0, n_layouts: int = 5, blocks: tuple[int, ...] = (6, 12, 24, 16), **kw: bool) -> LayoutProblem:
    """Every layer reads one concat of all earlier layers of its block: wide, with many readers per tensor."""
    net = NetBuilder(seed, n_layouts, **kw)
    x = net.flexible(2.0, net.conv(8.0))
    for n, size in zip(blocks, (1.0, 0.5, 0.25, 0.12), strict=False):
        features = [x]
        for layer in range(n):
            joined = net.flexible(size * (layer + 2), *features) if layer else x
            features.append(net.conv(size, net.conv(4 * size, joined)))
        x = net.flexible(size * n / 8, net.conv(size * n / 2, net.flexible(size * (n + 2), *features)))
    net.conv(0.1, x)
    return net.problem()


def chain(seed: int = 0, n_layouts: int = 5, length: int = 1000, **kwargs: bool) -> LayoutProblem:
    """A long chain of convolutions with skips over up to ten nodes."""
    net = NetBuilder(seed, n_layouts, **kwargs)
    x = net.conv(1.0)
    history = [x]
    while len(net.nodes) < length:
        x = net.conv(float(net.rng.uniform(0.3, 3)), x)
        if net.rng.random() < 0.3 and len(history) > 10:
            x = net.flexible(net.sizes[x], x, history[-int(net.rng.integers(2, 10))])
        history.append(x)
    return net.problem()


@st.composite
def layout_problems(draw: st.DrawFn, max_nodes: int = 5) -> LayoutProblem:
    """What `random_problem` makes, drawn piece by piece so that a failure shrinks to the smallest instance."""
    time = st.one_of(st.integers(0, 9).map(float), st.floats(0, 100, allow_nan=False), st.just(math.inf))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=max_nodes))
    nodes = tuple(Node(f"n{i}", tuple(draw(time) for _ in range(s))) for i, s in enumerate(sizes))
    tensors = []
    for t in range(draw(st.integers(0, max_nodes + 1))):
        n_layouts = draw(st.integers(1, 3))
        cost = [[0.0 if f == w else draw(time) for w in range(n_layouts)] for f in range(n_layouts)]
        producer = draw(st.one_of(st.none(), st.integers(0, len(sizes) - 1)))
        reader = st.one_of(st.none(), st.integers(0, len(sizes) - 1).filter(lambda r, p=producer: r != p))

        def table(node: int | None, n_layouts: int = n_layouts) -> tuple[int, ...]:
            size = 1 if node is None else sizes[node]
            return tuple(draw(st.integers(0, n_layouts - 1)) for _ in range(size))

        readers = [draw(reader) if len(sizes) > 1 else None for _ in range(draw(st.integers(0, 5)))]
        tensors.append(Tensor(f"t{t}", producer, table(producer), tuple(Use(r, table(r)) for r in readers), cost))
    return LayoutProblem(nodes, tuple(tensors))
