"""One PoCL process for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.textures.pocl import Pocl
from tests.textures.pocl import pocl as started


@pytest.fixture(scope="session")
def pocl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pocl]:
    with started(tmp_path_factory.mktemp("pocl")) as process:
        yield process
