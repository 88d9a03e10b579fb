"""A pointwise convolution and the depthwise one behind it as one kernel, against the two apart and against NumPy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from layoutsearch.schedule import Schedule, ScheduleError, TargetInfo, apply, pair
from layoutsearch.schedule.pair import Pair
from tests.schedule import kernels as k
from tests.schedule import pairs
from tests.schedule.test_targets import TARGETS

op = relax.op


@dataclass(frozen=True)
class Net:
    """clip(pointwise(x) + b) -> depthwise + b; SAME padding of the depthwise one unless `pad` says otherwise."""

    inputs: int
    channels: int
    size: tuple[int, int]
    kernel: tuple[int, int] = (3, 3)
    stride: int = 1
    dilation: int = 1
    batch: int = 1
    layouts: tuple[str, str, str, str, str] = ("NCHW16c", "OIHW16i16o", "NCHW16c", "OIHW16o", "NCHW16c")
    """Of data, pointwise weights, the tensor between, depthwise weights, result."""
    pad: tuple[int, int, int, int] | None = None

    @property
    def padding(self) -> tuple[int, int, int, int]:
        """Above, left, below, right."""
        reach = [self.dilation * (size - 1) // 2 for size in self.kernel]
        return self.pad or (reach[0], reach[1], reach[0], reach[1])


def packed(block: int, first: int = 0) -> tuple[str, str, str, str, str]:
    """Blocks of the channels, others for the data."""
    first = first or block
    data = f"NCHW{block}c"
    return f"NCHW{first}c", f"OIHW{first}i{block}o", data, f"OIHW{block}o", data


LAST = ("NHWC", "HWIO", "NHWC", "HWIO", "NHWC")


def functions(net: Net, seed: int = 0) -> pairs.Two:
    """Both kernels and what they read; the second reads what the first makes in front of that."""
    rng = np.random.default_rng(seed)
    data, first_kernel, between, second_kernel, out = net.layouts

    def array(shape: tuple[int, ...], layout: str, primal: str = "NCHW") -> np.ndarray:
        return k.to_layout(rng.standard_normal(shape).astype("float32"), layout, primal)

    def pointwise(x: relax.Var, w: relax.Var, b: relax.Var) -> relax.Expr:
        y = op.nn.conv2d(x, w, data_layout=data, kernel_layout=first_kernel, out_layout=between)
        return op.clip(op.add(y, b), -1, 2)

    def depthwise(x: relax.Var, w: relax.Var, b: relax.Var) -> relax.Expr:
        y = op.nn.conv2d(
            x,
            w,
            strides=net.stride,
            padding=list(net.padding),
            dilation=net.dilation,
            groups=net.channels,
            data_layout=between,
            kernel_layout=second_kernel,
            out_layout=out,
        )
        return op.add(y, b)

    first = [
        array((net.batch, net.inputs, *net.size), data),
        array((net.channels, net.inputs, 1, 1), first_kernel, "OIHW"),
        array((1, net.channels, 1, 1), between),
    ]
    second = [array((net.channels, 1, *net.kernel), second_kernel, "OIHW"), array((1, net.channels, 1, 1), out)]
    made = k.to_layout(np.zeros((net.batch, net.channels, *net.size), "float32"), between, "NCHW").shape
    return (
        k.fused(pointwise, *(a.shape for a in first)),
        k.fused(depthwise, made, *(a.shape for a in second)),
        first,
        second,
    )


def check(net: Net, target: TargetInfo = k.INFO, seed: int = 0) -> None:
    pairs.check(functions(net, seed), target=target, seed=seed)


CASES = {
    "packed": Net(32, 48, (13, 9)),
    "packed, stride 2": Net(48, 32, (14, 11), stride=2),
    "packed 5x5": Net(32, 16, (9, 12), kernel=(5, 5)),
    "packed 5x5, stride 2": Net(16, 32, (9, 12), kernel=(5, 5), stride=2),
    "packed 1x3": Net(16, 32, (9, 12), kernel=(1, 3)),
    "packed 16 from 8": Net(40, 32, (7, 10), layouts=packed(16, 8)),
    "NHWC, odd channels": Net(21, 37, (11, 8), layouts=LAST),
    "NHWC, odd channels, stride 2": Net(41, 19, (9, 14), stride=2, layouts=LAST),
    "NHWC, one input channel, batch 2": Net(1, 12, (5, 7), batch=2, layouts=LAST),
    "blocks, then NHWC": Net(24, 32, (6, 10), layouts=("NCHW8c", "OIHW8i16o", "NHWC", "HWIO", "NHWC")),
    "dilated, batch 3": Net(16, 32, (9, 7), dilation=2, batch=3),
    "no border": Net(16, 32, (9, 7), pad=(0, 0, 0, 0)),
    "a border on one side, stride 2": Net(16, 32, (8, 10), stride=2, pad=(0, 0, 1, 1)),
    "stride 3, rows that none reads": Net(16, 32, (11, 10), stride=3, pad=(0, 0, 0, 0)),
    "one row": Net(16, 32, (1, 7)),
    "a scratch too large for the stack": Net(16, 64, (24, 56)),
}


@pytest.mark.parametrize("name", CASES)
def test_is_what_the_two_compute(name: str) -> None:
    check(CASES[name])


@st.composite
def nets(draw: st.DrawFn) -> Net:
    layouts, inputs, channels = draw(
        st.sampled_from([(packed(16), 32, 48), (packed(8, 4), 12, 24), (LAST, 19, 7), (LAST, 5, 33)])
    )
    return Net(
        inputs,
        channels,
        (draw(st.integers(3, 12)), draw(st.integers(3, 12))),
        (draw(st.sampled_from([1, 3, 5])), 3),
        draw(st.integers(1, 2)),
        batch=draw(st.integers(1, 2)),
        layouts=layouts,
    )


@settings(max_examples=5, deadline=None)
@given(nets(), st.integers(0, 1000))
def test_any_pair(net: Net, seed: int) -> None:
    check(net, seed=seed)


def test_against_numpy() -> None:
    net = Net(23, 19, (9, 14), stride=2, layouts=LAST)
    _, _, (x, w, b), (w2, b2) = functions(net)
    y = k.conv2d(k.from_layout(x, "NHWC", "NCHW"), k.from_layout(w, "HWIO", "OIHW"), (1, 1), (0, 0, 0, 0), (1, 1), 1)
    y = np.clip(y + k.from_layout(b, "NHWC", "NCHW"), -1, 2)
    want = k.conv2d(y, k.from_layout(w2, "HWIO", "OIHW"), (2, 2), (1, 1, 1, 1), (1, 1), 19)
    k.close(k.from_layout(pairs.apart(functions(net)), "NHWC", "NCHW"), want + k.from_layout(b2, "NHWC", "NCHW"))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_every_height_of_a_strip(rows: int, stride: int) -> None:
    """Those that divide the rows, those that leave some over, all of them."""
    net = Net(24, 20, (5 * stride, 9), stride=stride, layouts=LAST)
    one, two, first, second = functions(net)
    schedule = Schedule.make(pair.POINTWISE_DEPTHWISE, rows=rows, tile=7, vectors=2, dw_tile=4)
    (got,) = k.run(pair.apply(Pair.of(one, two), schedule, k.INFO), [*first, *second])
    k.close(got, pairs.apart(functions(net)))


@pytest.mark.parametrize("isa", ["avx2", "neon"])
def test_narrow_vectors_are_right(isa: str) -> None:
    check(Net(20, 36, (7, 10), layouts=packed(4)), target=TargetInfo.from_target(tvm.target.Target(TARGETS[isa][0]), 2))


@pytest.mark.parametrize("isa", TARGETS)
def test_builds_for(isa: str) -> None:
    target = tvm.target.Target(TARGETS[isa][0])
    info = TargetInfo.from_target(target, threads=4)
    one, two, _, _ = functions(Net(24, 32, (14, 14), layouts=packed(8)))
    both = Pair.of(one, two)
    kernel = pair.apply(both, pair.candidates(both, info, (None, None))[0], info)
    assert len(k.compile_kernel(kernel, target).inspect_source("asm")) > 0


def test_one_thread_has_no_parallel_loop() -> None:
    both = Pair.of(*functions(CASES["packed"])[:2])
    info = replace(k.INFO, threads=1)
    assert "T.parallel" not in pair.apply(both, pair.candidates(both, info, (None, None))[0], info).script()


def test_what_the_two_do_apart_is_tried_first() -> None:
    both = Pair.of(*functions(CASES["packed"])[:2])
    known = [Schedule.make("channels", tile=t, vectors=2, reduce="taps_outer", outer="rows") for t in (3, 5)]
    first = pair.candidates(both, k.INFO, (known[0], known[1]))[0]
    assert (first["tile"], first["dw_tile"], first["vectors"]) == (3, 5, 2)
    every = pair.candidates(both, k.INFO, (known[0], Schedule.make("loops")))
    assert len(set(every)) == len(every) > 5
    assert all(Schedule.from_json(s.to_json()) == s for s in every)


def test_work_for_every_thread() -> None:
    """One tile of channels: the rows are cut into as many strips as there are threads."""
    both = Pair.of(*functions(Net(16, 16, (16, 16)))[:2])
    rows = pair.candidates(both, replace(k.INFO, threads=8), (None, None))[0]["rows"]
    assert rows == 2


def test_vectors_of_channels_that_differ() -> None:
    """Weights in packs of a vector and a half are no tiles of the depthwise convolution's."""
    one, two, _, _ = functions(Net(20, 48, (7, 9), layouts=("NHWC", "OHWI24o", "NHWC", "HWIO", "NHWC")))
    both = Pair.of(one, two)
    assert pair.candidates(both, k.INFO, (None, None)) == []
    schedule = Schedule.make(pair.POINTWISE_DEPTHWISE, rows=2, tile=6, vectors=2, dw_tile=9)
    with pytest.raises(ScheduleError, match="different vectors"):
        pair.apply(both, schedule, k.INFO)


