"""Features: finite, named, blind to nothing that matters; the walk of a layout change against a brute-force one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layoutsearch.cost.base import kernel_base, transform_base
from layoutsearch.cost.features import KERNEL_FEATURES, TRANSFORM_FEATURES, kernel_features, transform_features
from layoutsearch.cost.loops import loops_of
from layoutsearch.cost.machine import Machine
from layoutsearch.cost.tiles import best_tile
from layoutsearch.cost.walk import run_length, transform_walk
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.facts import ConvFacts, KernelFacts, OperandFacts
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.transform import TransformKey
from layoutsearch.measure.profile import DeviceProfile, MemoryLevel
from layoutsearch.schedule.target import TargetInfo
from tests.cost.rows import CHOICES, MACHINE, TARGET, conv

LAYOUTS = ("NCHW", "NHWC", "NCHW2c", "NCHW4c", "NCHW8c", "NCHW16c", "NHWC4c")


def elements(layout: Layout, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of the logical elements in the order in which a layout stores them."""
    numbered = np.arange(math.prod(shape)).reshape(shape)
    extents = dict(zip("NCHW", shape, strict=True))
    parts, order = [], []
    for letter in "NCHW":
        block = layout.block(letter)
        order += [letter, letter.lower()] if block > 1 else [letter]
        parts += [extents[letter] // block, block] if block > 1 else [extents[letter]]
    return numbered.reshape(parts).transpose([order.index(a.letter) for a in layout.axes]).ravel()


def shared_run(source: np.ndarray, target: np.ndarray) -> int:
    """Longest r that divides the size, such that every aligned run of r elements is contiguous on both sides."""
    at = np.argsort(source)
    where = at[target]
    size = len(source)
    return max(r for r in range(1, size + 1) if size % r == 0 and (np.diff(where.reshape(-1, r), axis=1) == 1).all())


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.sampled_from([16, 32, 48]), st.integers(1, 5),
    st.integers(1, 5), st.integers(1, 2),
)  # fmt: skip
def test_the_walk_of_a_layout_change_is_what_memory_says(
    source: str, target: str, channels: int, height: int, width: int, batch: int
) -> None:
    shape = (batch, channels, height, width)
    key = TransformKey(shape, "NCHW", "float32", Layout(source), Layout(target))
    walk = transform_walk(key, 16)
    before, after = elements(key.source, shape), elements(key.target, shape)
    assert walk.moves == (not np.array_equal(before, after))
    assert walk.shared_run == shared_run(before, after)
    assert walk.turns == (walk.moves and walk.shared_run == 1)
    if walk.turns:
        # Along the rows the source is contiguous, along the columns the target.
        at_source, at_target = np.argsort(before), np.argsort(after)
        assert np.array_equal(np.diff(at_source[before[: walk.rows]]), np.ones(walk.rows - 1))
        assert walk.read_stride == 4 * abs(at_source[after[1]] - at_source[after[0]])
        assert walk.write_stride == 4 * abs(at_target[before[1]] - at_target[before[0]])
        assert 0 < walk.rows_full <= 1
        assert 0 < walk.columns_full <= 1
    row = transform_features([key], MACHINE)
    assert list(row.columns) == list(TRANSFORM_FEATURES)
    assert np.isfinite(row.to_numpy()).all()
    assert 0 < transform_base(key, MACHINE) < 1e9


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 600), st.integers(1, 600), st.integers(1, 60), st.sampled_from([1, 3, 5, 7]), st.integers(1, 3),
    st.sampled_from(CHOICES),
)  # fmt: skip
def test_any_convolution_has_a_base_and_features(
    channels: int, out: int, size: int, kernel: int, stride: int, choice: Candidate
) -> None:
    facts = conv(channels, out, size, kernel, stride)
    base = kernel_base(facts, choice, MACHINE)
    assert 0 < base.us < 1e9
    # The inner loops are never better than the machine.
    assert base.compute_us >= 0.9 * base.peak_us - 0.1
    assert base.tile is not None
    assert 1 <= base.tile.lanes <= MACHINE.lanes
    row = kernel_features([(facts, choice)], MACHINE)
    assert list(row.columns) == list(KERNEL_FEATURES)
    assert not np.isinf(row.to_numpy()).any()


