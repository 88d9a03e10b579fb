"""`layoutsearch bench model --per-op` as a user and as a script see it; times are whatever they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import tvm
from tvm import relax

from layoutsearch.measure.calibrate import target_text
from layoutsearch.measure.profile import HOME_VARIABLE, DeviceProfile, MemoryLevel, ProfileStore
from layoutsearch.plan.apply import apply_plan
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.plan.sequence import sequence_steps
from tests.cli.made_profile import store_profile
from tests.cli.running import call, last_json, refused
from tests.models import nets
from tests.models.plans import make_plan, two_in_three_out
from tests.models.running import native_target

Capture = pytest.CaptureFixture[str]
QUICK = ["--starts", 1, "--rounds", 2]
KEYS = {
    "model", "threads", "whole_us", "whole_spread", "sum_us", "sum_over_whole", "mark_us", "reached_gflops", "runs",
    "profile", "notes", "kernels", "roofline",
}  # fmt: skip
KERNEL_KEYS = {
    "step", "function", "ops", "kind", "group", "layouts", "algorithm", "flops", "weight_bytes", "activation_bytes",
    "flops_per_byte", "us", "spread", "measured_us", "gflops", "share_of_peak", "share_of_reached",
    "bound_us", "bound", "share_of_bound", "in_place_us", "in_place", "share_in_place",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))


@pytest.fixture
def profile(plan: LayoutPlan) -> DeviceProfile:
    """Made up, and stored for this machine and the plan."""
    levels = (MemoryLevel("l1", 48 << 10, 456.7), MemoryLevel("l2", 1 << 20, 98.7), MemoryLevel("memory", 0, 8.9))
    return store_profile(plan.threads, target_text(dict(plan.target)), levels)


def test_json_with_a_roofline(
    files: Path, plan: LayoutPlan, profile: DeviceProfile, tmp_path: Path, capfd: Capture
) -> None:
    plot = tmp_path / "roof.svg"
    args = [files / "outputs.json", "--plan", files / "plan.json", "--per-op", "--roofline", plot, *QUICK, "--json"]
    code, out, err = call(capfd, "bench", "model", *args)
    assert (code, err) == (0, ""), err
    data = last_json(out)
    assert set(data) == KEYS
    steps = sequence_steps(apply_plan(two_in_three_out(), plan).module)
    assert steps is not None
    assert sorted(k["step"] for k in data["kernels"]) == list(range(len(steps)))
    assert [k["us"] for k in data["kernels"]] == sorted((k["us"] for k in data["kernels"]), reverse=True)
    for kernel in data["kernels"]:
        assert set(kernel) == KERNEL_KEYS
        assert kernel["function"] == steps[kernel["step"]].function
        assert kernel["bound"] in {"compute", "l1", "l2", "memory", "call", None}
    assert DeviceProfile.from_json(data["profile"]) == profile
    assert data["notes"] == []
    assert data["whole_us"] > 0
    assert plot.exists()


def test_a_device_that_is_not_calibrated(files: Path, tmp_path: Path, capfd: Capture) -> None:
    args = ["bench", "model", files / "outputs.json", "--plan", files / "plan.json", "--per-op", *QUICK]
    code, out, err = call(capfd, *args)
    assert code == 0, err
    assert "add up to" in out
    (line,) = err.splitlines()
    assert "not calibrated" in line
    assert "layoutsearch device calibrate --threads 2" in line
    # A plot would have nothing to compare with.
    assert "layoutsearch device calibrate" in refused(capfd, *args, "--roofline", tmp_path / "roof.png")
    assert not (tmp_path / "roof.png").exists()


def test_a_damaged_profile_is_named(files: Path, profile: DeviceProfile, capfd: Capture) -> None:
    (path,) = ProfileStore().folder.iterdir()
    path.write_text("{}")
    assert str(path) in refused(
        capfd, "bench", "model", files / "outputs.json", "--plan", files / "plan.json", "--per-op"
    )


def test_kernels_that_are_no_sequence(tmp_path: Path, capfd: Capture) -> None:
    """The model returns its own input, which a sequence would have to copy."""
    module = nets.build((1, 8, 6, 10), body=lambda n, x: relax.Tuple([n.conv_relu(x, 12), x]))
    (tmp_path / "model.json").write_text(tvm.ir.save_json(module))
    make_plan(module, native_target()).save(tmp_path / "plan.json")
    line = refused(capfd, "bench", "model", tmp_path / "model.json", "--plan", tmp_path / "plan.json", "--per-op")
    assert "per-operator times are not available" in line


def test_options_that_belong_to_a_comparison(files: Path, tmp_path: Path, capfd: Capture) -> None:
    args = ["bench", "model", files / "outputs.json", "--plan", files / "plan.json", "--per-op"]
    assert "--against" in refused(capfd, *args, "--against", "tvm")
    assert "--save" in refused(capfd, *args, "--save", tmp_path / "table.jsonl")
    assert "ends in" in refused(capfd, *args, "--roofline", tmp_path / "roof.pdf")
