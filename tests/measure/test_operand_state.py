"""Where operands are before a kernel is timed: no value changes, whatever their types and sizes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import tvm
from conftest import SIZE

from layoutsearch.errors import DeviceError
from layoutsearch.measure import operand_state, vector_work
from layoutsearch.measure.device import Device
from layoutsearch.measure.farm import LocalFarm
from layoutsearch.measure.kernels import KernelCall, TensorSpec
from layoutsearch.measure.operand_state import PREPARE, PROTOCOL
from layoutsearch.measure.session import Session, connect
from layoutsearch.schedule import TargetInfo
from layoutsearch.targets import local_target
from layoutsearch.toolchain import export

CHECK = """
import sys
import numpy as np, tvm
from layoutsearch.measure import operand_state

assert operand_state.register()
library = tvm.runtime.load_module(sys.argv[1])
shapes = [((3, 5, 7), "float32"), ((1,), "int64"), ((2, 1001), "bool"), ((0, 4), "float32"), ((1 << 18,), "float16"),
          ((7,), "float32")]
rng = np.random.default_rng(0)
values = [rng.integers(0, 2, shape).astype(dtype) for shape, dtype in shapes]
args = [tvm.runtime.tensor(v) for v in values]
for cold in ("", "0", "1,4", "0,1,2,3,4,5", "9"):
    for footprint in (0, 1000, 1 << 20, 1 << 40):
        for shared in (False, True):
            name = tvm.get_global_func(operand_state.PREPARE)(cold, footprint, shared, library)
            for _ in range(3):
                tvm.get_global_func(name)(*args)
        assert all(np.array_equal(a.numpy(), v) for a, v in zip(args, values)), cold
print("same")
"""


@pytest.fixture(scope="module")
def work_lib(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library as the builder of kernels makes them: with vector work."""
    path = tmp_path_factory.mktemp("work") / "work.so"
    info = TargetInfo.from_target(local_target(), 2)
    built = tvm.compile(tvm.IRModule({vector_work.SYMBOL: vector_work.build(info)}), local_target())
    export(built, str(path), local_target())
    return str(path)


@pytest.mark.parametrize("library", ["work_lib", "kernel_lib"])
def test_values_are_kept(library: str, request: pytest.FixtureRequest) -> None:
    command = [sys.executable, "-c", CHECK, request.getfixturevalue(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "same", done.stderr


def test_vector_work_does_its_rounds_on_each_task(work_lib: str) -> None:
    library = tvm.runtime.load_module(work_lib)
    out = tvm.runtime.tensor(np.ones(768, "float32"))
    library[vector_work.SYMBOL](out, 2, 3)
    found = out.numpy().reshape(3, 256)
    done = found == (1.0 * 0.5 + 0.25) * 0.5 + 0.25
    assert done.any(axis=1).all()
    assert np.all(done | (found == 1.0))


def test_only_libraries_with_vector_work_are_asked_for_it(work_lib: str, kernel_lib: str) -> None:
    work = vector_work.worker(tvm.runtime.load_module(work_lib), 2)
    assert work is not None
    work()
    assert vector_work.worker(tvm.runtime.load_module(kernel_lib), 2) is None


@pytest.mark.parametrize("cold", [(), (0,), (1,), (0, 1), None])
def test_kernels_are_timed_with_any_operands_cold(kernel_lib: str, cold: tuple[int, ...] | None) -> None:
    floats = TensorSpec((SIZE,))
    with Device.local(threads=2) as device:
        assert device.has_function(PREPARE)
        calls = [KernelCall("add_one", (floats, floats), cold, shared=shared) for shared in (False, True)]
        measurements = device.time_kernels(kernel_lib, calls, repeat=3)
    for measurement in measurements:
        assert measurement.ok, measurement.error
        assert len(measurement.samples_us) == 3


def test_the_function_is_named_for_its_protocol() -> None:
    """A board's server may be of another version; its times would be taken for ours."""
    assert PROTOCOL in PREPARE


class _Boards:
    """The first session is of our server, those after it of one that does not place operands in our way."""

    def __init__(self) -> None:
        self._farm = LocalFarm(servers=1, threads=1, key="board")
        self._farm.__enter__()
        self._opened = 0

    def open(self, limit_s: float) -> Session:
        session = connect(self._farm.host, self._farm.ensure(), self._farm.key, limit_s)
        self._opened += 1
        if self._opened > 1:
            ours = session.function
            session.function = lambda name: None if name == PREPARE else ours(name)  # type: ignore[method-assign]
        return session

    def close(self) -> None:
        self._farm.close()


def test_boards_of_one_key_that_time_in_other_ways_are_refused() -> None:
    with Device(_Boards(), "board", 1) as device:
        assert device.places_operands
        with pytest.raises(DeviceError, match="different versions"):
            device.new_session(10.0)


def test_only_the_caches_of_the_threads_that_run_hold_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a profile; else weights would be left where its bounds say they are not."""
    caches = [{"level": 1, "bytes": 1 << 15, "count": 8}, {"level": 3, "bytes": 1 << 24, "count": 4}]
    monkeypatch.setattr(operand_state, "_caches", lambda: tuple(caches))
    held = {threads: operand_state.shared_cache_bytes(threads) for threads in (1, 2, 8)}
    assert held == {1: 1 << 24, 2: 2 << 24, 8: 4 << 24}
