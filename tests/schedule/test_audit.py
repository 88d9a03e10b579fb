"""The audit finds what runs as scalar code."""

from __future__ import annotations

from tvm import relax

from layoutsearch.schedule import TargetInfo, apply, audit, default
from tests.schedule import kernels as k


def test_unscheduled_kernel_is_reported() -> None:
    func = k.fused(lambda x, w: relax.op.nn.conv2d(x, w, padding=(1, 1)), (1, 8, 14, 14), (8, 8, 3, 3))
    lines = audit(func)
    assert any("conv2d" in line and "iterations" in line for line in lines)


def test_small_nests_are_left_alone() -> None:
    assert audit(k.fused(lambda x: relax.op.nn.relu(x), (4, 16, 16))) == []


def test_loops_inside_a_scheduled_kernel_count() -> None:
    """A kernel for one thread is vectorised, so it passes; its unscheduled form does not."""
    func = k.fused(lambda x: relax.op.nn.relu(x), (4, 160, 160))
    one = TargetInfo(**{**k.INFO.__dict__, "threads": 1})
    assert audit(func)
    assert audit(apply(func, default(func, one), one)) == []
