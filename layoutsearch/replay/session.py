"""A table in the place of a device: everything that a search needs, checked against the model at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm

from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.measure.device import DeviceIdentity
from layoutsearch.measure.records import RecordContext, RecordStore
from layoutsearch.replay.clock import SimulatedBudget
from layoutsearch.replay.lab import ReplayLab, replay_context, replay_identity
from layoutsearch.replay.table import Table, TableError
from layoutsearch.replay.whole import ReplayWhole
from layoutsearch.search.reporter import Reporter
from layoutsearch.search.skeleton import Skeleton


@dataclass(frozen=True)
class ReplaySession:
    """What takes the place of a device, a kernel lab and a whole-model lab."""

    lab: ReplayLab
    whole: ReplayWhole
    identity: DeviceIdentity
    context: RecordContext
    budget: SimulatedBudget


def open_replay(
    table: Table,
    graph: LayoutGraph,
    skeleton: Skeleton,
    fingerprint: str,
    target: Mapping[str, Any],
    threads: int,
    templates: str,
    store: RecordStore | None,
    budget: SimulatedBudget,
    reporter: Reporter,
    began: int | None = None,
) -> ReplaySession:
    """The labs of a table for a model that was loaded.

    Args:
        table: what was recorded.
        graph: layout graph of the model.
        skeleton: its layout problem.
        fingerprint: of its canonical module.
        target: what the run is for, as plain data; the table's own is `table.header.target`.
        threads: likewise; `table.header.threads`.
        templates: versions of the schedule templates of this layoutsearch.
        store: where the replay keeps what it has revealed, so that it can be resumed.
        budget: simulated time.
        reporter: gets progress.
        began: mark of the store when a run that is resumed began; see `ReplayLab`.

    Raises:
        TableError: the table is of another model, target, search space, or of other versions.
    """
    header = table.header
    versions = (("schedule templates", header.templates, templates), ("TVM", header.tvm, tvm.__version__))
    for what, recorded, present in versions:
        if recorded != present:
            raise TableError(
                f"{table.source} was recorded with {what} {recorded}, this is {present}; {table.record_again}"
            )
    about: tuple[tuple[str, Any, Any], ...] = (
        ("a model of fingerprint", header.fingerprint, fingerprint),
        ("target", dict(header.target), dict(target)),
        ("threads", header.threads, threads),
    )
    for what, expected, given in about:
        if expected != given:
            raise TableError(
                f"{table.source} was recorded for {what} {expected}, this run has {given}; name the table of this "
                "model, or leave --target and --threads away"
            )
    _check_space(table, skeleton)
    return ReplaySession(
        ReplayLab(table, store, budget, reporter, began=began),
        ReplayWhole(table, graph, budget, reporter),
        replay_identity(table),
        replay_context(table),
        budget,
    )


def _check_space(table: Table, skeleton: Skeleton) -> None:
    for recorded, present in zip(table.skeleton.nodes, skeleton.nodes, strict=True):
        if recorded.workload.key != present.workload.key or recorded.choices != present.choices:
            raise TableError(
                f"{table.source} was recorded with other candidates of {present.workload.summary}; give the --space it "
                f"was recorded with, or {table.record_again}"
            )
