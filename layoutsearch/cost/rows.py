"""What a cost model is trained on: one row for each candidate (or transform) that was measured."""

from __future__ import annotations

from dataclasses import dataclass

from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.facts import KernelFacts
from layoutsearch.layout.transform import TransformKey


@dataclass(frozen=True)
class KernelRow:
    """The time of one candidate of one kernel.

    Attributes:
        facts: what it computes.
        choice: how; None for a frozen kernel.
        us: the best time that the search among its schedules reached.
        workload: key of the kernel, shared by its candidates.
        model: name of the model it was measured for.
        tries: schedules that were tried; few of them leave the time a little higher than it need be.
    """

    facts: KernelFacts
    choice: Candidate | None
    us: float
    workload: str
    model: str
    tries: int = 1


@dataclass(frozen=True)
class TransformRow:
    """The time of one layout change that stands alone."""

    key: TransformKey
    us: float
    model: str