def test_schedules_that_do_not_fit() -> None:
    one, two, _, _ = functions(CASES["packed"])
    both = Pair.of(one, two)
    fits = {"rows": 2, "tile": 6, "vectors": 2, "dw_tile": 9}
    pair.apply(both, Schedule.make(pair.POINTWISE_DEPTHWISE, **fits), k.INFO)
    for change in ({"rows": 14}, {"tile": 10}, {"vectors": 4}, {"dw_tile": 10}):
        with pytest.raises(ScheduleError):
            pair.apply(both, Schedule.make(pair.POINTWISE_DEPTHWISE, **{**fits, **change}), k.INFO)
    other = Schedule.make(pair.DEPTHWISE_POINTWISE, rows=2, tile=6, vectors=2, dw_tile=9, dw_vectors=1)
    with pytest.raises(ScheduleError, match="not for a pointwise_depthwise pair"):
        pair.apply(both, other, k.INFO)
    with pytest.raises(ScheduleError, match="two kernels"):
        apply(one, Schedule.make(pair.POINTWISE_DEPTHWISE, **fits), k.INFO)


def test_a_pointwise_one_with_a_stride_is_no_first() -> None:
    strided = k.fused(
        lambda x, w: op.nn.conv2d(x, w, strides=2, data_layout="NHWC", kernel_layout="HWIO"),
        (1, 18, 24, 8),
        (1, 1, 8, 20),
    )
    depthwise = functions(Net(8, 20, (9, 12), layouts=LAST))[1]
    with pytest.raises(ScheduleError, match="first of a pair is no pointwise"):
        Pair.of(strided, depthwise)
