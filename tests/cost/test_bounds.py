"""Bounds: never above what the hardware of the profile would need, whatever the kernel; monotone; zero for views."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from layoutsearch.cost.bounds import Bounds
from layoutsearch.cost.touched import needed_bytes, needed_flops
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.facts import ConvFacts, KernelFacts, OperandFacts
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.transform import TransformKey
from layoutsearch.materialize.moves import move_array
from layoutsearch.measure.profile import PROFILE_VERSION, DeviceProfile, MemoryLevel

LEVELS = (
    MemoryLevel("l1", 64 << 10, 400.0),
    MemoryLevel("l2", 1 << 20, 100.0),
    MemoryLevel("l3", 16 << 20, 40.0),
    MemoryLevel("memory", 0, 10.0),
)
PROFILE = DeviceProfile(PROFILE_VERSION, "board", "cpu", (), 2, {"float32": 100.0}, LEVELS, 2.0, "", least_call_us=0.5)
BOUNDS = Bounds(PROFILE, allowance=0.0)
NHWC = Candidate.of("NHWC")


def tensor(*shape: int, weight: bool = False, dtype: str = "float32") -> OperandFacts:
    return OperandFacts(shape, "NCHW"[: len(shape)], dtype, weight)


def elementwise(elements: int, flops: int = 0, weights: int = 0, dtype: str = "float32") -> KernelFacts:
    """add: a tensor, and weights if any, to a tensor."""
    shape = (1, elements, 1, 1)
    operands = [tensor(*shape, dtype=dtype)]
    if weights:
        operands.append(tensor(1, weights, 1, 1, weight=True, dtype=dtype))
    return KernelFacts("add", (), tuple(operands), (tensor(*shape, dtype=dtype),), None, (1, 1), flops)


def conv(size: int, kernel: int, stride: int, dilation: int, pads: tuple[int, int], channels: int = 4) -> KernelFacts:
    """A square convolution; its window must fit."""
    span = dilation * (kernel - 1) + 1
    made = (size + sum(pads) - span) // stride + 1
    facts = ConvFacts(
        1, channels, channels, (kernel, kernel), (stride, stride), (dilation, dilation), 1, (size, size), (made, made)
    )
    flops = 2 * made * made * channels * channels * kernel * kernel
    data, weight = (
        tensor(1, channels, size, size),
        OperandFacts((channels, channels, kernel, kernel), "OIHW", "float32", True),
    )
    return KernelFacts(
        "conv2d", ("add", "relu"), (data, weight), (tensor(1, channels, made, made),), facts, (1, 1), flops
    )


sizes = st.integers(1, 1 << 24)


@given(sizes, sizes, st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_more_operations_never_take_less(elements: int, weights: int, a: int, b: int) -> None:
    low, high = sorted((a, b))
    assert BOUNDS.kernel_us(elementwise(elements, low), NHWC) <= BOUNDS.kernel_us(elementwise(elements, high), NHWC)


@given(sizes, sizes, sizes, sizes)
def test_more_bytes_never_take_less(a: int, b: int, c: int, d: int) -> None:
    (few, many), (light, heavy) = sorted((a, b)), sorted((c, d))
    bound = BOUNDS.kernel_us(elementwise(few, weights=light), None)
    assert 0 < bound <= BOUNDS.kernel_us(elementwise(many, weights=light), None)
    assert bound <= BOUNDS.kernel_us(elementwise(few, weights=heavy), None)


@given(sizes, sizes)
def test_transforms_grow_with_the_tensor(a: int, b: int) -> None:
    few, many = (
        TransformKey((2, n, 2, 2), "NCHW", "float32", Layout("NCHW"), Layout("NHWC")) for n in sorted((a + 1, b + 1))
    )
    assert 0 < BOUNDS.transform_us(few) <= BOUNDS.transform_us(many)


@given(sizes, st.integers(0, 1 << 24))
def test_bounds_lie_between_everything_in_the_first_level_and_everything_through_every_level(
    elements: int, weights: int
) -> None:
    moved, cold = 8 * elements, 4 * weights
    bound = BOUNDS.kernel_us(elementwise(elements, weights=weights), NHWC) - PROFILE.least_call_us
    through_registers = (moved + cold) / (LEVELS[0].gb_s * 1e3)
    assert bound >= max(through_registers, cold / (LEVELS[-1].gb_s * 1e3)) * (1 - 1e-9)
    assert bound <= max((moved + cold) / (level.gb_s * 1e3) for level in LEVELS) * (1 + 1e-9)


def test_what_fits_a_cache_costs_its_bandwidth_and_weights_cost_that_of_memory() -> None:
    small = elementwise(4096)  # 16 KiB in, 16 KiB out: in the first level
    assert BOUNDS.kernel_us(small, NHWC) == pytest.approx(2 * 16384 / 400e3 + 0.5)
    large = elementwise(1 << 24)  # 64 MiB each way, of which 17 MiB may lie in caches
    held = sum(level.bytes for level in LEVELS)
    assert BOUNDS.kernel_us(large, NHWC) == pytest.approx(2 * ((64 << 20) - held) / 10e3 + 0.5)
    heavy = elementwise(4096, weights=1 << 20)
    assert BOUNDS.kernel_us(heavy, NHWC) == pytest.approx((4 << 20) / 10e3 + 0.5)
    busy = elementwise(4096, flops=10**9)
    assert BOUNDS.kernel_us(busy, NHWC) == pytest.approx(10**9 / 100e3 + 0.5)


def test_a_level_is_never_charged_more_than_one_further_out_that_was_found_faster() -> None:
    odd, even = (
        Bounds(replace(PROFILE, levels=(*LEVELS[:2], MemoryLevel("l3", 16 << 20, rate), LEVELS[3])), 0.0)
        for rate in (1.0, 10.0)
    )
    facts = elementwise(1 << 24)
    assert odd.kernel_us(facts, NHWC) == even.kernel_us(facts, NHWC)


def test_the_allowance_lowers_every_bound_but_the_call() -> None:
    facts = elementwise(1 << 20, flops=10**8)
    assert Bounds(PROFILE, 0.25).kernel_us(facts, NHWC) == pytest.approx(
        (BOUNDS.kernel_us(facts, NHWC) - 0.5) / 1.25 + 0.5
    )


def test_a_type_without_a_peak_is_bounded_by_its_bytes() -> None:
    facts = elementwise(4096, flops=10**12, dtype="int8")
    assert BOUNDS.kernel_us(facts, NHWC) == pytest.approx(2 * 4096 / 400e3 + 0.5)
    assert BOUNDS.share_of_peak(facts, 10.0) is None


def test_share_of_peak() -> None:
    assert BOUNDS.share_of_peak(elementwise(1, flops=10**6), 20.0) == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ["reshape", "squeeze", "flatten", "permute_dims"])
def test_views_are_free(kind: str) -> None:
    assert BOUNDS.kernel_us(replace(elementwise(1 << 20), kind=kind), None) == 0.0
    assert BOUNDS.kernel_us(replace(elementwise(1 << 20), kind=kind, epilogue=("add",)), None) > 0.0


@given(
    st.integers(1, 40), st.integers(1, 7), st.integers(1, 5), st.integers(1, 3), st.integers(0, 3), st.integers(0, 3)
)
def test_a_convolution_reads_no_less_than_is_counted(
    size: int, kernel: int, stride: int, dilation: int, before: int, after: int
) -> None:
    span = dilation * (kernel - 1) + 1
    assume(span <= size + before + after)
    facts = conv(size, kernel, stride, dilation, (before, after))
    assert facts.conv is not None
    rows = {q * stride + tap * dilation - before for q in range(facts.conv.out_size[0]) for tap in range(kernel)} & set(
        range(size)
    )
    needed = needed_bytes(facts)
    assert 0 <= needed.read <= 4 * 4 * len(rows) ** 2 + 1e-6
    assert needed.cold == facts.weight_bytes
    assert needed.written == facts.written_bytes
    if before == after == 0 and dilation == 1 and (size - span) % stride == 0:
        assert needed.read >= 4 * 4 * max(0, len(rows) - stride + 1) ** 2 - 1e-6


def test_a_strided_pointwise_convolution_reads_a_quarter() -> None:
    assert needed_bytes(conv(56, 1, 2, 1, (0, 0))).read == pytest.approx(4 * 4 * 28 * 28)
    assert needed_bytes(conv(56, 3, 1, 1, (1, 1))).read == pytest.approx(4 * 4 * 56 * 56)


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 5), st.integers(0, 3))
def test_a_pool_reads_no_less_than_is_counted(size: int, window: int, stride: int, pad: int) -> None:
    assume(window <= size and pad < window)
    made = (size + 2 * pad - window) // stride + 1
    rows = {q * stride + tap - pad for q in range(made) for tap in range(window)} & set(range(size))
    facts = KernelFacts(
        "max_pool2d", (), (tensor(1, 2, size, size),), (tensor(1, 2, made, made),), None, (window, window), 0
    )
    assert 0 <= needed_bytes(facts).read <= 2 * 4 * len(rows) ** 2 + 1e-6


def test_a_global_pool_reads_everything() -> None:
    facts = KernelFacts("adaptive_avg_pool2d", (), (tensor(1, 8, 7, 7),), (tensor(1, 8, 1, 1),), None, (7, 7), 8 * 49)
    assert needed_bytes(facts).read == 4 * 8 * 49


@given(
    st.integers(1, 12), st.integers(1, 5), st.integers(1, 4), st.integers(1, 2), st.integers(0, 3), st.integers(0, 3)
)
def test_a_transposed_convolution_multiplies_no_less_than_is_counted(
    size: int, kernel: int, stride: int, dilation: int, before: int, after: int
) -> None:
    full = (size - 1) * stride + dilation * (kernel - 1) + 1
    made = full - before - after
    assume(made > 0)
    pairs = sum(0 <= i * stride + tap * dilation - before < made for i in range(size) for tap in range(kernel))
    facts = KernelFacts(
        "conv2d_transpose",
        (),
        (tensor(1, 3, size, size), OperandFacts((3, 5, kernel, kernel), "IOHW", "float32", True)),
        (tensor(1, 5, made, made),),
        ConvFacts(1, 3, 5, (kernel,) * 2, (stride,) * 2, (dilation,) * 2, 1, (size,) * 2, (made,) * 2),  # type: ignore[arg-type]
        (1, 1),
        2 * size * size * 15 * kernel * kernel,
    )
    assert 0 <= needed_flops(facts) <= 2 * 15 * pairs**2
    if not before and not after:
        assert needed_flops(facts) == facts.flops


@pytest.mark.parametrize("kind", ["strided_slice", "take", "extern", "split", "where"])
def test_what_may_skip_parts_of_its_operands_is_bounded_by_what_it_writes(kind: str) -> None:
    facts = replace(elementwise(1 << 20, flops=10**12, weights=1 << 20), kind=kind, results=(tensor(1, 16, 1, 1),))
    assert BOUNDS.kernel_us(facts, None) == pytest.approx(64 / 400e3 + 0.5)
    assert BOUNDS.kernel_us(replace(facts, kind="add", epilogue=(kind,)), None) == pytest.approx(64 / 400e3 + 0.5)


LAYOUTS = ("NCHW", "NHWC", "NCHW4c", "NCHW8c", "CNHW", "NHWC4c", "NCHW2n4c")


@given(
    st.tuples(*(st.sampled_from(s) for s in ((1, 2), (4, 8), (1, 3), (1, 5)))),
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS),
)
def test_a_transform_is_free_exactly_if_the_elements_stay_in_order(
    shape: tuple[int, int, int, int], source: str, target: str
) -> None:
    a, b = Layout(source), Layout(target)
    assume(a.divides(shape, "NCHW") and b.divides(shape, "NCHW"))
    key = TransformKey(shape, "NCHW", "float32", a, b)
    array = np.arange(math.prod(shape)).reshape(shape)
    in_a, in_b = (move_array(array, Layout("NCHW"), layout).ravel() for layout in (a, b))
    assert key.keeps_order == bool((in_a == in_b).all())
    assert (BOUNDS.transform_us(key) == 0.0) == key.keeps_order


@given(sizes, sizes, st.integers(0, 1 << 40), sizes)
def test_weights_that_the_caches_keep_only_lower_a_bound(elements: int, weights: int, flops: int, all_: int) -> None:
    facts = elementwise(elements, flops, weights)
    kept, cold = BOUNDS.kernel_roof(replace(facts, footprint=all_), None), BOUNDS.kernel_roof(facts, None)
    assert kept.us <= cold.us
    assert cold.us == BOUNDS.kernel_us(facts, None)
    # No level holds them: they are cold.
    assert BOUNDS.kernel_roof(replace(facts, footprint=1 << 40), None) == cold


def test_a_roof_has_the_name_of_what_bounds() -> None:
    assert BOUNDS.kernel_roof(elementwise(1 << 10, 1 << 30), None).name == "compute"
    assert BOUNDS.kernel_roof(elementwise(1, 1), None).name == "call"
    heavy = elementwise(100, 1, weights=1 << 20)
    assert BOUNDS.kernel_roof(heavy, None).name == "memory"
    # All that the model goes over is in the third cache, behind the second; or in the second, where weights are as near
    # as any operand.
    assert BOUNDS.kernel_roof(replace(heavy, footprint=8 << 20), None).name == "l3"
    small = elementwise(100, 1, weights=1 << 10)
    assert BOUNDS.kernel_us(replace(small, footprint=1 << 16), None) < BOUNDS.kernel_us(small, None)
    key = TransformKey((1, 64, 512, 512), "NCHW", "float32", Layout("NCHW"), Layout("NHWC"))
    roof = BOUNDS.transform_roof(key)
    assert roof.us == BOUNDS.transform_us(key)
    assert roof.name == "memory"


def test_only_what_is_emptied_makes_weights_cold() -> None:
    """No flush where a fourth cache holds the model: its weights may lie in the third."""
    levels = (*LEVELS[:3], MemoryLevel("l4", 128 << 20, 20.0), LEVELS[3])
    bounds = Bounds(replace(PROFILE, levels=levels), allowance=0.0)
    facts = replace(elementwise(64, weights=2 << 20), footprint=64 << 20)
    assert bounds.kernel_roof(facts, None) == BOUNDS.kernel_roof(replace(facts, footprint=16 << 20), None)
    assert bounds.kernel_us(replace(facts, footprint=256 << 20), None) == BOUNDS.kernel_us(facts, None)


def test_a_device_that_tells_of_no_caches_flushes_less_than_its_levels_say() -> None:
    """Its server takes the last cache for a usual one, and leaves the weights of a small model where they are."""
    levels = (LEVELS[0], MemoryLevel("l2", 512 << 10, 100.0), LEVELS[3])
    told, untold = (Bounds(replace(PROFILE, levels=levels, told=told), allowance=0.0) for told in (True, False))
    weights = 100 << 10
    small, large = (replace(elementwise(64, weights=weights), footprint=f) for f in (4 << 20, 16 << 20))
    assert told.kernel_roof(small, None).name == "memory"
    assert untold.kernel_us(small, None) < told.kernel_us(small, None)
    assert untold.kernel_us(large, None) == told.kernel_us(large, None)


@pytest.mark.parametrize(
    ("elements", "us", "name"),
    [
        (1_000, 8e3 / 400e3 + 0.5, "l1"),  # on one thread
        (100_000, 800e3 / 100e3 + 2.0, "l2"),
        (1_000_000, 8e6 / 40e3 + 2.0, "l3"),
        (10_000_000, 80e6 / 10e3 + 2.0, "memory"),
    ],
)
def test_in_place_all_comes_from_the_level_that_holds_it(elements: int, us: float, name: str) -> None:
    found = BOUNDS.kernel_in_place(elementwise(elements), NHWC)
    assert (found.us, found.name) == (pytest.approx(us), name)


def test_in_place_weights_take_room_too() -> None:
    facts = replace(elementwise(100_000, weights=100_000), footprint=1 << 20)
    assert BOUNDS.kernel_in_place(facts, NHWC).name == "l3"


@given(st.integers(1, 10**7), st.integers(0, 10**9), st.integers(0, 10**6))
def test_in_place_is_never_below_the_bound(elements: int, flops: int, weights: int) -> None:
    facts = elementwise(elements, flops, weights)
    assert BOUNDS.kernel_in_place(facts, NHWC).us >= BOUNDS.kernel_roof(facts, NHWC).us * (1 - 1e-9)
