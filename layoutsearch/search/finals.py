"""Whole timings of a run: what was timed is in the records, and a run that is continued reads it there first."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from layoutsearch.measure.records import ModelRecord, RecordContext, RecordStore
from layoutsearch.plan.plan import LayoutPlan

Samples = Mapping[str, tuple[float, ...]]


def decisions(plan: LayoutPlan) -> list[object]:
    """What of a plan changes the compiled model."""
    borders = [plan.io_layouts] if plan.io_layouts else []
    pairs = [("pair", pair.first, pair.second, pair.schedule) for pair in plan.fusions]
    return [*((op.id, op.choice, op.schedule) for op in plan.ops), *pairs, *borders]


def plan_digest(plan: LayoutPlan) -> str:
    """Equal for plans that compile to the same."""
    return hashlib.sha256(repr(decisions(plan)).encode()).hexdigest()[:20]


class WholeTimes:
    """Interleaved samples of plans of one model, by the plans' digests.

    Args:
        store: where they are kept.
        context: device, target, versions.
        model: fingerprint.
        weights: key of the weights and inputs; plans of other weights were not these.
    """

    def __init__(self, store: RecordStore, context: RecordContext, model: str, weights: str) -> None:
        self._store, self._context, self._model, self._weights = store, context, model, weights

    def runs(self, stage: str) -> Iterator[Samples]:
        """Every interleaved run of a stage, oldest first."""
        for record in self._store.models(self._context, self._name(stage)):
            yield record.samples_us

    def add(self, stage: str, samples: Samples) -> None:
        """Keep one interleaved run."""
        if samples:
            self._store.add_models(ModelRecord(self._context, self._name(stage), samples))

    def _name(self, stage: str) -> str:
        return f"{self._model} {stage} {self._weights}"
