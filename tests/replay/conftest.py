"""A model on disk with its layout problem, and a made-up table of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from layoutsearch.measure.calibrate import target_text
from layoutsearch.measure.device import Device
from layoutsearch.measure.profile import HOME_VARIABLE, ProfileStore
from layoutsearch.replay.table import Table
from layoutsearch.search.setup import ModelSetup
from tests.replay.made import made_profile, made_table, model_setup


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replay")


@pytest.fixture(scope="session")
def setup(folder: Path) -> ModelSetup:
    return model_setup(folder)


@pytest.fixture(scope="session")
def table(setup: ModelSetup) -> Table:
    return made_table(setup)


@pytest.fixture
def profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: ModelSetup) -> None:
    """This machine has a profile: it need not be calibrated."""
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    with Device.local(threads=1) as device:
        identity = device.identity()
    profile = made_profile(identity.key, identity.cpu, identity.features, target_text(setup.target))
    ProfileStore().save(profile, identity)
