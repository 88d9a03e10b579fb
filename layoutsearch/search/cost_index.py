"""The costs of a skeleton as flat arrays: one entry per (workload, candidate), one per transform."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.transform import TransformKey
from layoutsearch.search.skeleton import Skeleton, SkeletonTensor
from layoutsearch.search.workloads import Workload

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.intp]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class CostIndex:
    """Where each cost of a skeleton lies."""

    skeleton: Skeleton

    @cached_property
    def pairs(self) -> tuple[tuple[Workload, Candidate | None], ...]:
        """Every workload with each of its candidates, in program order."""
        return tuple((node.workload, c) for node, _ in self.skeleton.workloads.values() for c in node.choices)

    @cached_property
    def groups(self) -> IntArray:
        """The number of the workload of each pair."""
        sizes = [len(node.choices) for node, _ in self.skeleton.workloads.values()]
        return np.repeat(np.arange(len(sizes), dtype=np.intp), sizes)

    @cached_property
    def free(self) -> BoolArray:
        """Whether the workload of each pair has a choice."""
        return np.bincount(self.groups)[self.groups] > 1 if self.pairs else np.zeros(0, dtype=np.bool_)

    @cached_property
    def transforms(self) -> tuple[TransformKey, ...]:
        """Every transform once."""
        return tuple(dict.fromkeys(self.skeleton.keys.values()))

    @cached_property
    def transform(self) -> Mapping[TransformKey, int]:
        """Inverse of `transforms`."""
        return {key: k for k, key in enumerate(self.transforms)}

    @cached_property
    def entries(self) -> tuple[IntArray, ...]:
        """Per node, the pair of each of its candidates. Rules may leave equal workloads different ones."""
        found, start = {}, 0
        for key, (node, _) in self.skeleton.workloads.items():
            found[key] = start, node.choices
            start += len(node.choices)
        tables = []
        for node in self.skeleton.nodes:
            first, choices = found[node.workload.key]
            at = range(len(choices)) if node.choices == choices else map(choices.index, node.choices)
            tables.append(np.array([first + k for k in at], dtype=np.intp))
        return tuple(tables)

    @cached_property
    def _entry(self) -> IntArray:
        """`entries` as one table (nodes, candidates); what lies behind a node's last candidate means nothing."""
        width = max(map(len, self.entries), default=0)
        return np.array([np.pad(row, (0, width - len(row))) for row in self.entries], dtype=np.intp).reshape(-1, width)

    @cached_property
    def _moves(self) -> tuple[tuple[SkeletonTensor, IntArray], ...]:
        """Every tensor with its transforms by (made, wanted); -1 on the diagonal and where none is needed."""
        found = []
        for t, tensor in enumerate(self.skeleton.tensors):
            side = len(tensor.layouts)
            table = np.full((side, side), -1, dtype=np.intp)
            for i in range(side):
                for j in range(side):
                    key = self.skeleton.keys.get((t, i, j))
                    if key is not None:
                        table[i, j] = self.transform[key]
            found.append((tensor, table))
        return tuple(found)

    def used(self, solution: Sequence[int] | IntArray) -> IntArray:
        """The pair that each kernel uses; from the shape of a solution or solutions, (..., size), to (..., nodes)."""
        of_kernels = np.asarray(solution, dtype=np.intp)[..., : len(self.entries)]
        return self._entry[np.arange(len(self.entries)), of_kernels]

    def uses(self, solutions: IntArray) -> IntArray:
        """How often each solution uses each pair; from (solutions, size) to (solutions, pairs)."""
        found = np.zeros((len(solutions), len(self.pairs)), dtype=np.intp)
        np.add.at(found, (np.arange(len(solutions))[:, None], self.used(solutions)), 1)
        return found

    def pays(self, solutions: IntArray) -> IntArray:
        """How often each solution pays for each transform; from (solutions, size) to (solutions, transforms)."""
        found = np.zeros((len(solutions), len(self.transforms)), dtype=np.intp)
        rows = np.arange(len(solutions))
        for tensor, table in self._moves:
            made = _layouts(tensor.producer, tensor.made, solutions)
            asked = np.zeros((len(solutions), len(tensor.layouts)), dtype=np.bool_)
            for use in tensor.uses:
                asked[rows, _layouts(use.node, use.wanted, solutions)] = True
            moves = np.where(asked, table[made], -1)
            at, column = np.nonzero(moves >= 0)
            np.add.at(found, (at, moves[at, column]), 1)
        return found

    def cost(self, solution: Sequence[int] | IntArray, kernels: FloatArray, transforms: FloatArray) -> FloatArray:
        """Cost of a solution under rows of costs; `kernels` (..., pairs), `transforms` (..., transforms)."""
        pays = self.pays(np.asarray(solution, dtype=np.intp)[None])[0]
        paid = np.repeat(np.arange(len(pays)), pays)
        return kernels[..., self.used(solution)].sum(axis=-1) + transforms[..., paid].sum(axis=-1)


def _layouts(node: int | None, table: tuple[int, ...], solutions: IntArray) -> IntArray:
    """The layout on one side of a tensor in each solution."""
    return np.array(table, dtype=np.intp)[0 if node is None else solutions[:, node]] + np.zeros(
        len(solutions), dtype=np.intp
    )
