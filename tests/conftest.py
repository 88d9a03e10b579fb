"""Lies here so that pytest puts the top of the repository on the path: tests import `tests.models`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest


@pytest.fixture(scope="session", autouse=True)
def _home_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Neither the user's device profiles and cost libraries, nor anything written to them."""
    before = os.environ.get("LAYOUTSEARCH_HOME")
    os.environ["LAYOUTSEARCH_HOME"] = str(tmp_path_factory.mktemp("home"))
    yield
    if before is None:
        del os.environ["LAYOUTSEARCH_HOME"]
    else:
        os.environ["LAYOUTSEARCH_HOME"] = before


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of this project's own tests."""
    parser.addoption(
        "--update-golden", action="store_true", help="write what golden tests find instead of comparing with it"
    )


# The machines that run the tests are shared: how long an example takes says nothing about the code.
hypothesis.settings.register_profile("layoutsearch", deadline=None)
hypothesis.settings.load_profile("layoutsearch")
