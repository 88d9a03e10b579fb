"""A table in the place of a device: everything that a search needs, checked against the model at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tvm

from layoutsearch.plan.apply import target_json
from layoutsearch.replay.clock import SimulatedBudget
from layoutsearch.replay.lab import ReplayLab, replay_context, replay_identity
from layoutsearch.replay.table import Table, TableError
from layoutsearch.replay.whole import ReplayWhole
from layoutsearch.search.labs import Labs, Workplace
from layoutsearch.search.setup import ModelSetup, template_versions
from layoutsearch.search.skeleton import Skeleton


class ReplaySource:
    """Implements `search.labs.LabSource` from a table. The budget of the run has to be a `SimulatedBudget`.

    Args:
        table: what was recorded.
        target: what the user asked for; the table's by default, and no other is possible.
        threads: likewise.
    """

    def __init__(self, table: Table, target: Any = None, threads: int | None = None) -> None:
        self._table = table
        self.target: Any = dict(table.header.target) if target is None else target
        self.threads: int = threads or table.header.threads

    @property
    def name(self) -> str:
        """See LabSource."""
        return replay_identity(self._table).key

    @contextmanager
    def open(self, setup: ModelSetup, place: Workplace) -> Iterator[Labs]:
        """See LabSource.

        Raises:
            TableError: the table is of another model, target or search space, or of other versions.
        """
        table, budget = self._table, place.budget
        if not isinstance(budget, SimulatedBudget):
            raise TypeError("a replay takes a SimulatedBudget: its time passes as recorded")
        self._check(setup)
        yield Labs(
            ReplayLab(table, place.store, budget, place.reporter, began=place.began),
            ReplayWhole(table, setup.graph, budget, place.reporter),
            replay_identity(table),
            replay_context(table),
            table.profile,
        )

    def _check(self, setup: ModelSetup) -> None:
        table, header = self._table, self._table.header
        versions = (("schedule templates", header.templates, template_versions()), ("TVM", header.tvm, tvm.__version__))
        for what, recorded, present in versions:
            if recorded != present:
                raise TableError(
                    f"{table.source} was recorded with {what} {recorded}, this is {present}; {table.record_again}"
                )
        about: tuple[tuple[str, Any, Any], ...] = (
            ("a model of fingerprint", header.fingerprint, setup.fingerprint),
            ("target", dict(header.target), target_json(setup.target)),
            ("threads", header.threads, self.threads),
        )
        for what, expected, given in about:
            if expected != given:
                raise TableError(
                    f"{table.source} was recorded for {what} {expected}, this run has {given}; name the table of this "
                    "model, or leave --target and --threads away"
                )
        _check_space(table, setup.skeleton)


def _check_space(table: Table, skeleton: Skeleton) -> None:
    for recorded, present in zip(table.skeleton.nodes, skeleton.nodes, strict=True):
        if recorded.workload.key != present.workload.key or recorded.choices != present.choices:
            raise TableError(
                f"{table.source} was recorded with other candidates of {present.workload.summary}; give the --space it "
                f"was recorded with, or {table.record_again}"
            )
