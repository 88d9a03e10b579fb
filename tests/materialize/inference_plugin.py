"""A pytest plugin that runs every test inside `layout_inference()`; for the suite of another project."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from layoutsearch.materialize.inference import layout_inference


@pytest.fixture(autouse=True)
def _python_layout_inference() -> Iterator[None]:
    with layout_inference():
        yield
