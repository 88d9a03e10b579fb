"""What is known of the parts of one assignment: its kernels and its transforms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from layoutsearch.layout.transform import TransformKey
from layoutsearch.search.known import Known, Lab, Request
from layoutsearch.search.skeleton import Skeleton


@dataclass(frozen=True)
class Parts:
    """The parts of an assignment at one moment.

    Attributes:
        kernels: what is still to be measured of its kernels.
        transforms: what is still to be measured of its transforms.
        settled_us: sum of the parts that are measured to the end; more tries will not lower it.
        failure: why a part that is measured to the end has no time, empty if there is none such.
    """

    kernels: tuple[Request, ...]
    transforms: tuple[TransformKey, ...]
    settled_us: float
    failure: str

    @property
    def open(self) -> int:
        """How many are still to be measured."""
        return len(self.kernels) + len(self.transforms)

    def settled(self, best_us: float) -> bool:
        """Whether measuring on cannot change what becomes of it, where the best known costs `best_us`."""
        return not self.open or bool(self.failure) or self.settled_us > best_us


def parts_of(
    skeleton: Skeleton,
    lab: Lab,
    solution: Sequence[int],
    kernels: Sequence[Request],
    transforms: Sequence[TransformKey],
) -> Parts:
    """The parts of a solution, of which `kernels` and `transforms` are still to be measured."""
    asked = {(r.workload.key, r.choice) for r in kernels}
    known: list[tuple[str, Known]] = []
    for node, index in zip(skeleton.nodes, skeleton.of_kernels(solution), strict=True):
        choice = node.choices[index]
        if (node.workload.key, choice) not in asked:
            label = f"{node.workload.summary} {choice or ''}".strip()
            known.append((label, lab.of(node.workload, choice)))
    waiting = set(transforms)
    for key in skeleton.transforms(solution):
        if key not in waiting:
            known.append((f"{key.workload} {key.candidate}", lab.transform(key)))
    settled = math.fsum(k.best_us for _, k in known if k.best is not None)
    failed = [(label, k) for label, k in known if k.best is None and (k.tries or k.closed)]
    return Parts(tuple(kernels), tuple(transforms), settled, _why(*failed[0]) if failed else "")


def share_measured(skeleton: Skeleton, lab: Lab) -> float:
    """Part of all candidates of all workloads that were tried."""
    known = [lab.of(node.workload, c) for node, _ in skeleton.workloads.values() for c in node.choices]
    return sum(bool(k.tries or k.closed) for k in known) / len(known) if known else 1.0


def _why(label: str, known: Known) -> str:
    reasons = [known.reason, *(f"{m.status.value}: {m.error}" for m in known.tries.values() if m.error)]
    return f"{label}: {next(filter(None, reasons), 'no schedule fits it')}"
