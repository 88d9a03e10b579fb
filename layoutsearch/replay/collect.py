"""From the record store to a table."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from layoutsearch.measure.device import DeviceIdentity
from layoutsearch.measure.records import KernelRecord, ModelRecord, RecordContext, RecordStore, canonical_json
from layoutsearch.measure.results import Measurement
from layoutsearch.plan.apply import target_json
from layoutsearch.replay.builds import BuildTimes
from layoutsearch.replay.lines import rounded
from layoutsearch.replay.table import Table
from layoutsearch.replay.values import RecordedTry, RecordedWhole, TableHeader
from layoutsearch.search.setup import ModelSetup
from layoutsearch.search.visits import later


@dataclass(frozen=True)
class WholeLabel:
    """What the record store calls a sample of an assignment: all that a table needs to know of it.

    Attributes:
        group: number of the interleaved group.
        starts: processes that the rounds were shared out between.
        label: how the assignment was found.
        solution: candidate of every node.
        schedules: digest of the schedules it was built with.
    """

    group: int
    starts: int
    label: str
    solution: tuple[int, ...]
    schedules: str

    def __str__(self) -> str:
        return canonical_json([self.group, self.starts, self.label, list(self.solution), self.schedules])

    @classmethod
    def parse(cls, text: str) -> WholeLabel | None:
        """Inverse of `str`; None for a label that something else made."""
        if not text.startswith("["):
            return None
        group, starts, label, solution, schedules = json.loads(text)
        return cls(group, starts, label, tuple(solution), schedules)


def collect(
    setup: ModelSetup,
    identity: DeviceIdentity,
    profile: Mapping[str, Any],
    store: RecordStore,
    context: RecordContext,
    builds: BuildTimes,
    wholes: Sequence[RecordedWhole],
    source: str,
) -> Table:
    """The table of what the store holds of a model; samples rounded as a table keeps them."""
    skeleton = setup.skeleton
    header = TableHeader(
        model=setup.loaded.name,
        fingerprint=setup.fingerprint,
        target=target_json(setup.target),
        device={**asdict(identity), "features": list(identity.features)},
        profile=json.loads(json.dumps(profile)),
        threads=context.threads,
        tvm=context.tvm,
        templates=context.template,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        layouts=setup.layouts,
        anchors=setup.anchors,
    )
    wanted = {
        (node.workload.key, str(choice) if choice is not None else "")
        for node in skeleton.nodes
        for choice in node.choices
    }
    keys = {(key.workload, key.candidate) for key in skeleton.keys.values()}
    kernels = _as_they_are(_tries(store, context, dict.fromkeys(skeleton.workloads), wanted, builds))
    changes = _tries(store, context, dict.fromkeys(w for w, _ in sorted(keys)), keys, builds)
    # Timed again only to rule out that they were disturbed: a search meets them as they are.
    transforms = tuple(replace(t, measurement=t.refined or t.measurement, refined=None) for t in changes)
    bare = {key: replace(node.workload, module_json="") for key, (node, _) in skeleton.workloads.items()}
    nodes = tuple(replace(node, workload=bare[node.workload.key]) for node in skeleton.nodes)
    return Table(header, replace(skeleton, nodes=nodes), kernels, transforms, tuple(wholes), source)


def _tries(
    store: RecordStore,
    context: RecordContext,
    workloads: Iterable[str],
    wanted: set[tuple[str, str]],
    builds: BuildTimes,
) -> tuple[RecordedTry, ...]:
    found: list[RecordedTry] = []
    for workload in workloads:
        tries: dict[tuple[str, str], RecordedTry] = {}
        for record in store.records(context, workload=workload, flush=True):
            if (workload, record.candidate) in wanted:
                key = record.candidate, record.schedule
                tries[key] = _later(tries[key], record) if key in tries else _first(record, builds)
        # Candidate by candidate; within one, in the order of the first measurements.
        found += sorted(tries.values(), key=lambda attempt: attempt.candidate)
    return tuple(found)


def _as_they_are(tries: Sequence[RecordedTry]) -> tuple[RecordedTry, ...]:
    """What has one schedule was timed again to rule out that it was disturbed, as layout changes were."""
    ran = Counter((attempt.workload, attempt.candidate) for attempt in tries if attempt.measurement.ok)
    return tuple(
        replace(attempt, measurement=attempt.refined, refined=None)
        if attempt.refined is not None and ran[attempt.workload, attempt.candidate] == 1
        else attempt
        for attempt in tries
    )


def _first(record: KernelRecord, builds: BuildTimes) -> RecordedTry:
    build_s = round(builds.kernel_s(record.workload, record.candidate), 3)
    return RecordedTry(record.workload, record.candidate, record.schedule, _compact(record.measurement), build_s)


def _later(attempt: RecordedTry, record: KernelRecord) -> RecordedTry:
    """A later measurement is a refinement, unless it failed or was disturbed."""
    found = later(attempt.measurement, [_compact(record.measurement)])
    return replace(attempt, refined=found) if found is not attempt.measurement else attempt


def _compact(measurement: Measurement) -> Measurement:
    return replace(measurement, samples_us=rounded(measurement.samples_us), wall_s=round(measurement.wall_s, 3))


def whole_records(records: Iterable[ModelRecord], digest: Any, build_s: float, count: int) -> list[RecordedWhole]:
    """Whole assignments of the store that were built with the schedules that are the fastest now.

    Args:
        records: interleaved runs.
        digest: solution -> digest of its fastest schedules.
        build_s: seconds of a build.
        count: candidates a solution names, the number of nodes.
    """
    found = []
    for record in records:
        for text, samples in record.samples_us.items():
            label = WholeLabel.parse(text)
            if label is None or len(label.solution) != count or digest(label.solution) != label.schedules:
                continue
            found.append(
                RecordedWhole(
                    label.group, label.starts, label.label, label.solution, rounded(samples), round(build_s, 3)
                )
            )
    return sorted(found, key=lambda whole: (whole.group, whole.label != "optimum", whole.solution))
