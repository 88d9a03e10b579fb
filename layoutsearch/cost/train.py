"""Training rows out of what was measured: the record store of earlier runs, and recorded tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from layoutsearch.cost.model import CostModel, ModelIdentity, ModelMismatch
from layoutsearch.cost.rows import KernelRow, TransformRow
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.transform import TransformKey
from layoutsearch.measure.records import RecordContext, RecordStore
from layoutsearch.measure.results import Measurement, cost_us
from layoutsearch.schedule.target import TargetInfo

if TYPE_CHECKING:
    from layoutsearch.measure.profile import DeviceProfile


@dataclass(frozen=True)
class Rows:
    """What a cost model is fitted to."""

    kernels: tuple[KernelRow, ...] = ()
    transforms: tuple[TransformRow, ...] = ()

    def __add__(self, other: Rows) -> Rows:
        return Rows(self.kernels + other.kernels, self.transforms + other.transforms)


class _Known(Protocol):
    @property
    def best_us(self) -> float: ...

    @property
    def tries(self) -> Mapping[str, Measurement]: ...


class Measured(Protocol):
    """Knows what was measured: a lab, or a recorded table."""

    def of(self, workload: Any, choice: Candidate | None) -> _Known:
        """What is known of a candidate."""

    def transform(self, key: TransformKey) -> _Known:
        """What is known of a layout change."""


def rows_of(skeleton: Any, measured: Measured, model: str) -> Rows:
    """The best time of every candidate and layout change that ran.

    Args:
        skeleton: a `search.skeleton.Skeleton`.
        measured: its times.
        model: name of the model in the rows.
    """
    kernels: dict[tuple[str, Candidate | None], KernelRow] = {}
    for node in skeleton.nodes:
        workload = node.workload
        for choice in node.choices:
            known = measured.of(workload, choice)
            if known.best_us < float("inf"):
                row = KernelRow(workload.facts, choice, known.best_us, workload.key, model, tries=len(known.tries))
                kernels.setdefault((workload.key, choice), row)
    times = {key: measured.transform(key).best_us for key in dict.fromkeys(skeleton.keys.values())}
    transforms = [TransformRow(key, us, model) for key, us in times.items() if us < float("inf")]
    return Rows(tuple(kernels.values()), tuple(transforms))


def rows_of_store(store: RecordStore, context: RecordContext, model: str = "") -> Rows:
    """The best time of every candidate that ran in a context.

    Workloads that the store does not describe (measured before schema 2 and not met again since) are left out: without
    their facts there is nothing to learn from them.

    Args:
        store: of any number of runs.
        context: device, target, versions; other records say nothing about this one.
        model: a name for what was measured; the store does not keep which model a workload came from.
    """
    facts = store.workload_facts()
    latest: dict[tuple[str, str], dict[str, float]] = {}
    for record in store.records(context, flush=True):
        if record.measurement.ok:
            latest.setdefault((record.workload, record.candidate), {})[record.schedule] = cost_us(
                record.schedule, record.measurement
            )
        else:
            latest.get((record.workload, record.candidate), {}).pop(record.schedule, None)
    kernels, transforms = [], []
    for (workload, candidate), times in latest.items():
        if not times:
            continue
        us = min(times.values())
        if workload in facts:
            choice = Candidate.parse(candidate) if candidate else None
            kernels.append(KernelRow(facts[workload], choice, us, workload, model, tries=len(times)))
        elif workload.startswith("transform "):
            transforms.append(TransformRow(TransformKey.parse(workload, candidate), us, model))
    return Rows(tuple(kernels), tuple(transforms))


def fit_from(
    rows: Iterable[Rows],
    profile: DeviceProfile | None = None,
    *,
    target: TargetInfo | None = None,
    identity: ModelIdentity | None = None,
    seed: int = 0,
) -> CostModel:
    """A model of all rows together; see `CostModel.fit`."""
    every = sum(rows, Rows())
    return CostModel.fit(every.kernels, every.transforms, profile, target=target, identity=identity, seed=seed)


def load_or_fit(
    path: str | Path,
    identity: ModelIdentity,
    rows: Iterable[Rows],
    profile: DeviceProfile | None = None,
    *,
    target: TargetInfo | None = None,
    seed: int = 0,
) -> tuple[CostModel, str]:
    """The model saved at `path`; where it is missing or of something else, one fitted to `rows` and saved there.

    Returns:
        The model, and why it was fitted: empty if it was loaded.
    """
    try:
        return CostModel.load(path, identity), ""
    except ModelMismatch as mismatch:
        model = fit_from(rows, profile, target=target, identity=identity, seed=seed)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        model.save(path)
        return model, str(mismatch)
