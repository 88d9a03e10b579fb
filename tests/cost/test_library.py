"""Rows of earlier runs: kept by model and by what they were measured on, and never read as something else."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from layoutsearch.cost.correction import WholeRow
from layoutsearch.cost.library import CostLibrary, LibraryError, ModelRows
from layoutsearch.cost.machine import Machine
from layoutsearch.cost.model import ModelIdentity
from layoutsearch.cost.train import Rows
from layoutsearch.cost.whole import whole_shape
from tests.cost.rows import TARGET, kernel_rows, transform_rows

IDENTITY = ModelIdentity("a cpu, 2 threads, llvm", "channels1, tvm 0.27")


def rows(model: str) -> ModelRows:
    kernels = tuple(replace(row, model=model) for row in kernel_rows(model, seed=0)[:20])
    moves = tuple(replace(row, model=model) for row in transform_rows(model, seed=0)[:5])
    machine = Machine.of(None, TARGET)
    shape = whole_shape([(r.facts, r.choice, r.us) for r in kernels], [(r.key, r.us) for r in moves], machine)
    return ModelRows(model, Rows(kernels, moves), (WholeRow(shape, 123.5, model),))


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    library = CostLibrary(IDENTITY, tmp_path)
    library.save(rows("b"))
    library.save(rows("a"))
    assert list(CostLibrary(IDENTITY, tmp_path).models()) == [rows("a"), rows("b")]


def test_a_later_run_of_a_model_replaces_the_earlier(tmp_path: Path) -> None:
    library = CostLibrary(IDENTITY, tmp_path)
    library.save(rows("a"))
    library.save(ModelRows("a"))
    assert list(library.models()) == [ModelRows("a")]


@pytest.mark.parametrize("other", [{"device": "another cpu"}, {"templates": "channels2, tvm 0.27"}])
def test_other_devices_and_versions_have_libraries_of_their_own(tmp_path: Path, other: dict[str, str]) -> None:
    CostLibrary(IDENTITY, tmp_path).save(rows("a"))
    assert not list(CostLibrary(replace(IDENTITY, **other), tmp_path).models())


# What is packed is damaged, not its checksum at the end.
FLIPPED = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\xff" + b"\xff" * 40


@pytest.mark.parametrize("content", [b"", b"{", gzip.compress(b"[]"), gzip.compress(b'{"schema": "other"}'), FLIPPED])
def test_a_file_that_cannot_be_read_is_left_out(tmp_path: Path, content: bytes) -> None:
    library = CostLibrary(IDENTITY, tmp_path)
    library.save(rows("a"))
    (library.folder / "broken.json.gz").write_bytes(content)
    assert [found.model for found in library.models()] == ["a"]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(LibraryError, match="LAYOUTSEARCH_HOME"):
        CostLibrary(IDENTITY, tmp_path / "file").save(rows("a"))


@pytest.mark.parametrize("us", [0.0, -1.0, float("nan"), float("inf"), "fast", None])
@pytest.mark.parametrize("of", ["kernels", "transforms", "wholes"])
def test_a_file_with_what_is_no_time_is_left_out(tmp_path: Path, of: str, us: object) -> None:
    library = CostLibrary(IDENTITY, tmp_path)
    library.save(rows("a"))
    library.save(rows("b"))
    path = library.folder / "b.json.gz"
    data = json.loads(gzip.decompress(path.read_bytes()))
    if of == "wholes":
        data[of][0]["us"] = us
    else:
        data[of][0][2] = us
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    assert [found.model for found in library.models()] == ["a"]
