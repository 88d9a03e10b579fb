"""A table stands for a device only for the model, the search space and the versions it was recorded with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layoutsearch.measure.records import RecordStore
from layoutsearch.plan.apply import target_json
from layoutsearch.replay.clock import SimulatedBudget
from layoutsearch.replay.session import ReplaySource
from layoutsearch.replay.table import Table, TableError
from layoutsearch.search.budget import Budget
from layoutsearch.search.known import Request
from layoutsearch.search.labs import Labs, Workplace
from layoutsearch.search.reporter import Silent
from layoutsearch.search.setup import ModelSetup


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    with RecordStore(tmp_path / "r.sqlite") as store:
        yield Workplace(tmp_path, tmp_path, store, None, [], SimulatedBudget(), Silent())


def opened(table: Table, setup: ModelSetup, place: Workplace, **asked: Any) -> Labs:
    with ReplaySource(table, **asked).open(setup, place) as labs:
        return labs


def test_it_stands_for_the_device(table: Table, setup: ModelSetup, place: Workplace) -> None:
    source = ReplaySource(table)
    assert (source.name, source.threads, source.target) == ("replay:local", 1, target_json(setup.target))
    labs = opened(table, setup, place)
    assert labs.identity.key == labs.context.device == "replay:local"
    assert labs.profile.to_json() == table.header.profile
    workload, choice = table.candidates[0]
    labs.lab.measure([Request(workload, choice, 1)])
    (record,) = place.store.records(labs.context)
    assert record.workload == workload.key


def test_real_time_is_a_mistake(table: Table, setup: ModelSetup, place: Workplace) -> None:
    with pytest.raises(TypeError, match="SimulatedBudget"):
        opened(table, setup, replace(place, budget=Budget()))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"templates": "channels0"}, "recorded with schedule templates channels0, this is .*bench record MODEL --out"),
        ({"tvm": "0.1"}, r"recorded with TVM 0\.1, this is .*bench record MODEL --out made"),
        ({"fingerprint": "other"}, "a model of fingerprint other"),
        ({"target": {"kind": "cuda"}}, "target {'kind': 'cuda'}"),
        ({"threads": 7}, "threads 7, this run has 1"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    table: Table, setup: ModelSetup, place: Workplace, changes: dict[str, Any], words: str
) -> None:
    stranger = replace(table, header=replace(table.header, **changes))
    with pytest.raises(TableError, match=words) as caught:
        opened(stranger, setup, place, threads=1)
    assert "\n" not in str(caught.value)


def test_another_search_space_is_refused(table: Table, setup: ModelSetup, place: Workplace) -> None:
    nodes = list(setup.skeleton.nodes)
    index = next(i for i, node in enumerate(nodes) if len(node.choices) > 1)
    nodes[index] = replace(nodes[index], choices=nodes[index].choices[:-1])
    with pytest.raises(TableError, match=r"other candidates of .*--space"):
        opened(table, replace(setup, skeleton=replace(setup.skeleton, nodes=tuple(nodes))), place)
