"""What tests of finalists share: a model with pairs of kernels, and a store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from layoutsearch.measure.records import RecordStore
from tests.models import nets
from tests.search.pair_case import Case


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Inverted residuals in NHWC."""
    return Case(nets.inverted_residuals(), "NHWC", tmp_path_factory.mktemp("case"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RecordStore]:
    """Empty."""
    with RecordStore(tmp_path / "records.sqlite") as store:
        yield store
