"""Outputs of the untouched module: kept, and made again from whatever is left of the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layoutsearch.errors import LayoutSearchError
from layoutsearch.search.reference import Outputs, cached_outputs

OUTPUTS: Outputs = [(np.arange(6, dtype="float32").reshape(2, 3), np.array([7])), (np.ones((1, 5)), np.array([8]))]


def read(path: Path, key: str = "key") -> tuple[Outputs, bool]:
    """Outputs, and whether they were computed."""
    computed = []

    def compute() -> Outputs:
        computed.append(True)
        return OUTPUTS

    return cached_outputs(path, key, compute), bool(computed)


def same(outputs: Outputs) -> bool:
    return [len(row) for row in outputs] == [2, 2] and all(
        np.array_equal(a, b) for got, want in zip(outputs, OUTPUTS, strict=True) for a, b in zip(got, want, strict=True)
    )


def test_they_are_computed_once_for_a_key(tmp_path: Path) -> None:
    path = tmp_path / "reference.npz"
    assert read(path)[1]
    outputs, computed = read(path)
    assert same(outputs)
    assert not computed
    assert read(path, "another model")[1]
    assert [p.name for p in tmp_path.iterdir()] == ["reference.npz"]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_file_is_made_again(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("reference") / "reference.npz"
    read(path)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    path.write_bytes(content)
    assert same(read(path)[0])


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(LayoutSearchError, match="cannot write"):
        read(tmp_path / "none" / "reference.npz")
