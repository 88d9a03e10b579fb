"""A depthwise convolution and the pointwise one behind it as one kernel, against the two apart and against NumPy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax, tirx

from layoutsearch.schedule import Schedule, ScheduleError, TargetInfo, apply, pair
from layoutsearch.schedule.pair import Pair
from tests.schedule import kernels as k
from tests.schedule import pairs
from tests.schedule.test_targets import TARGETS

op = relax.op


@dataclass(frozen=True)
class Net:
    """clip(depthwise(x) + b) -> pointwise + b, and a residual where that is wanted; SAME padding."""

    channels: int
    out: int
    size: tuple[int, int]
    kernel: int = 3
    stride: int = 1
    dilation: int = 1
    batch: int = 1
    layouts: tuple[str, str, str, str, str] = ("NCHW16c", "OIHW16o", "NCHW16c", "OIHW16i16o", "NCHW16c")
    """Of data, depthwise weights, the tensor between, pointwise weights, result."""
    residual: bool = True


def packed(block: int, out: int = 0) -> tuple[str, str, str, str, str]:
    """Blocks of the channels, others for the result."""
    out = out or block
    data = f"NCHW{block}c"
    return data, f"OIHW{block}o", data, f"OIHW{block}i{out}o", f"NCHW{out}c"


LAST = ("NHWC", "HWIO", "NHWC", "HWIO", "NHWC")


def functions(net: Net, seed: int = 0) -> pairs.Two:
    """Both kernels and what they read; the second reads what the first makes in front of that."""
    rng = np.random.default_rng(seed)
    data, first_kernel, between, second_kernel, out = net.layouts
    reach = net.dilation * (net.kernel - 1)
    height, width = ((s + 2 * (reach // 2) - reach - 1) // net.stride + 1 for s in net.size)

    def array(shape: tuple[int, ...], layout: str, primal: str = "NCHW") -> np.ndarray:
        return k.to_layout(rng.standard_normal(shape).astype("float32"), layout, primal)

    def depthwise(x: relax.Var, w: relax.Var, b: relax.Var) -> relax.Expr:
        y = op.nn.conv2d(
            x,
            w,
            strides=net.stride,
            padding=[reach // 2] * 4,
            dilation=net.dilation,
            groups=net.channels,
            data_layout=data,
            kernel_layout=first_kernel,
            out_layout=between,
        )
        return op.clip(op.add(y, b), -1, 2)

    def pointwise(x: relax.Var, w: relax.Var, b: relax.Var, *rest: relax.Var) -> relax.Expr:
        y = op.nn.conv2d(x, w, data_layout=between, kernel_layout=second_kernel, out_layout=out)
        y = op.add(y, b)
        return op.add(y, rest[0]) if rest else y

    first = [
        array((net.batch, net.channels, *net.size), data),
        array((net.channels, 1, net.kernel, net.kernel), first_kernel, "OIHW"),
        array((1, net.channels, 1, 1), between),
    ]
    second = [array((net.out, net.channels, 1, 1), second_kernel, "OIHW"), array((1, net.out, 1, 1), out)]
    if net.residual:
        second.append(array((net.batch, net.out, height, width), out))
    made = k.to_layout(np.zeros((net.batch, net.channels, height, width), "float32"), between, "NCHW").shape
    return (
        k.fused(depthwise, *(a.shape for a in first)),
        k.fused(pointwise, made, *(a.shape for a in second)),
        first,
        second,
    )


def check(net: Net, target: TargetInfo = k.INFO, seed: int = 0) -> None:
    pairs.check(functions(net, seed), target=target, seed=seed)


CASES = {
    "packed": Net(48, 32, (13, 9)),
    "packed, stride 2, no residual": Net(32, 48, (14, 11), stride=2, residual=False),
    "packed 5x5": Net(32, 16, (9, 12), kernel=5),
    "packed 5x5, stride 2": Net(32, 16, (9, 12), kernel=5, stride=2),
    "packed 8 to 16": Net(40, 32, (7, 10), layouts=packed(8, 16)),
    "NHWC, odd channels": Net(37, 21, (11, 8), layouts=LAST),
    "NHWC, odd channels, stride 2": Net(19, 41, (9, 14), stride=2, layouts=LAST, residual=False),
    "NHWC, one output channel, batch 2": Net(12, 1, (5, 7), batch=2, layouts=LAST),
    "NHWC, weights in packs of a vector and a half": Net(
        20, 48, (7, 9), layouts=("NHWC", "HWIO", "NHWC", "OHWI24o", "NHWC")
    ),
    "NHWC, to blocks": Net(24, 32, (6, 10), layouts=("NHWC", "HWIO", "NHWC", "HWIO", "NCHW16c")),
    "from NHWC to blocks in between": Net(32, 24, (6, 10), layouts=("NHWC", "HWIO", "NCHW8c", "OIHW8i8o", "NCHW8c")),
    "dilated, batch 3": Net(16, 32, (9, 7), dilation=2, batch=3),
    "one row": Net(16, 32, (1, 7)),
    "a scratch too large for the stack": Net(240, 16, (6, 56)),
}


@pytest.mark.parametrize("name", CASES)
def test_is_what_the_two_compute(name: str) -> None:
    check(CASES[name])


@st.composite
def nets(draw: st.DrawFn) -> Net:
    layouts, channels, out = draw(
        st.sampled_from([(packed(16), 32, 48), (packed(4, 8), 12, 24), (LAST, 7, 19), (LAST, 33, 5)])
    )
    return Net(
        channels,
        out,
        (draw(st.integers(3, 12)), draw(st.integers(3, 12))),
        draw(st.sampled_from([3, 5])),
        draw(st.integers(1, 2)),
        batch=draw(st.integers(1, 2)),
        layouts=layouts,
        residual=draw(st.booleans()),
    )


@settings(max_examples=5, deadline=None)
@given(nets(), st.integers(0, 1000))
def test_any_pair(net: Net, seed: int) -> None:
    check(net, seed=seed)


def test_against_numpy() -> None:
    net = Net(19, 23, (9, 14), stride=2, layouts=LAST, residual=False)
    _, _, (x, w, b), (w2, b2) = functions(net)
    y = k.conv2d(k.from_layout(x, "NHWC", "NCHW"), k.from_layout(w, "HWIO", "OIHW"), (2, 2), (1, 1, 1, 1), (1, 1), 19)
    y = np.clip(y + k.from_layout(b, "NHWC", "NCHW"), -1, 2)
    want = k.conv2d(y, k.from_layout(w2, "HWIO", "OIHW"), (1, 1), (0, 0, 0, 0), (1, 1), 1)
    k.close(k.from_layout(pairs.apart(functions(net)), "NHWC", "NCHW"), want + k.from_layout(b2, "NHWC", "NCHW"))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_every_height_of_a_strip(rows: int) -> None:
    """Those that divide the rows, those that leave some over, all of them."""
    net = Net(20, 24, (5, 9), layouts=LAST)
    one, two, first, second = functions(net)
    schedule = Schedule.make(
        pair.DEPTHWISE_POINTWISE, rows=rows, tile=min(7, rows * 9), vectors=2, dw_tile=4, dw_vectors=1
    )
    (got,) = k.run(pair.apply(Pair.of(one, two), schedule, k.INFO), [*first, *second])
    k.close(got, pairs.apart(functions(net)))


@pytest.mark.parametrize("isa", ["avx2", "neon"])
def test_narrow_vectors_are_right(isa: str) -> None:
    check(Net(36, 20, (7, 10), layouts=packed(4)), target=TargetInfo.from_target(tvm.target.Target(TARGETS[isa][0]), 2))


@pytest.mark.parametrize("isa", TARGETS)
def test_builds_for(isa: str) -> None:
    target = tvm.target.Target(TARGETS[isa][0])
    info = TargetInfo.from_target(target, threads=4)
    one, two, _, _ = functions(Net(32, 24, (14, 14), layouts=packed(8)))
    both = Pair.of(one, two)
    kernel = pair.apply(both, pair.candidates(both, info, (None, None))[0], info)
    assert len(k.compile_kernel(kernel, target).inspect_source("asm")) > 0


def test_one_thread_has_no_parallel_loop() -> None:
    both = Pair.of(*functions(CASES["packed"])[:2])
    info = replace(k.INFO, threads=1)
    assert "T.parallel" not in pair.apply(both, pair.candidates(both, info, (None, None))[0], info).script()


def test_what_the_two_do_apart_is_tried_first() -> None:
    both = Pair.of(*functions(CASES["packed"])[:2])
    known = [Schedule.make("channels", tile=t, vectors=1, reduce="taps_outer", outer="rows") for t in (3, 5)]
    first = pair.candidates(both, k.INFO, (known[0], known[1]))[0]
    assert (first["dw_tile"], first["dw_vectors"], first["tile"], first["vectors"]) == (3, 1, 5, 1)
    every = pair.candidates(both, k.INFO, (known[0], Schedule.make("loops")))
    assert len(set(every)) == len(every) > 5
    assert all(Schedule.from_json(s.to_json()) == s for s in every)


def test_wide_machines_get_as_many_strips_as_they_have_threads() -> None:
    both = Pair.of(*functions(Net(32, 16, (16, 16)))[:2])
    assert pair.candidates(both, replace(k.INFO, threads=16), (None, None))[0]["rows"] == 1


def _refused(first: tirx.PrimFunc, second: tirx.PrimFunc, why: str) -> None:
    with pytest.raises(ScheduleError, match=why) as caught:
        Pair.of(first, second)
    assert "\n" not in str(caught.value)


def test_what_is_no_pair() -> None:
    one, two, _, _ = functions(CASES["packed"])
    _refused(two, two, "depthwise")
    _refused(one, one, "pointwise")
    other = functions(Net(48, 32, (13, 10)))[1]
    _refused(one, other, "not the same tensor")
    planes = functions(Net(48, 32, (13, 9), layouts=("NCHW", "OIHW", "NCHW", "OIHW", "NCHW")))
    _refused(*planes[:2], "channels innermost")
    strided = k.fused(
        lambda x, w: op.nn.conv2d(x, w, strides=2, data_layout="NHWC", kernel_layout="HWIO"),
        (1, 9, 12, 20),
        (1, 1, 20, 8),
    )
    _refused(functions(Net(20, 8, (9, 12), layouts=LAST))[0], strided, "stride 1")
    once = k.fused(lambda x, w: op.nn.conv2d(x, w, groups=20, data_layout="NHWC", kernel_layout="HWIO"),
                   (1, 9, 12, 20), (1, 1, 1, 20))  # fmt: skip
    _refused(once, functions(Net(20, 8, (9, 12), layouts=LAST))[1], "window")
    softmax = k.fused(
        lambda x, w: op.nn.softmax(op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="HWIO"), -1),
        (1, 9, 12, 20),
        (1, 1, 20, 8),
    )
    _refused(functions(Net(20, 8, (9, 12), layouts=LAST))[0], softmax, "elementwise")
    _refused(k.fused(op.matmul, (5, 64), (64, 72)), two, "no direct convolution")


def test_a_result_that_the_epilogue_reads_again() -> None:
    twice = k.fused(
        lambda x, w: op.add(op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="HWIO"), x),
        (1, 9, 12, 20),
        (1, 1, 20, 20),
    )
    _refused(functions(Net(20, 20, (9, 12), layouts=LAST))[0], twice, "once more")


def test_schedules_that_do_not_fit() -> None:
    one, two, _, _ = functions(CASES["packed"])
    both = Pair.of(one, two)
    fits = {"rows": 2, "tile": 6, "vectors": 2, "dw_tile": 9, "dw_vectors": 1}
    pair.apply(both, Schedule.make(pair.DEPTHWISE_POINTWISE, **fits), k.INFO)
    for change in ({"rows": 14}, {"tile": 19}, {"vectors": 4}, {"dw_tile": 10}, {"dw_vectors": 5}):
        with pytest.raises(ScheduleError):
            pair.apply(both, Schedule.make(pair.DEPTHWISE_POINTWISE, **{**fits, **change}), k.INFO)
    with pytest.raises(ScheduleError, match="not for a depthwise_pointwise pair"):
        pair.apply(both, Schedule.make("loops"), k.INFO)
    with pytest.raises(ScheduleError, match="two kernels"):
        apply(one, Schedule.make(pair.DEPTHWISE_POINTWISE, **fits), k.INFO)
