"""Tables survive the file, and a file that is not whole is refused with its name and line."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layoutsearch.measure.results import Measurement, Status
from layoutsearch.replay.table import RecordedTry, RecordedWhole, Table, TableError
from layoutsearch.search.known import WHOLE
from layoutsearch.search.setup import ModelSetup
from layoutsearch.search.solve import solve
from tests.replay.made import made_table, schedule

MICROSECONDS = st.integers(0, 10**9).map(lambda n: round(n / 100, 2))
SECONDS = st.integers(0, 10**7).map(lambda n: round(n / 1000, 3))
FAILED = st.sampled_from([s for s in Status if s is not Status.OK and not s.is_infrastructure])


@st.composite
def measurements(draw: st.DrawFn) -> Measurement:
    if draw(st.booleans()):
        return Measurement(Status.OK, tuple(draw(st.lists(MICROSECONDS, min_size=1, max_size=21))), "", draw(SECONDS))
    return Measurement(draw(FAILED), (), draw(st.text(max_size=40)), draw(SECONDS))


@st.composite
def tables(draw: st.DrawFn, base: Table) -> Table:
    """The table with other values, as many tries of each candidate as it happens."""

    def tries(some: RecordedTry) -> RecordedTry:
        text = draw(st.one_of(st.just(WHOLE), st.integers(0, 63).map(schedule)))
        again = draw(st.one_of(st.none(), measurements()))
        refined = again if again is not None and again.ok else None
        return RecordedTry(some.workload, some.candidate, text, draw(measurements()), draw(SECONDS), refined)

    def whole(some: RecordedWhole) -> RecordedWhole:
        unusual = draw(st.dictionaries(st.integers(0, len(some.solution) - 1), st.integers(0, 9).map(schedule)))
        samples = tuple(draw(st.lists(MICROSECONDS, min_size=1, max_size=9)))
        label, build_s = draw(st.text(max_size=9)), draw(SECONDS)
        return RecordedWhole(draw(st.integers(0, 9)), 2, label, some.solution, samples, build_s, tuple(unusual.items()))

    some = draw(st.lists(st.sampled_from(base.kernels), max_size=8))
    moved = draw(st.lists(st.sampled_from(base.transforms), max_size=4))
    header = replace(
        base.header,
        model=draw(st.text()),
        profile=draw(st.one_of(st.none(), st.just({"version": 1, "levels": [{"name": "l1", "gb_s": 1.5}]}))),
        created=draw(st.text()),
    )
    wholes = tuple(map(whole, draw(st.lists(st.sampled_from(base.wholes), max_size=3))))
    return Table(header, base.skeleton, tuple(map(tries, some)), tuple(map(tries, moved)), wholes)


@given(data=st.data())
@settings(max_examples=40)
def test_round_trip(table: Table, data: st.DataObject) -> None:
    drawn = data.draw(tables(loaded_base(table)))
    with tempfile.TemporaryDirectory() as folder:
        path, again = Path(folder) / "a.jsonl.gz", Path(folder) / "b.jsonl.gz"
        drawn.save(path)
        loaded = Table.load(path)
        assert loaded == drawn
        assert loaded.id == drawn.id
        loaded.save(again)
        assert path.read_bytes() == again.read_bytes()


def loaded_base(table: Table) -> Table:
    """Without the modules of the workloads, which a file leaves out."""
    bare = {key: replace(node.workload, module_json="") for key, (node, _) in table.skeleton.workloads.items()}
    nodes = tuple(replace(node, workload=bare[node.workload.key]) for node in table.skeleton.nodes)
    return replace(table, skeleton=replace(table.skeleton, nodes=nodes))


def test_the_skeleton_is_whole(table: Table, tmp_path: Path) -> None:
    """The loaded table poses the same problem: same optimum, same transforms."""
    table.save(tmp_path / "t.jsonl.gz")
    loaded = Table.load(tmp_path / "t.jsonl.gz")
    assert loaded.skeleton.keys == table.skeleton.keys
    assert loaded.problem == table.problem
    best = solve(loaded.problem)
    assert best.proven
    assert loaded.skeleton.transforms(best.assignment) == table.skeleton.transforms(best.assignment)
    assert loaded.additive_us(best.assignment) == pytest.approx(best.cost)
    facts = [node.workload.facts for node in loaded.skeleton.nodes]
    assert facts == [node.workload.facts for node in table.skeleton.nodes]
    assert all(node.workload.module_json == "" for node in loaded.skeleton.nodes)


def test_samples_are_rounded_and_the_file_is_small(setup: ModelSetup, tmp_path: Path) -> None:
    table = made_table(setup)
    first = table.kernels[0]
    exact = replace(first, measurement=replace(first.measurement, samples_us=(1.23456, 2.0)))
    replace(table, kernels=(exact,)).save(tmp_path / "t.jsonl.gz")
    assert Table.load(tmp_path / "t.jsonl.gz").kernels[0].measurement.samples_us == (1.23, 2.0)


def test_refinements_count(table: Table) -> None:
    attempt = next(a for a in table.kernels if a.refined is not None)
    known = table.tries[attempt.workload, attempt.candidate]
    assert attempt in known
    node = next(n for n in table.skeleton.nodes if n.workload.key == attempt.workload)
    choice = next(c for c in node.choices if (str(c) if c is not None else "") == attempt.candidate)
    assert table.of(node.workload, choice).tries[attempt.schedule] == attempt.refined


def test_groups_are_compared_through_what_they_share(table: Table) -> None:
    """The second group ran half as fast again, all of it."""
    for whole in table.wholes:
        assert table.whole_us[whole.solution] / table.additive_us(whole.solution) == pytest.approx(1.1 * 1.25, rel=0.1)
        assert table.leveled_us(whole) / table.additive_us(whole.solution) == pytest.approx(1.1 * 1.25, rel=0.1)


def broken(path: Path, change: Callable[[list[str]], list[str]]) -> Path:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = change(file.read().splitlines())
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in lines))
    return path


def edited(number: int, **changes: Any) -> Callable[[list[str]], list[str]]:
    """Change fields of a line (counted from 1); None removes one."""

    def change(lines: list[str]) -> list[str]:
        data = {**json.loads(lines[number - 1]), **changes}
        lines[number - 1] = json.dumps({k: v for k, v in data.items() if v is not None})
        return lines

    return change


def first_of(kind: str, table: Table) -> int:
    counts = {"workload": len(table.skeleton.workloads), "node": len(table.skeleton.nodes)}
    counts |= {"tensor": len(table.skeleton.tensors), "kernel": len(table.kernels)}
    counts |= {"transform": len(table.transforms)}
    number = 2
    for name, count in counts.items():
        if name == kind:
            return number
        number += count
    return number


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("kernel", {"u": ["fast"]}, "'fast' is not a number"),
        ("kernel", {"u": []}, "at least one number"),
        ("kernel", {"w": None}, "field 'w' is missing"),
        ("kernel", {"is": "colonel"}, "kind 'colonel'"),
        ("transform", {"m": "soon"}, "'soon' is not a number"),
        ("node", {"workload": "0" * 16}, "there is no workload"),
        ("node", {"choices": []}, "at least one choice"),
        ("tensor", {"layouts": ["N?"]}, "'N?' is not a layout"),
        ("workload", {"facts": 7}, "not subscriptable"),
        ("whole", {"a": [0]}, "candidate of every node"),
        ("whole", {"u": 3}, "samples are a list"),
    ],
)
def test_a_wrong_line_is_named(table: Table, tmp_path: Path, kind: str, changes: dict[str, Any], words: str) -> None:
    path = tmp_path / "t.jsonl.gz"
    table.save(path)
    number = first_of(kind, table)
    broken(path, edited(number, **changes))
    with pytest.raises(TableError) as caught:
        Table.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{number}: ")
    assert words in message
    assert "record it again" in message
    assert "\n" not in message


def test_another_schema_is_refused(table: Table, tmp_path: Path) -> None:
    table.save(tmp_path / "t.jsonl.gz")
    broken(tmp_path / "t.jsonl.gz", edited(1, schema="layoutsearch.table/9"))
    with pytest.raises(TableError, match=r"t\.jsonl\.gz:1: schema 'layoutsearch.table/9', expected"):
        Table.load(tmp_path / "t.jsonl.gz")


def test_a_file_that_ends_early_is_refused(table: Table, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    table.save(path)
    whole = path.read_bytes()
    broken(path, lambda lines: lines[:-1])
    with pytest.raises(TableError, match="ends early"):
        Table.load(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TableError, match=r"t\.jsonl\.gz:\d+: damaged"):
        Table.load(path)
    path.write_text("{}")
    with pytest.raises(TableError, match="damaged or no table"):
        Table.load(path)
    broken_empty = tmp_path / "e.jsonl.gz"
    broken_empty.write_bytes(gzip.compress(b""))
    with pytest.raises(TableError, match="is empty"):
        Table.load(broken_empty)
    with pytest.raises(TableError, match=r"cannot read table .*missing"):
        Table.load(tmp_path / "missing.jsonl.gz")


def test_a_failed_write_leaves_the_old_table(table: Table, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    table.save(path)
    before = path.read_bytes()
    unwritable = replace(table.kernels[0], measurement=Measurement(Status.OK, (float("nan"),)))
    with pytest.raises(ValueError, match=r"nan|NaN|Out of range"):
        replace(table, kernels=(unwritable,)).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_what_was_not_recorded_is_one_clear_error(table: Table) -> None:
    partial = replace(table, kernels=table.kernels[6:])
    node = table.skeleton.nodes[0]
    with pytest.raises(TableError, match=r"has no measurement of .*bench record"):
        partial.of(node.workload, node.choices[0])


def test_profiles_of_older_versions_are_read_and_damaged_ones_name_the_table(table: Table) -> None:
    assert table.profile is not None
    profile = {**table.profile.to_json(), "version": 1}
    older = replace(table, header=replace(table.header, profile=profile))
    assert older.profile == replace(table.profile, version=1)
    damaged = replace(table, header=replace(table.header, profile={**profile, "levels": []}))
    with pytest.raises(TableError, match=table.source):
        assert damaged.profile
    assert replace(table, header=replace(table.header, profile=None)).profile is None


@pytest.mark.parametrize(
    ("kind", "field", "value", "words"),
    [
        ("kernel", "u", [-1.0], "no time"),
        ("kernel", "u", [float("nan")], "NaN"),
        ("kernel", "b", float("inf"), "Infinity"),
        ("whole", "u", [1e300, -1e-9], "no time"),
        ("node", "members", [], "members"),
        ("node", "members", [1], "members"),
        ("tensor", "made", ["0"], "made"),
        ("tensor", "made", [99], "do not belong together"),
        ("tensor", "producer", 10**30, "do not belong together"),
        ("tensor", "uses", [[0, []]], "do not belong together"),
        ("tensor", "shape", [[1], 3, 4, 5], "shape"),
    ],
)
def test_a_line_that_was_edited_is_refused(
    table: Table, tmp_path: Path, kind: str, field: str, value: object, words: str
) -> None:
    path = tmp_path / "t.jsonl.gz"
    table.save(path)
    objects = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    number = max(i for i, data in enumerate(objects) if data["is"] == kind and field in data)
    objects[number][field] = value
    path.write_bytes(gzip.compress("".join(json.dumps(data) + "\n" for data in objects).encode()))
    with pytest.raises(TableError, match=words) as caught:
        Table.load(path)
    assert str(path) in str(caught.value)
    assert "together" in words or f":{number + 1}:" in str(caught.value)
