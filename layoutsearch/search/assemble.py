"""From measured costs to the exact program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.transform import TransformKey
from layoutsearch.search.known import Lab
from layoutsearch.search.problem import LayoutProblem
from layoutsearch.search.skeleton import Skeleton
from layoutsearch.search.workloads import KernelNode

# A transform is at least one kernel call; bytes per microsecond before anything was measured: 100 GB/s.
_CALL_US = 0.5
_FASTEST_BYTES_US = 100e3


@dataclass(frozen=True)
class Program:
    """The exact program of a model under the present costs; nodes are kernels, in the order of the skeleton."""

    skeleton: Skeleton
    problem: LayoutProblem

    @property
    def nodes(self) -> tuple[KernelNode, ...]:
        """The kernels."""
        return self.skeleton.nodes

    def choices(self, solution: Sequence[int]) -> dict[str, Candidate]:
        """A solution as an assignment of operators."""
        return self.skeleton.choices(solution)

    def transforms(self, solution: Sequence[int]) -> list[TransformKey]:
        """The transforms a solution pays for."""
        return self.skeleton.transforms(solution)


def transform_us(key: TransformKey, lab: Lab) -> float:
    """A transform's measured time, or an optimistic one where the time was over before; infinite where it fails."""
    known = lab.transform(key)
    if known.tries or known.closed:
        return known.best_us
    return _CALL_US + 2 * key.bytes / _FASTEST_BYTES_US


def build_program(skeleton: Skeleton, lab: Lab) -> Program:
    """Kernels with their measured times (unmeasured ones are impossible), transforms measured or optimistic.

    Args:
        skeleton: the problem without costs.
        lab: what is measured.
    """

    return Program(
        skeleton,
        skeleton.problem(
            lambda workload, choice: lab.of(workload, choice).best_us,
            lambda key: transform_us(key, lab),
        ),
    )
