"""What the record store holds: immutable values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from layoutsearch.layout.facts import KernelFacts
from layoutsearch.measure.results import WARMUP, Measurement


@dataclass(frozen=True)
class RecordContext:
    """Where and with what a measurement was made; records of another context say nothing about this one.

    Attributes:
        target: Target string that code was built for.
        device: Device key.
        cpu: CPU name that the device reported.
        threads: Threads of a kernel.
        tvm: TVM version.
        template: Version of the schedule templates.
    """

    target: str
    device: str
    cpu: str
    threads: int
    tvm: str
    template: str


@dataclass(frozen=True)
class KernelRecord:
    """One measurement of one kernel (or transform).

    Attributes:
        context: Where it was made.
        workload: Workload key.
        candidate: Candidate key, such as its layouts; empty where the workload says it all.
        schedule: Schedule parameters, as canonical JSON: see `canonical_json`.
        measurement: Samples or the typed failure, never an infrastructure failure.
        warmup: Runs before the samples that did not count.
        repeat: Samples that were asked for.
        flush: True if everything but the activation was flushed from the caches before each run.
        created: Unix time; 0 lets the store fill it in.
    """

    context: RecordContext
    workload: str
    candidate: str
    schedule: str
    measurement: Measurement
    warmup: int = WARMUP
    repeat: int = 7
    flush: bool = True
    created: float = 0.0


@dataclass(frozen=True)
class ModelRecord:
    """Interleaved samples of whole models: round r of every assignment was taken together.

    Attributes:
        context: Where they were made.
        model: Fingerprint of the model.
        samples_us: Hash of each assignment to its samples by round.
        created: Unix time; 0 lets the store fill it in.
    """

    context: RecordContext
    model: str
    samples_us: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    created: float = 0.0


@dataclass(frozen=True)
class WorkloadRecord:
    """What the kernel behind a workload key computes, without which its measurements teach nothing.

    Attributes:
        key: Workload key.
        summary: For people.
        facts: For bounds and cost models.
    """

    key: str
    summary: str
    facts: KernelFacts


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal strings."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
