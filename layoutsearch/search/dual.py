"""Lower bounds of wide problems by dual decomposition, and the candidates that no optimum can use.

The problem is split into its nodes and its tensors. A port joins a node to a tensor that it makes or reads; its
message, a number for each layout, is added to the costs of the node and taken from those of the tensor. Whatever the
messages are, the cheapest choices of all parts add up to a lower bound, and passing min-marginals back and forth raises
it (sequential reweighted message passing; Kolmogorov, A new look at reweighted message passing, TPAMI 37, 2015).

A tensor with several readers is one part, solved exactly over the sets of layouts it may exist in: given the set, each
reader takes its cheapest member and the maker pays for all the others. So sharing, which makes edge-wise bounds weak,
costs nothing in the bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from layoutsearch.search.problem import LayoutProblem, Tensor

Array = npt.NDArray[np.float64]

# A tensor of n layouts with several readers has 2^n sets.
MAX_SHARED_LAYOUTS = 11


@dataclass(eq=False)
class _Port:
    """Where a node makes (`slot` -1) or reads a tensor.

    `layouts` has the layout of each of the node's candidates, numbered as in the part, `names` the numbers in the
    problem. A message is -inf where the node has no candidate.
    """

    part: _Part
    layouts: npt.NDArray[np.intp]
    names: list[int]
    message: Array
    slot: int

    def take(self, other: _Port) -> None:
        """Start from the message of the same port of an earlier dual."""
        known = dict(zip(other.names, other.message, strict=True))
        self.message = np.array(
            [known[name] if own == 0 else own for name, own in zip(self.names, self.message, strict=True)]
        )


class _Part:
    """A tensor; `price` is what each layout of each port costs it: minus the messages, `inf` where there is none."""

    def __init__(self, cost: Array, n_ports: int, fixed: npt.NDArray[np.bool_], makes: npt.NDArray[np.bool_]) -> None:
        n = len(cost)
        self.ports: list[_Port] = []
        self.nodes: list[int] = []
        # Layouts that fixed consumers want are paid from wherever the tensor is made.
        self.base = np.where(makes, cost[:, fixed].sum(axis=1), math.inf)
        self.cost = np.where(fixed[None, :], 0.0, cost)
        self.made_price = np.zeros(n)
        self.pairwise = n_ports == 1
        if self.pairwise:
            self.read_price = np.full(n, math.inf)
            return
        inside, self.members = _sets(n)
        # Cost of making the tensor as f and changing it into all others of the set.
        paid = self.cost @ inside.astype(np.float64)
        self.making = np.where(inside, paid + self.base[:, None], math.inf)
        self.opened = np.empty(2**n)
        self.reads = np.zeros((n_ports, 2**n))
        self.total = np.zeros(2**n)

    def start(self) -> None:
        """Take the ports' messages as they are."""
        for port in self.ports:
            self._price(port)
        if not self.pairwise:
            self._open()
            self.total = self.reads.sum(axis=0)

    def _open(self) -> None:
        self.opened = (self.making + self.made_price[:, None]).min(axis=0)

    def _price(self, port: _Port) -> None:
        price = -port.message
        if port.slot < 0:
            self.made_price = price
        elif self.pairwise:
            self.read_price = price
        else:
            self.reads[port.slot] = _cheapest_member(price)

    def set(self, port: _Port) -> None:
        """Take over a port's message."""
        self._price(port)
        if self.pairwise:
            return
        if port.slot < 0:
            self._open()
        else:
            self.total = self.reads.sum(axis=0)

    def marginal(self, port: _Port) -> Array:
        """Least cost of the part for each layout of a port."""
        if self.pairwise:
            if port.slot < 0:
                return np.asarray(self.base + self.made_price + (self.cost + self.read_price[None, :]).min(axis=1))
            return np.asarray(self.read_price + (self.cost + (self.base + self.made_price)[:, None]).min(axis=0))
        if port.slot < 0:
            sums = self.making + self.total[None, :]
            return np.asarray(self.made_price + sums.min(axis=1))
        rest = self.reads[: port.slot].sum(axis=0) + self.reads[port.slot + 1 :].sum(axis=0) + self.opened
        return np.asarray(-port.message + rest[self.members].min(axis=1))

    def least(self) -> float:
        """Least cost of the part."""
        if self.pairwise:
            return float((self.cost + (self.base + self.made_price)[:, None] + self.read_price[None, :]).min())
        return float((self.opened + self.total).min())


