"""Times of kernels within a model: one for each, of a build with marks, and typed failures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from layoutsearch.errors import DeviceError
from layoutsearch.measure.device import Device
from layoutsearch.measure.in_situ import time_steps
from layoutsearch.measure.marks import MARK
from layoutsearch.measure.results import RunFailed, Status
from layoutsearch.measure.session import Session
from layoutsearch.plan.apply import apply_plan
from layoutsearch.plan.compile import build_executable
from layoutsearch.plan.sequence import sequence_steps
from layoutsearch.toolchain import export
from tests.models.plans import make_plan, two_in_three_out
from tests.models.running import native_target


@dataclass(frozen=True)
class Built:
    plain: str
    marked: str
    steps: int
    inputs: list[np.ndarray]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    module, target = two_in_three_out(), native_target()
    ready = apply_plan(module, make_plan(module, target, threads=1)).module
    folder: Path = tmp_path_factory.mktemp("marked")
    for name, marker in (("plain", ""), ("marked", MARK)):
        export(build_executable(ready, target, marker), folder / f"{name}.so", target)
    shapes = [[int(s) for s in p.ty.shape.values] for p in module["main"].params]
    inputs = [np.random.default_rng(i).normal(size=s).astype("float32") for i, s in enumerate(shapes)]
    steps = sequence_steps(ready)
    assert steps is not None
    return Built(str(folder / "plain.so"), str(folder / "marked.so"), len(steps), inputs)


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device.local(threads=1) as device:
        yield device


def test_marks_do_not_change_outputs(device: Device, built: Built) -> None:
    plain, marked = (device.run_model(path, built.inputs) for path in (built.plain, built.marked))
    assert len(plain) == len(marked) == 3
    for got, want in zip(marked, plain, strict=True):
        np.testing.assert_array_equal(got, want)


def test_every_step_has_a_sample_of_every_run(device: Device, built: Built) -> None:
    times = time_steps(device, built.plain, built.marked, built.inputs, steps=built.steps, starts=2, rounds=2)
    assert len(times.steps_us) == built.steps
    runs = {len(samples) for samples in times.steps_us}
    assert len(runs) == 1
    assert runs.pop() >= 2 * 2 * 5
    assert len(times.whole_us) == 2 * 2
    assert all(sample >= 0 for samples in times.steps_us for sample in samples)
    assert times.mark_us > 0
    assert times.sum_us > 0


def test_the_whole_time_may_be_left_out(device: Device, built: Built) -> None:
    times = time_steps(device, None, built.marked, built.inputs, steps=built.steps, starts=1, rounds=2)
    assert times.whole_us == ()
    assert len(times.steps_us) == built.steps


@pytest.mark.parametrize("steps", [-1, 1])
def test_marks_of_another_build_are_an_error(device: Device, built: Built, steps: int) -> None:
    with pytest.raises(RunFailed, match="does not tell of") as caught:
        time_steps(device, built.plain, built.marked, built.inputs, steps=built.steps + steps, starts=1, rounds=1)
    assert caught.value.status is Status.ERROR


def test_a_build_without_marks_is_an_error(device: Device, built: Built) -> None:
    with pytest.raises(RunFailed, match="does not tell of"):
        time_steps(device, built.plain, built.plain, built.inputs, steps=built.steps, starts=1, rounds=1)


def test_a_server_without_marks_is_named(device: Device, built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "function", lambda self, name: self._remote and None)
    monkeypatch.setattr(Device, "_set_threads", lambda self, session: None)
    with pytest.raises(DeviceError, match=r"layoutsearch\.measure\.server"):
        time_steps(device, built.plain, built.marked, built.inputs, steps=built.steps, starts=1, rounds=1)
