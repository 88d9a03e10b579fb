"""Other instruction sets: the machine as read from the target, and code for it from every template."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from layoutsearch.schedule import TargetInfo, apply, audit, candidates, pair
from layoutsearch.schedule.value import TEMPLATES
from tests.schedule import kernels as k
from tests.schedule.test_winograd import Conv
from tests.schedule.test_winograd import kernel as winograd

TARGETS = {
    "avx512": ({"kind": "llvm", "mcpu": "skylake-avx512", "mtriple": "x86_64-linux-gnu"}, 16, 32),
    "avx2": ({"kind": "llvm", "mcpu": "core-avx2", "mtriple": "x86_64-linux-gnu"}, 8, 16),
    "neon": ({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon"]}, 4, 32),
}
op = relax.op


@pytest.mark.parametrize("isa", TARGETS)
def test_target_info(isa: str) -> None:
    config, lanes, registers = TARGETS[isa]
    info = TargetInfo.from_target(tvm.target.Target(config), threads=3)
    assert (info.isa, info.lanes, info.registers, info.threads) == (isa, lanes, registers, 3)


KERNELS = {
    "packed": lambda: k.fused(
        lambda x, w: op.nn.conv2d(
            x, w, padding=(1, 1), data_layout="NCHW8c", kernel_layout="OIHW8i8o", out_layout="NCHW8c"
        ),
        (1, 2, 14, 14, 8),
        (4, 2, 3, 3, 8, 8),
    ),
    "winograd": lambda: winograd(
        Conv((1, 16, 9, 14), 24, layouts=("NCHW8c", "HWOI8o", "NCHW8c")),
        4,
        [(1, 2, 9, 14, 8), (6, 6, 3, 16, 8), (1, 3, 9, 14, 8)],
    ),
    "depthwise NHWC": lambda: k.fused(
        lambda x, w: op.nn.conv2d(x, w, padding=(1, 1), groups=20, data_layout="NHWC", kernel_layout="HWIO"),
        (1, 14, 14, 20),
        (3, 3, 1, 20),
    ),
    "NCHW": lambda: k.fused(
        lambda x, w: op.sigmoid(op.nn.conv2d(x, w, padding=(1, 1), strides=(2, 2))), (1, 8, 15, 15), (16, 8, 3, 3)
    ),
    "transposed": lambda: k.fused(
        lambda x, w: op.nn.conv2d_transpose(x, w, strides=(2, 2)), (1, 8, 9, 9), (8, 6, 2, 2)
    ),
    "matmul": lambda: k.fused(op.matmul, (5, 64), (64, 72)),
    "pool": lambda: k.fused(lambda x: op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1)), (1, 8, 15, 15)),
    "mean": lambda: k.fused(lambda x: op.mean(x, [2, 3], True), (1, 32, 15, 15)),
    "softmax": lambda: k.fused(lambda x: op.nn.softmax(x, -1), (4, 100)),
    "transpose": lambda: k.transform("NCHW", "NCHW8c", (1, 32, 9, 11)),
    "reshape": lambda: k.fused(lambda x: op.reshape(x, (8, 225)), (1, 8, 15, 15)),
    "stack": lambda: k.fused(lambda x, y: op.concat([x, y], 1), (1, 3, 11, 13), (1, 5, 11, 13)),
    "winograd NHWC": lambda: winograd(
        Conv((1, 11, 9, 14), 15, layouts=("NHWC", "HWIO", "NHWC")),
        2,
        [(1, 9, 14, 11), (4, 4, 11, 15), (1, 9, 14, 15)],
    ),
    "grouped": lambda: k.fused(
        lambda x, w: op.nn.conv2d(x, w, groups=2, data_layout="NHWC", kernel_layout="HWIO"),
        (1, 9, 14, 10),
        (3, 3, 5, 6),
    ),
    "pointwise packed": lambda: k.fused(
        lambda x, w: op.nn.relu(
            op.nn.conv2d(x, w, data_layout="NCHW4c", kernel_layout="OIHW4i4o", out_layout="NCHW4c")
        ),
        (1, 5, 7, 11, 4),
        (3, 5, 1, 1, 4, 4),
    ),
}


@pytest.mark.parametrize("isa", TARGETS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_builds(isa: str, kernel: str) -> None:
    """The first guess of every template compiles to an object of the target, within its registers' tiles."""
    target = tvm.target.Target(TARGETS[isa][0])
    info = TargetInfo.from_target(target, threads=4)
    func = KERNELS[kernel]()
    schedule = candidates(func, info)[0]
    out = apply(func, schedule, info)
    assert audit(out) == []
    assert len(k.compile_kernel(out, target).inspect_source("asm")) > 0


def test_every_template_is_among_them() -> None:
    """All but MetaSchedule's traces, calls of libraries, and those of pairs of kernels and of GPUs."""
    info = TargetInfo.from_target(tvm.target.Target(TARGETS["neon"][0]), threads=4)
    found = {candidates(kernel(), info)[0].template for kernel in KERNELS.values()}
    assert found == set(TEMPLATES) - {"metaschedule", "extern", "workitems", *pair.TEMPLATES}


@pytest.mark.parametrize("lanes", ["avx2", "neon"])
@pytest.mark.parametrize(
    "kernel", ["packed", "winograd", "depthwise NHWC", "NCHW", "transposed", "matmul", "transpose"]
)
def test_narrow_vectors_are_right(lanes: str, kernel: str) -> None:
    """Kernels laid out for narrower vectors give the same result here as those for this machine."""
    narrow = TargetInfo.from_target(tvm.target.Target(TARGETS[lanes][0]), threads=2)
    func = KERNELS[kernel]()
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal([int(s) for s in p.shape]).astype("float32") for p in func.params[:-1]]
    (want,) = k.run(apply(func, candidates(func, k.INFO)[0], k.INFO), arrays)
    for schedule in k.sample(func, 1, 3, narrow):
        (got,) = k.run(apply(func, schedule, narrow), arrays)
        k.close(got, want, 4e-5 if kernel == "winograd" else 1e-5)


def test_single_thread_has_no_parallel_loop() -> None:
    info = TargetInfo.from_target(tvm.target.Target(TARGETS["avx512"][0]), threads=1)
    func = KERNELS["packed"]()
    assert "T.parallel" not in apply(func, candidates(func, info)[0], info).script()
