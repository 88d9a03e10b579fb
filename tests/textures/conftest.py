"""One PoCL process for all tests here."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.textures.pocl import Pocl
from tests.textures.pocl import pocl as started


@pytest.fixture(scope="session")
def pocl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pocl]:
    if importlib.util.find_spec("pyopencl") is None:
        pytest.skip("no OpenCL; run: pip install 'pyopencl[pocl]'")
    with started(tmp_path_factory.mktemp("pocl")) as process:
        yield process
