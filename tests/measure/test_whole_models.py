"""Whole models over RPC: outputs, interleaved rounds, and failures of one model among others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from layoutsearch.measure.device import Device
from layoutsearch.measure.results import RunFailed, Status

X = np.random.default_rng(0).standard_normal((4, 16)).astype("float32")


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device.local(threads=1) as device:
        yield device


def test_run_model_returns_flat_outputs(device: Device, model_libs: dict[str, str]) -> None:
    total, relu = device.run_model(model_libs["two"], [X])
    np.testing.assert_allclose(total, X + 2, rtol=1e-6)
    np.testing.assert_allclose(relu, np.maximum(X + 2, 0), rtol=1e-6)


@pytest.mark.parametrize(("name", "status"), [("segfault", Status.CRASH), ("hang", Status.TIMEOUT)])
def test_a_run_that_fails_raises_with_its_status(
    device: Device, model_libs: dict[str, str], name: str, status: Status
) -> None:
    with pytest.raises(RunFailed) as caught:
        device.run_model(model_libs[name], [X], timeout_s=1.0)
    assert caught.value.status is status
    assert len(device.run_model(model_libs["one"], [X])) == 2


def test_wrong_inputs_are_an_error(device: Device, model_libs: dict[str, str]) -> None:
    with pytest.raises(RunFailed) as caught:
        device.run_model(model_libs["one"], [X[:2]])
    assert caught.value.status is Status.ERROR
    assert len(device.run_model(model_libs["one"], [X])) == 2


def test_rounds_are_aligned(device: Device, model_libs: dict[str, str]) -> None:
    paths = {name: model_libs[name] for name in ("one", "two")}
    results = device.time_models(paths, [X], rounds=4)
    assert {name: len(result.samples_us) for name, result in results.items()} == {"one": 4, "two": 4}
    assert all(sample > 0 for result in results.values() for sample in result.samples_us)


def test_a_model_that_fails_does_not_take_the_others_along(device: Device, model_libs: dict[str, str]) -> None:
    results = device.time_models(model_libs, [X], rounds=3, timeout_s=1.0)
    assert {name: result.status for name, result in results.items()} == {
        "one": Status.OK,
        "two": Status.OK,
        "segfault": Status.CRASH,
        "hang": Status.TIMEOUT,
    }
    assert len(results["one"].samples_us) == len(results["two"].samples_us) == 3
    assert "SIGSEGV" in results["segfault"].error


def test_rounds_go_on_after_the_session_was_lost(device: Device, model_libs: dict[str, str]) -> None:
    with device.models({name: model_libs[name] for name in ("one", "two")}, [X]) as models:
        assert set(models.round()) == {"one", "two"}
        device.session(1.0).close()
        assert set(models.round()) == {"one", "two"}
        models.reload()
        assert set(models.round()) == {"one", "two"}
        assert not models.failures
