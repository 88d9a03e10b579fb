"""Layout problems shaped like real networks, from a seed: what `bench solver` solves.

A net is built operator by operator as a network would be, with channels and image sides, so that costs can come from a
roofline. Operators of equal shape cost the same, as equal workloads do in a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from layoutsearch.search.problem import LayoutProblem, Node, Tensor, Use

# What a layout is worth to a convolution: share of peak it reaches, channels it works on at a time, elements that lie
# next to each other when it is read (0 for as many as there are channels or columns).
_LAYOUTS: tuple[tuple[str, float, int, int], ...] = (
    ("NCHW", 0.30, 1, 0),
    ("NHWC", 0.55, 1, 0),
    ("NCHW2c", 0.20, 2, 2),
    ("NCHW4c", 0.35, 4, 4),
    ("NCHW8c", 0.55, 8, 8),
    ("NCHW16c", 0.75, 16, 16),
    ("NCHW24c", 0.65, 24, 24),
    ("NCHW32c", 0.78, 32, 32),
    ("NCHW48c", 0.70, 48, 48),
    ("NCHW64c", 0.72, 64, 64),
)
N_LAYOUTS = len(_LAYOUTS)
N_CANDIDATES = 10
# With mixed blocks: layouts that a convolution reads and writes; ten pairs of six layouts.
_MIXED = ((0, 0), (1, 1), (0, 5), (4, 4), (5, 5), (7, 7), (4, 5), (5, 4), (5, 7), (7, 5))

# A mid-size x86 core pair: GFLOP/s, bytes/us, and what a kernel call costs.
_PEAK_FLOP_US = 150e3
_BYTES_US = 12e3
_CALL_US = 2.0
_NOISE = 0.2

COSTS = ("realistic", "dense", "shared")


@dataclass(frozen=True)
class Value:
    """What an operator makes: its node, channels and image side."""

    node: int
    channels: int
    side: int

    @property
    def bytes(self) -> float:
        """Of one float32 image."""
        return 4.0 * self.channels * self.side**2


class Net:
    """Builds a problem operator by operator; every operator has ten candidates.

    Args:
        seed: of all costs.
        costs: `realistic`: kernels from a roofline with the efficiency of each layout and noise, transforms from bytes
            and contiguous runs. `dense`: every entry of every table drawn on its own. `shared`: drawn likewise, with
            transforms that outweigh kernels and layouts that every reader numbers in its own way, so that what decides
            is which readers share a transform.
        mixed: convolutions choose among ten pairs of layouts (read, written) instead of ten layouts.
    """

    def __init__(self, seed: int, costs: str = "realistic", *, mixed: bool = False) -> None:
        if costs not in COSTS:
            raise ValueError(f"costs {costs!r} is none of {', '.join(COSTS)}")
        self._rng = np.random.default_rng(seed)
        self._costs = costs
        self._pairs = _MIXED if mixed else tuple((k, k) for k in range(N_LAYOUTS))
        self._nodes: list[Node] = []
        self._values: list[Value] = []
        self._made: list[tuple[int, ...]] = []
        self._uses: list[list[Use]] = []
        self._known: dict[tuple[int, ...], tuple[float, ...]] = {}
        # How much worse than copying a change between two layouts is; the two directions differ.
        self._change = self._rng.uniform(1.0, 2.5, (N_LAYOUTS, N_LAYOUTS))

    def __len__(self) -> int:
        return len(self._nodes)

    def conv(self, source: Value | None, channels: int, *, kernel: int = 3, stride: int = 1, side: int = 224) -> Value:
        """A convolution; of an image of `side` pixels where `source` is None. Even sides divide by the stride."""
        read, size = (3, side) if source is None else (source.channels, source.side)
        out = max(1, size // stride)
        flop = 2.0 * kernel**2 * read * channels * out**2
        moved = 4.0 * (read * size**2 + channels * out**2 + kernel**2 * read * channels)
        shape = (kernel, stride, read, channels, size)
        costs = self._drawn(flop / _PEAK_FLOP_US) if self._costs != "realistic" else self._known.get(shape)
        if costs is None:
            noise = self._rng.lognormal(0, _NOISE, len(self._pairs))
            costs = tuple(
                float(n * max(flop / _PEAK_FLOP_US / _efficiency(i, o, read, channels), moved / _BYTES_US) + _CALL_US)
                for (i, o), n in zip(self._pairs, noise, strict=True)
            )
            self._known[shape] = costs
        return self._add("conv", costs, self._pairs, [] if source is None else [source], channels, out)

    def flexible(self, *sources: Value, channels: int = 0, stride: int = 1) -> Value:
        """An add, a pool or an activation: any layout, at nearly the same cost. Channels of the first by default."""
        first = sources[0]
        out, side = channels or first.channels, max(1, first.side // stride)
        us = (sum(v.bytes for v in sources) + 4.0 * out * side**2) / _BYTES_US
        if self._costs == "realistic":
            costs = tuple(float(us * n + _CALL_US) for n in self._rng.uniform(0.95, 1.1, N_LAYOUTS))
        else:
            costs = self._drawn(us)
        return self._add("flex", costs, tuple((k, k) for k in range(N_LAYOUTS)), list(sources), out, side)

    def concat(self, *sources: Value) -> Value:
        """An n-ary concat on channels: reads all its operands in the layout it writes."""
        return self.flexible(*sources, channels=sum(v.channels for v in sources))

    def upsample(self, source: Value, channels: int) -> Value:
        """A transposed convolution that doubles the image."""
        wide = self.conv(Value(source.node, source.channels, 2 * source.side), channels, kernel=2)
        return Value(wide.node, channels, 2 * source.side)

    def problem(self) -> LayoutProblem:
        """The problem; the last operator's value is wanted in layout 0, as a model output."""
        uses = [*self._uses[:-1], [*self._uses[-1], Use(None, (0,))]]
        tensors = [
            Tensor(f"v{i}", i, self._made[i], tuple(uses[i]), self._transforms(value).tolist())
            for i, value in enumerate(self._values)
        ]
        return LayoutProblem(tuple(self._nodes), tuple(tensors))

    def _add(
        self,
        kind: str,
        costs: tuple[float, ...],
        pairs: Sequence[tuple[int, int]],
        sources: list[Value],
        channels: int,
        side: int,
    ) -> Value:
        value = Value(len(self._nodes), channels, side)
        self._nodes.append(Node(f"{kind}{value.node}", costs))
        self._made.append(tuple(out for _, out in pairs))
        self._values.append(value)
        self._uses.append([])
        for source in sources:
            wanted = [into for into, _ in pairs]
            if self._costs == "shared":
                wanted = [int(k) for k in self._rng.permutation(N_LAYOUTS)[wanted]]
            self._uses[source.node].append(Use(value.node, tuple(wanted)))
        return value

    def _drawn(self, us: float) -> tuple[float, ...]:
        low, high = (1.0, 3.0) if self._costs == "dense" else (0.2, 1.0)
        return tuple(float(x) for x in (us + _CALL_US) * self._rng.uniform(low, high, N_CANDIDATES))

    def _transforms(self, value: Value) -> npt.NDArray[np.float64]:
        us = 2 * value.bytes / _BYTES_US + _CALL_US
        if self._costs == "realistic":
            runs = np.array([run or value.channels for _, _, _, run in _LAYOUTS], dtype=np.float64)
            # Runs of a cache line (16 floats) or more are as fast as a copy.
            penalty = 1 + np.log2(16 / np.minimum(16, np.minimum(runs[:, None], runs[None, :]))) / 4
            matrix = us * self._change * penalty
        else:
            matrix = us * self._rng.uniform(0.5, 2.5, (N_LAYOUTS, N_LAYOUTS))
        np.fill_diagonal(matrix, 0.0)
        return matrix


def _efficiency(source: int, target: int, read: int, written: int) -> float:
    """Share of peak: that of the layouts, less what padding to whole blocks wastes."""

    def fill(channels: int, block: int) -> float:
        return channels / (block * -(-channels // block))

    _, reads, in_block, _ = _LAYOUTS[source]
    _, writes, out_block, _ = _LAYOUTS[target]
    return float(np.sqrt(reads * writes)) * fill(read, in_block) * fill(written, out_block)