@lru_cache(maxsize=MAX_SHARED_LAYOUTS + 1)
def _sets(n: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
    """For each of n layouts, which of the 2^n sets it is in, as a mask and as a list."""
    inside = ((np.arange(2**n)[None, :] >> np.arange(n)[:, None]) & 1).astype(np.bool_)
    return inside, np.array([np.flatnonzero(row) for row in inside])


def _cheapest_member(price: Array) -> Array:
    """The least price in every set of layouts; `inf` for the empty one."""
    least = np.full(1, math.inf)
    for p in price:
        least = np.concatenate([least, np.minimum(least, p)])
    return least


class Dual:
    """The dual of one problem of finite transforms, improved sweep by sweep.

    Args:
        problem: nodes may have infinite costs, transforms may not.
        earlier: a dual of the same problem with more candidates, to start from its messages.
    """

    def __init__(self, problem: LayoutProblem, earlier: Dual | None = None) -> None:
        self._alive = [np.flatnonzero(np.isfinite(node.costs)) for node in problem.nodes]
        self._costs = [np.array(n.costs, dtype=np.float64)[a] for n, a in zip(problem.nodes, self._alive, strict=True)]
        self._ports: list[list[_Port]] = [[] for _ in problem.nodes]
        self._parts: list[_Part] = []
        self.constant = 0.0
        for tensor in problem.tensors:
            self._add(tensor)
        if earlier is not None:
            for mine, theirs in zip(self._ports, earlier._ports, strict=True):
                for port, old in zip(mine, theirs, strict=True):
                    port.take(old)
        for part in self._parts:
            part.start()

    @staticmethod
    def fits(problem: LayoutProblem) -> bool:
        """Whether every tensor with several readers has few enough layouts in use."""
        for tensor in problem.tensors:
            readers = {(use.node, use.wanted) for use in tensor.uses if use.node is not None}
            if len(readers) > 1:
                used = set(tensor.made).union(*(wanted for _, wanted in readers))
                if len(used) > MAX_SHARED_LAYOUTS:
                    return False
        return True

    def _layouts_in_use(self, tensor: Tensor) -> dict[int, int]:
        makers = tensor.made if tensor.producer is None else [tensor.made[a] for a in self._alive[tensor.producer]]
        used = set(makers)
        for use in tensor.uses:
            used.update(use.wanted if use.node is None else [use.wanted[a] for a in self._alive[use.node]])
        return {layout: k for k, layout in enumerate(sorted(used))}

    def _add(self, tensor: Tensor) -> None:
        number = self._layouts_in_use(tensor)
        n = len(number)
        order = sorted(number)
        cost = tensor.matrix[np.ix_(order, order)]
        fixed = np.zeros(n, dtype=np.bool_)
        for use in tensor.uses:
            if use.node is None:
                fixed[number[use.wanted[0]]] = True
        readers = list(dict.fromkeys((use.node, use.wanted) for use in tensor.uses if use.node is not None))
        makes = np.zeros(n, dtype=np.bool_)
        producer = tensor.producer
        makers = tensor.made if producer is None else [tensor.made[a] for a in self._alive[producer]]
        makes[[number[f] for f in makers]] = True
        part = _Part(cost, len(readers), fixed, makes)
        if not readers:
            # Only fixed consumers, or none at all: a cost of the producer alone.
            if producer is None:
                self.constant += float(part.base[makes].sum())
            else:
                self._costs[producer] = self._costs[producer] + part.base[[number[f] for f in makers]]
            return
        self._parts.append(part)
        if producer is not None:
            self._join(part, producer, [number[f] for f in makers], -1, order)
        for slot, (node, wanted) in enumerate(readers):
            assert node is not None
            self._join(part, node, [number[wanted[a]] for a in self._alive[node]], slot, order)

    def _join(self, part: _Part, node: int, layouts: list[int], slot: int, names: list[int]) -> None:
        message = np.full(len(names), -math.inf)
        message[layouts] = 0.0
        port = _Port(part, np.array(layouts, dtype=np.intp), names, message, slot)
        part.ports.append(port)
        part.nodes.append(node)
        self._ports[node].append(port)

    def sweep(self, *, backward: bool) -> None:
        """Pass messages once through all nodes, in order or against it."""
        nodes = range(len(self._costs))
        for i in reversed(nodes) if backward else nodes:
            ports = self._ports[i]
            if not ports:
                continue
            ahead = [min(p.part.nodes) < i if backward else max(p.part.nodes) > i for p in ports]
            behind = [max(p.part.nodes) > i if backward else min(p.part.nodes) < i for p in ports]
            theta = self._costs[i].copy()
            twice = len({id(port.part) for port in ports}) < len(ports)
            for port in ports:
                present = np.isfinite(port.message)
                port.message[present] += port.part.marginal(port)[present]
                if twice:
                    port.part.set(port)
                theta += port.message[port.layouts]
            weight = 1.0 / max(1, sum(ahead), sum(behind))
            theta -= theta.min()
            for port, forward in zip(ports, ahead, strict=True):
                if forward:
                    share = np.full(len(port.message), math.inf)
                    np.minimum.at(share, port.layouts, weight * theta)
                    # Still -inf where there is no candidate.
                    port.message = port.message - share
                port.part.set(port)

    def rounded(self, *, backward: bool) -> tuple[int, ...]:
        """An assignment: node by node the best choice given those before. Go against the last sweep's direction."""
        kept = [port.message for ports in self._ports for port in ports]
        choice = [0] * len(self._costs)
        nodes = range(len(self._costs))
        for i in reversed(nodes) if backward else nodes:
            theta = self._costs[i].copy()
            for port in self._ports[i]:
                theta += port.message[port.layouts] + port.part.marginal(port)[port.layouts]
            best = int(theta.argmin())
            choice[i] = int(self._alive[i][best])
            for port in self._ports[i]:
                only = np.full(len(port.message), -math.inf)
                only[port.layouts[best]] = port.message[port.layouts[best]]
                port.message = only
                port.part.set(port)
        for port, message in zip((port for ports in self._ports for port in ports), kept, strict=True):
            port.message = message
            port.part.set(port)
        return tuple(choice)

    def _theta(self, i: int) -> Array:
        theta = self._costs[i].copy()
        for port in self._ports[i]:
            theta += port.message[port.layouts]
        return theta

    def bound(self) -> float:
        """The lower bound of the present messages."""
        nodes = math.fsum(float(self._theta(i).min()) for i in range(len(self._costs)))
        return self.constant + nodes + math.fsum(part.least() for part in self._parts)

    def kept(self, upper: float) -> list[tuple[int, ...]]:
        """The candidates of each node that an assignment of cost `upper` or less may use."""
        least = {id(part): part.least() for part in self._parts}
        bound = self.bound()
        kept = []
        slack = 1e-9 * max(1.0, abs(upper))
        for i, ports in enumerate(self._ports):
            theta = self._theta(i)
            rest = bound - float(theta.min())
            seen: set[int] = set()
            for port in ports:
                # A part that a node is joined to twice is asked once, which is weaker and still valid.
                if id(port.part) not in seen:
                    seen.add(id(port.part))
                    theta = theta + port.part.marginal(port)[port.layouts]
                    rest -= least[id(port.part)]
            kept.append(tuple(int(a) for a in self._alive[i][rest + theta <= upper + slack]))
        return kept
