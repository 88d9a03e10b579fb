"""What a lab knows: all of the records, or in a resumed run what it asks for again, in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from layoutsearch.measure.records import KernelRecord, RecordContext, RecordStore
from layoutsearch.measure.results import Measurement, Status
from layoutsearch.search.known import WHOLE
from layoutsearch.search.memory import LabMemory

CONTEXT = RecordContext("llvm", "local", "cpu", 2, "0.27", "t1")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RecordStore]:
    with RecordStore(tmp_path / "records.sqlite") as store:
        yield store


def ran(*us: float) -> Measurement:
    return Measurement(Status.OK, us)


def add(store: RecordStore, schedule: str, measurement: Measurement, candidate: str = "NCHW,NCHW") -> None:
    store.add(KernelRecord(CONTEXT, "w", candidate, schedule, measurement))


def test_without_a_mark_all_is_known_at_once(store: RecordStore) -> None:
    add(store, "a", ran(3.0))
    add(store, "a", ran(2.0, 2.0))
    add(store, WHOLE, Measurement(Status.INFEASIBLE, (), "no more"))
    known = LabMemory(store, CONTEXT).known("w", "NCHW,NCHW")
    assert known.tries == {"a": ran(2.0, 2.0)}
    assert known.closed
    assert known.reason == "no more"


@pytest.mark.parametrize(("status", "closed"), [(Status.BUILD_TIMEOUT, False), (Status.BUILD_CRASH, True)])
def test_a_build_that_took_too_long_is_tried_again_by_the_next_run(
    store: RecordStore, status: Status, closed: bool
) -> None:
    add(store, "a", ran(3.0))
    add(store, WHOLE, Measurement(status, (), "no result"))
    assert LabMemory(store, CONTEXT).known("w", "NCHW,NCHW").closed is closed
    assert LabMemory(store, CONTEXT, store.mark()).known("w", "NCHW,NCHW").closed is closed
    # In the run that it belongs to, resumed or not, it stays closed.
    resumed = LabMemory(store, CONTEXT, began=0)
    assert resumed.recall("w", "NCHW,NCHW", 9)
    assert resumed.known("w", "NCHW,NCHW").closed


def test_what_came_after_the_mark_is_recalled_in_order(store: RecordStore) -> None:
    add(store, "a", ran(3.0))
    mark = store.mark()
    for schedule, us in (("b", 2.0), ("c", 1.0), ("d", 0.5)):
        add(store, schedule, ran(us))
    add(store, "c", ran(1.2, 1.2))
    add(store, WHOLE, Measurement(Status.INFEASIBLE))
    memory = LabMemory(store, CONTEXT, mark)
    known = memory.known("w", "NCHW,NCHW")
    assert list(known.tries) == ["a"]
    assert not memory.recall("w", "NCHW,NCHW", 1)
    assert memory.recall("w", "NCHW,NCHW", 3)
    assert list(known.tries) == ["a", "b", "c"]
    assert not memory.recall_again("w", "NCHW,NCHW", "c"), "d was measured before c was timed again"
    assert memory.recall("w", "NCHW,NCHW", 24)
    assert list(known.tries) == ["a", "b", "c", "d"]
    assert not known.closed
    assert memory.recall_again("w", "NCHW,NCHW", "c")
    assert known.tries["c"] == ran(1.2, 1.2)
    assert memory.recall("w", "NCHW,NCHW", 24)
    assert known.closed
    assert not memory.recall("w", "NCHW,NCHW", 24)


def test_the_last_word_on_a_candidate_comes_with_its_last_try(store: RecordStore) -> None:
    add(store, "a", ran(3.0))
    add(store, WHOLE, Measurement(Status.INFEASIBLE))
    memory = LabMemory(store, CONTEXT, began=0)
    assert memory.recall("w", "NCHW,NCHW", 1)
    assert memory.known("w", "NCHW,NCHW").closed


def test_what_is_added_is_known_and_kept(store: RecordStore) -> None:
    memory = LabMemory(store, CONTEXT, began=0)
    memory.add("w", "NCHW,NCHW", "a", Measurement(Status.CRASH, (), "SIGSEGV"), 7)
    assert memory.failures == {"crash": 1}
    assert not memory.recall("w", "NCHW,NCHW", 5)
    assert list(LabMemory(store, CONTEXT).known("w", "NCHW,NCHW").tries) == ["a"]


def test_candidates_do_not_mix(store: RecordStore) -> None:
    add(store, "a", ran(3.0))
    add(store, "a", ran(1.0), "NHWC,NHWC")
    memory = LabMemory(store, CONTEXT, began=0)
    assert memory.recall("w", "NHWC,NHWC", 1)
    assert not memory.known("w", "NCHW,NCHW").tries