def test_layouts_are_told_apart() -> None:
    facts = conv(64, 64, 28)
    rows = kernel_features([(facts, choice) for choice in (*CHOICES, None)], MACHINE)
    assert len(rows.drop_duplicates()) == len(CHOICES) + 1
    assert rows["frozen"].tolist() == [0.0] * len(CHOICES) + [1.0]
    # Never seen, but its numbers have a meaning.
    strange = kernel_features([(facts, Candidate.of("NHWC4c", "OHWI4i16o", "NCHW16c"))], MACHINE).iloc[0]
    assert strange["in_block"] == 4
    assert strange["kernel_block_out"] == 16
    assert strange["changes_layout"] == 1


def test_kernels_without_an_anchor_or_a_known_shape_have_features() -> None:
    plain = OperandFacts((1, 1000), "AB", "float32")
    kernels = [
        KernelFacts("softmax", (), (plain,), (plain,), None, (1, 1), 5000),
        KernelFacts("strange", ("mystery",), (), (OperandFacts((), "", "float32"),), None, (1, 1), 0),
        KernelFacts("matmul", (), (plain, OperandFacts((1000, 10), "AB", "float32", True)),
                    (OperandFacts((1, 10), "AB", "float32"),), None, (1, 1), 20000),
    ]  # fmt: skip
    rows = kernel_features([(facts, None) for facts in kernels], MACHINE)
    assert rows["kind_other"].tolist() == [0.0, 1.0, 0.0]
    assert rows["epilogue_other"].tolist() == [0.0, 1.0, 0.0]
    assert np.isfinite(rows["log_base"]).all()
    assert np.isnan(rows["tile_rows"]).tolist() == [True, True, False]


def test_a_depthwise_channel_block_narrower_than_a_vector_wastes_lanes() -> None:
    facts = ConvFacts(1, 64, 64, (3, 3), (1, 1), (1, 1), 64, (28, 28), (28, 28))
    wide, narrow = (best_tile(facts, False, Candidate.of(f"NCHW{b}c", f"OIHW{b}o"), MACHINE) for b in (16, 8))
    assert (wide.lanes, narrow.lanes) == (16, 8)
    assert narrow.cycles > 1.5 * wide.cycles


def test_short_rows_take_pieces_and_strided_ones_gathers() -> None:
    data, made = OperandFacts((1, 64, 14, 14), "NCHW", "float32"), OperandFacts((1, 64, 7, 7), "NCHW", "float32")
    pool = KernelFacts("max_pool2d", (), (data,), (made,), None, (2, 2), 12544)
    plain, last = (loops_of(pool, Candidate.of(name), MACHINE) for name in ("NCHW", "NHWC"))
    assert (plain.run, plain.pieces) == (7, 3)
    assert (last.run, last.pieces, last.gathers) == (64, 1, False)
    assert plain.cycles > 3 * last.cycles


@pytest.mark.parametrize(("name", "run"), [("NCHW", 42), ("NHWC", 32), ("NCHW8c", 8)])
def test_runs(name: str, run: int) -> None:
    assert run_length(Layout(name), (1, 32, 6, 7), "NCHW") == run


def test_a_profile_sets_the_scale_and_keeps_the_order() -> None:
    levels = (MemoryLevel("l1", 96 << 10, 600.0), MemoryLevel("l2", 4 << 20, 300.0), MemoryLevel("l3", 64 << 20, 80.0),
              MemoryLevel("memory", 0, 20.0))  # fmt: skip
    profile = DeviceProfile(1, "local", "cpu", (), 2, {"float32": 200.0}, levels, 1.5, "now")
    machine = Machine.of(profile, TARGET)
    assert machine.gflops == pytest.approx(200.0)
    assert (machine.l1_bytes, machine.l2_bytes, machine.l3_bytes) == (48 << 10, 2 << 20, 64 << 20)
    assert machine.call_us == 1.5
    sizes = [2.0**i for i in range(10, 32)]
    rates = [machine.gb_s(size) for size in sizes]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == pytest.approx(300.0)
    assert rates[-1] == pytest.approx(20.0)
    one = Machine.of(None, TargetInfo("neon", 4, 32, True, 32 << 10, 256 << 10, 4))
    assert one.gflops == pytest.approx(4 * 4 * 4 * 2.5)
