"""Which pairs of kernels a plan has, and which of them are taken. No clock decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tvm import relax

from layoutsearch.measure.results import Measurement, Status
from layoutsearch.schedule import Schedule
from layoutsearch.search.pairs import PairTimes, chosen
from tests.models import nets
from tests.search.pair_case import APART_US, Case, schedule, text, took


def test_equal_pairs_are_measured_once(case: Case) -> None:
    works = case.works()
    assert [len(work.ops) for work in works] == [2, 2, 1, 1]
    kinds = {op.id: op.kind.removeprefix("conv2d_") for op in case.plan.ops}
    orders = [[f"{kinds[first]}, {kinds[second]}" for first, second in work.ops] for work in works]
    assert orders == [["pointwise, depthwise"] * 2, ["depthwise, pointwise"] * 2, orders[0][:1], orders[1][:1]]
    assert len({work.key for work in works}) == 4


def test_the_key_is_of_the_kernels_apart_too(case: Case) -> None:
    first = case.works()[1].ops[0][0]
    other = Schedule.make("channels", tile=2, vectors=1, reduce="taps_outer", outer="rows")
    ops = tuple(replace(op, schedule=other) if op.id == first else op for op in case.plan.ops)
    keys = {work.key for work in case.works(replace(case.plan, ops=ops))}
    # It is the second of one pair and the first of another.
    assert len(keys) == 6
    assert len(keys & {work.key for work in case.works()}) == 4


def test_no_pairs_without_channels_innermost(tmp_path: Path) -> None:
    assert Case(nets.inverted_residuals(), "NCHW", tmp_path).works() == []
    assert len(Case(nets.inverted_residuals(), "NCHW{b}c", tmp_path).works()) == 4


def test_no_pair_across_a_transform(case: Case) -> None:
    from layoutsearch.layout.candidate import Candidate

    blocked = {
        op.id: Candidate.of("NCHW8c", "OIHW8i8o") for op in case.plan.ops if op.kind == "conv2d_pointwise" and op.choice
    }
    ops = tuple(replace(op, choice=blocked.get(op.id, op.choice)) for op in case.plan.ops)
    assert case.works(replace(case.plan, ops=ops)) == []


@pytest.mark.parametrize(
    "body",
    [
        lambda n, x: relax.Tuple([n.conv(y := n.depthwise(n.conv(x, 16, 3)), 24, 1), n.conv(y, 8, 3)]),
        lambda n, x: relax.Tuple([n.conv(y := n.depthwise(n.conv(x, 16, 3)), 24, 1), y]),
        lambda n, x: n.conv(n.depthwise(n.conv(x, 16, 3)), 24, 1, stride=2),
        lambda n, x: n.conv(n.depthwise(n.conv(x, 16, 3)), 24, 3),
        lambda n, x: n.conv(n.conv(n.conv(x, 16, 1), 16, 3), 24, 1),
        lambda n, x: n.emit(relax.op.nn.max_pool2d(n.depthwise(n.conv(x, 16, 3)), 2)),
        lambda n, x: relax.Tuple([n.depthwise(y := n.conv(x, 16, 1)), n.conv(y, 8, 3)]),
        lambda n, x: n.depthwise(n.conv(x, 16, 1, stride=2)),
        lambda n, x: n.depthwise(n.depthwise(n.conv(x, 16, 3))),
    ],
    ids=[
        "read twice",
        "an output",
        "strided",
        "3x3",
        "dense",
        "no second",
        "first read twice",
        "first strided",
        "depthwise twice",
    ],
)
def test_no_pair(body: Callable[..., relax.Expr], tmp_path: Path) -> None:
    assert Case(nets.build((1, 8, 8, 10), body=body), "NHWC", tmp_path).works() == []


@pytest.mark.parametrize(
    ("joined", "wanted"),
    [
        ({1: took(35.0, 35.2, 34.9, 35.1), 2: took(33.0, 33.2, 32.8, 33.1)}, 2),
        ({1: took(39.9, 40.1, 39.8, 40.0)}, None),  # no gain
        ({1: took(39.5, 39.5, 39.5, 39.5)}, None),  # less than is worth it
        ({1: took(20.0, 60.0, 22.0, 45.0)}, None),  # within its own spread
        ({1: Measurement(Status.CRASH, (), "died"), 2: took(33.0, 33.2, 32.8, 33.1)}, 2),
        ({1: Measurement(Status.CRASH, (), "died")}, None),
        ({}, None),
    ],
)
def test_a_pair_is_taken_where_it_is_clearly_faster(
    case: Case, joined: dict[int, Measurement], wanted: int | None
) -> None:
    works = case.works()
    times = {works[0].key: PairTimes(APART_US, {text(rows): m for rows, m in joined.items()})}
    found = chosen(works, times)
    assert [(f.first, f.second) for f in found] == (list(works[0].ops) if wanted else [])
    for fusion in found:
        assert fusion.schedule == schedule(wanted or 0)
        assert fusion.measured_us == pytest.approx(33.025)
        assert fusion.apart_us == pytest.approx(40.0)


@pytest.mark.parametrize(("gains", "wanted"), [((12.0, 7.0), 0), ((7.0, 12.0), 1)])
def test_no_kernel_is_in_two_pairs(case: Case, gains: tuple[float, float], wanted: int) -> None:
    """Of the three kernels of a block the middle one could be in both."""
    works = case.works()
    joined = [{text(1): took(*((40.0 - gain,) * 3))} for gain in gains]
    times = {work.key: PairTimes(APART_US, found) for work, found in zip(works, joined, strict=False)}
    assert [(f.first, f.second) for f in chosen(works, times)] == list(works[wanted].ops)


def test_of_a_longer_chain_those_that_together_gain_most(tmp_path: Path) -> None:
    """Pointwise, depthwise, pointwise, depthwise: the outer two pairs gain more than the one in the middle."""
    net = nets.build(
        (1, 8, 8, 10), body=lambda n, x: n.depthwise(n.conv(n.depthwise(n.conv(n.conv(x, 8, 3), 16, 1)), 24, 1))
    )
    case = Case(net, "NHWC", tmp_path)
    works = case.works()
    assert len(works) == 3
    for middle, wanted in ((10.0, [0, 2]), (20.0, [1])):
        gains = (7.0, middle, 8.0)
        times = {
            work.key: PairTimes(APART_US, {text(1): took(*((40.0 - gain,) * 3))})
            for work, gain in zip(works, gains, strict=True)
        }
        assert [(f.first, f.second) for f in chosen(works, times)] == [works[i].ops[0] for i in wanted]


def test_no_pair_where_one_of_the_two_fails(case: Case) -> None:
    works = case.works()
    broken = (APART_US[0], Measurement(Status.TIMEOUT, (), "hangs"))
    assert chosen(works, {works[0].key: PairTimes(broken, {text(1): took(1.0, 1.0)})}) == ()
    assert chosen(works, {}) == ()
