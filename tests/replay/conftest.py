"""A model on disk with its layout problem, and a made-up table of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from layoutsearch.replay.setup import ModelSetup
from layoutsearch.replay.table import Table
from tests.replay.made import made_table, model_setup


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replay")


@pytest.fixture(scope="session")
def setup(folder: Path) -> ModelSetup:
    return model_setup(folder)


@pytest.fixture(scope="session")
def table(setup: ModelSetup) -> Table:
    return made_table(setup)
