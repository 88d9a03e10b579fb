"""Lies here so that pytest puts the top of the repository on the path: tests import `tests.models`."""

from __future__ import annotations

import hypothesis
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of this project's own tests."""
    parser.addoption(
        "--update-golden", action="store_true", help="write what golden tests find instead of comparing with it"
    )


# The machines that run the tests are shared: how long an example takes says nothing about the code.
hypothesis.settings.register_profile("layoutsearch", deadline=None)
hypothesis.settings.load_profile("layoutsearch")
