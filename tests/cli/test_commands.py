"""tune, compile, check and explain on a small model, as a user and as a script see them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

import layoutsearch
from layoutsearch.plan.plan import LayoutPlan
from tests.cli.conftest import Tuned
from tests.cli.running import call, last_json, run
from tests.models import nets, odd_nets
from tests.models.plans import make_plan
from tests.models.running import native_target, range_error, run_tvm

Capture = pytest.CaptureFixture[str]
TUNE_KEYS = {
    "plan", "baseline_us", "plan_us", "speedup", "speedup_ci", "predicted_us", "transforms", "ops", "accepted",
    "seconds",
}  # fmt: skip
CHECK_KEYS = {"ok", "requested", "achieved", "transforms", "max_rel_error", "mismatches"}


def test_tune_json(tuned: Tuned) -> None:
    result = tuned.result
    assert set(result) >= TUNE_KEYS
    plan = LayoutPlan.load(result["plan"])
    assert Path(result["plan"]) == tuned.plan
    assert result["ops"] == len(plan.ops) > 2
    assert result["transforms"] == len(plan.transforms)
    assert isinstance(result["accepted"], bool)
    assert result["accepted"] == plan.validation["accepted"]
    assert result["baseline_us"] == plan.validation["baseline_us"]["median"] > 0
    assert result["plan_us"] == plan.validation["plan_us"]["median"] > 0
    low, high = result["speedup_ci"]
    assert low <= result["speedup"] <= high
    assert result["predicted_us"] == plan.objective["predicted_us"] > 0
    assert result["seconds"] > 0
    assert result["interrupted"] is False
    assert result["failures"] == {}


def test_tune_json_has_the_terminal_for_itself(tuned: Tuned) -> None:
    assert tuned.stderr == ""


def test_the_plan_of_a_run(tuned: Tuned) -> None:
    plan = LayoutPlan.load(tuned.plan)
    assert plan.threads == 1
    assert plan.tool["tvm"] == tvm.__version__
    assert plan.validation["max_rel_error"] < 1e-3
    assert plan.objective["lower_bound_us"] <= plan.objective["predicted_us"]
    assert plan.device["key"] == "local"
    assert all(op.measured_us for op in plan.ops if op.fused_into is None and op.choice is not None)
    assert not plan.validation["accepted"] or plan.validation["speedup_ci"][0] > 1
    names = {p.name for p in tuned.out.iterdir()}
    assert names >= {"plan.json", "records.sqlite", "run.json"}
    assert not [name for name in names if name.startswith(".") or name.endswith(".tmp")]
    assert json.loads((tuned.out / "run.json").read_text())["state"] == "done"


def test_compile_then_run(files: Path, tuned: Tuned, tmp_path: Path) -> None:
    done = run("compile", files / "stem.json", "--plan", tuned.plan, "-o", tmp_path / "model.so")
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "model.so") in done.stdout
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / "model.so")), tvm.cpu())
    x = np.random.default_rng(0).normal(size=(1, 3, 16, 16)).astype("float32")
    got = machine["main"](tvm.runtime.tensor(x)).numpy()
    assert range_error(got, run_tvm(nets.stem((1, 3, 16, 16)), [x])[0]) < 1e-5


def test_check(files: Path, tuned: Tuned, capfd: Capture) -> None:
    code, out, err = call(capfd, "check", files / "stem.json", "--plan", tuned.plan, "--json")
    assert (code, err) == (0, "")
    result = last_json(out)
    assert set(result) >= CHECK_KEYS
    assert result["ok"] is True
    assert result["mismatches"] == []
    assert result["requested"] == result["achieved"] > 0
    assert result["transforms"] == tuned.result["transforms"]
    assert result["max_rel_error"] < 1e-3


def test_check_of_a_plan_that_was_drawn(files: Path, capfd: Capture) -> None:
    """Two inputs, three outputs, several blocks."""
    code, out, err = call(capfd, "check", files / "outputs.json", "--plan", files / "plan.json")
    assert (code, err) == (0, ""), (out, err)
    transforms = len(LayoutPlan.load(files / "plan.json").transforms)
    assert transforms > 0
    assert f" {transforms} transforms" in out


def test_check_tells_the_model_s_own_transposes_from_transforms(tmp_path: Path, capfd: Capture) -> None:
    """A channel shuffle transposes five dimensions; that is no transform of the plan."""
    module = odd_nets.shuffle()
    (tmp_path / "shuffle.json").write_text(tvm.ir.save_json(module))
    drawn = make_plan(module, native_target())
    drawn.save(tmp_path / "plan.json")
    code, out, err = call(capfd, "check", tmp_path / "shuffle.json", "--plan", tmp_path / "plan.json", "--json")
    assert (code, err) == (0, ""), (out, err)
    assert last_json(out)["transforms"] == len(drawn.transforms)


def test_check_says_what_is_wrong(files: Path, tuned: Tuned, capfd: Capture) -> None:
    """No plan adds up in the order of the untouched model, so none is within a rounding of a rounding."""
    strict = ("--max-rel-error", "1e-30", "--json")
    code, out, err = call(capfd, "check", files / "outputs.json", "--plan", files / "plan.json", *strict)
    assert (code, err) == (1, "")
    result = last_json(out)
    assert result["ok"] is False
    assert "outputs differ" in result["mismatches"][0]


def test_explain_fits_100_columns_when_piped(files: Path, tuned: Tuned, capfd: Capture) -> None:
    for plan in (tuned.plan, files / "plan.json"):
        code, out, _ = call(capfd, "explain", plan, "--all")
        assert code == 0
        lines = out.splitlines()
        assert max(map(len, lines)) <= 100
        assert "\x1b" not in out
        loaded = LayoutPlan.load(plan)
        for op in loaded.ops:
            if op.fused_into is None:
                assert any(line.strip().startswith(op.id) for line in lines), op.id
        for word in ("op", "layouts", "us", "uniform us", "transforms", "why"):
            assert word in " ".join(" ".join(lines[:3]).split()), lines[:3]


def test_explain_says_what_was_chosen_and_what_it_is_worth(tuned: Tuned, capfd: Capture) -> None:
    code, out, _ = call(capfd, "explain", tuned.plan)
    assert code == 0
    plan = LayoutPlan.load(tuned.plan)
    for op in plan.ops:
        if op.fused_into is None and op.choice is not None:
            assert f"{op.measured_us:.1f}" in out
            assert str(op.choice.out) in out
    assert plan.validation["baseline"] in out
    assert ("accepted" if plan.validation["accepted"] else "nothing beat") in out


def test_a_model_with_nothing_to_choose(files: Path, tmp_path: Path, capfd: Capture) -> None:
    out, library = tmp_path / "out", tmp_path / "dense.so"
    code, said, err = call(capfd, "tune", files / "dense.json", "--out", out, "--threads", 1)
    assert code == 0, err
    assert "nothing to choose" in said
    plan = LayoutPlan.load(out / "plan.json")
    assert plan.ops == ()
    assert plan.transforms == ()
    assert "nothing to choose" in call(capfd, "explain", out / "plan.json")[1]
    code, said, err = call(capfd, "compile", files / "dense.json", "--plan", out / "plan.json", "-o", library)
    assert code == 0, err
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
    x = np.random.default_rng(0).normal(size=(4, 12)).astype("float32")
    got = machine["main"](tvm.runtime.tensor(x)).numpy()
    assert range_error(got, run_tvm(nets.without_convolution(), [x])[0]) < 1e-5
    code, said, err = call(capfd, "check", files / "dense.json", "--plan", out / "plan.json", "--json")
    assert code == 0, err
    assert last_json(said) | {"max_rel_error": 0} == {
        "ok": True, "requested": 0, "achieved": 0, "transforms": 0, "max_rel_error": 0, "mismatches": [],
    }  # fmt: skip


def test_the_same_in_python(files: Path, tmp_path: Path) -> None:
    module = nets.stem((1, 3, 16, 16))
    plan = layoutsearch.tune(
        module,
        space=files / "space.toml",
        desired_layouts={"nn.conv2d": ["NCHW", "OIHW"]},
        trials=1,
        threads=1,
        out=tmp_path / "out",
        time_budget="12s",
    )
    assert {str(op.choice) for op in plan.ops if op.kind == "conv2d"} == {"NCHW,OIHW,NCHW"}
    assert plan == layoutsearch.LayoutPlan.load(tmp_path / "out" / "plan.json")
    assert layoutsearch.compile(module, plan) is not None
    assert tvm.compile(module, tvm.target.Target(dict(plan.target)), relax_pipeline=layoutsearch.pipeline(plan))


def test_help(capfd: Capture) -> None:
    code, out, _ = call(capfd, "--help")
    assert code == 0
    for command in ("tune", "compile", "check", "explain"):
        assert command in out
        code, text, _ = call(capfd, command, "--help")
        assert code == 0
        options = [line for line in text.splitlines() if line.strip().startswith("-")]
        assert all(len(line.split("  ")) > 1 for line in options), text
    _, text, _ = call(capfd, "tune", "--help")
    for option in (
        "--shape", "--target", "--threads", "--space", "--trials", "--time-budget", "--rpc", "--device-key", "--out",
        "--resume", "--seed", "--json", "--quiet",
    ):  # fmt: skip
        assert option in text


def test_version(capfd: Capture) -> None:
    code, out, _ = call(capfd, "--version")
    assert code == 0
    assert layoutsearch.__version__ in out


def test_results_are_json_for_other_tools(tuned: Tuned) -> None:
    assert json.loads(json.dumps(tuned.result, allow_nan=False)) == tuned.result
