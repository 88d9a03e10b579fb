"""What moves nothing in a model: by construction, in every layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from layoutsearch.cost.model import CostModel
from layoutsearch.cost.views import is_view
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.facts import KernelFacts, OperandFacts
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.transform import TransformKey
from tests.cost.rows import TARGET, kernel_rows, transform_rows


def concat(batch: int, *channels: int, axes: str = "NCHW", height: int = 6, width: int = 10) -> KernelFacts:
    parts = tuple(OperandFacts((batch, c, height, width), axes, "float32") for c in channels)
    made = (OperandFacts((batch, sum(channels), height, width), axes, "float32"),)
    return KernelFacts("concat", (), parts, made, None, (1, 1), 0)


@pytest.mark.parametrize(
    ("layout", "view"), [("NCHW", True), ("NCHW8c", True), ("NHWC", False), ("NHWC8c", False), ("CNHW", True)]
)
def test_a_concatenation_of_channels(layout: str, view: bool) -> None:
    assert is_view(concat(1, 24, 8), Candidate.uniform(Layout(layout))) is view


def test_a_batch_puts_the_parts_apart() -> None:
    assert not is_view(concat(2, 24, 8), Candidate.uniform(Layout("NCHW")))
    assert not is_view(concat(2, 24, 8), None)
    assert is_view(concat(1, 24, 8), None)


def test_one_pixel_is_in_order_in_every_layout() -> None:
    assert is_view(concat(1, 24, 8, height=1, width=1), Candidate.uniform(Layout("NHWC")))


def test_a_tail_has_to_be_computed() -> None:
    assert not is_view(replace(concat(1, 24, 8), epilogue=("relu",)), Candidate.uniform(Layout("NCHW")))
    assert not is_view(replace(concat(1, 24, 8), kind="add"), Candidate.uniform(Layout("NCHW")))
    assert is_view(replace(concat(1, 24), kind="reshape"), None)


def test_a_cost_model_knows_views_and_does_not_learn_from_them() -> None:
    rows = [row for i, name in enumerate("abc") for row in kernel_rows(name, i, 12)]
    view = concat(1, 24, 8)
    free = [
        replace(rows[0], facts=view, choice=Candidate.uniform(Layout("NCHW")), us=0.1, workload=f"v{i}")
        for i in range(40)
    ]
    asked = [(r.facts, r.choice) for r in kernel_rows("d", 9)]
    plain, taught = (CostModel.fit(some, [], target=TARGET) for some in (rows, rows + free))
    assert np.array_equal(plain.kernels(asked).us, taught.kernels(asked).us)
    assert plain.kernels([(view, Candidate.uniform(Layout("NCHW")))]).us[0] == pytest.approx(0.1)
    assert plain.kernels([(view, Candidate.uniform(Layout("NHWC")))]).us[0] > 0.3


def test_so_are_layout_changes_that_keep_the_order() -> None:
    rows = [row for i, name in enumerate("abc") for row in transform_rows(name, i)]
    kept = TransformKey((1, 16, 9, 7), "NCHW", "float32", Layout("NHWC"), Layout("NCHW16c"))
    moved = replace(kept, target=Layout("NCHW8c"))
    free = [replace(rows[0], key=replace(kept, shape=(1, 16, 9, i + 1)), us=0.1) for i in range(40)]
    plain, taught = (CostModel.fit([], some, target=TARGET) for some in (rows, rows + free))
    assert np.array_equal(plain.transforms([moved]).us, taught.transforms([moved]).us)
    found = plain.transforms([kept, moved])
    assert found.us[0] == pytest.approx(0.1)
    assert found.sigma[0] < 0.05
    assert found.us[1] > 0.1
