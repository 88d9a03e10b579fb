"""Where operands are before a kernel is timed: no value changes, whatever their types and sizes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import SIZE

from layoutsearch.measure.device import Device
from layoutsearch.measure.kernels import KernelCall, TensorSpec
from layoutsearch.measure.operand_state import PREPARE

CHECK = """
import numpy as np, tvm
from layoutsearch.measure import operand_state

assert operand_state.register()
shapes = [((3, 5, 7), "float32"), ((1,), "int64"), ((2, 1001), "bool"), ((0, 4), "float32"), ((1 << 18,), "float16"),
          ((7,), "float32")]
rng = np.random.default_rng(0)
values = [rng.integers(0, 2, shape).astype(dtype) for shape, dtype in shapes]
args = [tvm.runtime.tensor(v) for v in values]
for cold in ("", "0", "1,4", "0,1,2,3,4,5", "9"):
    for footprint in (0, 1000, 1 << 20, 1 << 40):
        name = tvm.get_global_func(operand_state.PREPARE)(cold, footprint)
        for _ in range(3):
            tvm.get_global_func(name)(*args)
        assert all(np.array_equal(a.numpy(), v) for a, v in zip(args, values)), cold
print("same")
"""


def test_values_are_kept() -> None:
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "same", done.stderr


@pytest.mark.parametrize("cold", [(), (0,), (1,), (0, 1), None])
def test_kernels_are_timed_with_any_operands_cold(kernel_lib: str, cold: tuple[int, ...] | None) -> None:
    floats = TensorSpec((SIZE,))
    with Device.local(threads=2) as device:
        assert device.has_function(PREPARE)
        (measurement,) = device.time_kernels(kernel_lib, [KernelCall("add_one", (floats, floats), cold)], repeat=3)
    assert measurement.ok, measurement.error
    assert len(measurement.samples_us) == 3
