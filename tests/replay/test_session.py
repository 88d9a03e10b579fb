"""A table stands for a device only for the model, the search space and the versions it was recorded with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from layoutsearch.plan.apply import target_json
from layoutsearch.replay.clock import SimulatedBudget
from layoutsearch.replay.session import ReplaySession, open_replay
from layoutsearch.replay.setup import ModelSetup
from layoutsearch.replay.table import Table, TableError
from layoutsearch.search.reporter import Silent
from layoutsearch.search.tune import template_versions


def opened(table: Table, setup: ModelSetup, threads: int = 1, **other: Any) -> ReplaySession:
    target: Mapping[str, Any] = other.pop("target", target_json(setup.target))
    arguments = {"skeleton": setup.skeleton, "fingerprint": setup.fingerprint, "templates": template_versions()}
    arguments |= other
    return open_replay(
        table, setup.graph, **arguments, target=target, threads=threads, store=None, budget=SimulatedBudget(),
        reporter=Silent(),
    )  # fmt: skip


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
    table: Table, setup: ModelSetup, changes: dict[str, Any], words: str
) -> None:
    stranger = replace(table, header=replace(table.header, **changes))
    with pytest.raises(TableError, match=words) as caught:
        opened(stranger, setup)
    assert "\n" not in str(caught.value)


def test_another_search_space_is_refused(table: Table, setup: ModelSetup) -> None:
    nodes = list(setup.skeleton.nodes)
    index = next(i for i, node in enumerate(nodes) if len(node.choices) > 1)
    nodes[index] = replace(nodes[index], choices=nodes[index].choices[:-1])
    with pytest.raises(TableError, match=r"other candidates of .*--space"):
        opened(table, setup, skeleton=replace(setup.skeleton, nodes=tuple(nodes)))
