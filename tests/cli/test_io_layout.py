"""`--io-layout` from end to end, on a segmentation head: tuned, checked, compiled, explained, compared, resumed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

import layoutsearch
from layoutsearch.measure.records import RecordStore
from layoutsearch.plan.plan import LayoutPlan
from tests.cli.conftest import Tuned
from tests.cli.running import call, last_json, refused, run
from tests.models import nets
from tests.models.running import native_target, range_error, run_tvm

Capture = pytest.CaptureFixture[str]
SHAPE = (1, 8, 5, 9)
SPACE = """
[target]
match = { kind = "llvm" }
blocks = [8]

[[rule]]
name = "everything"
match = {}
layouts = ["NCHW", "NHWC"]
"""


def head() -> tvm.IRModule:
    """Two convolutions of the input and a transposed one: 8 to 16 to 24 channels, 5 x 9 to 10 x 18 pixels."""

    def body(n: nets.Net, x: relax.Expr) -> relax.Expr:
        y = n.relu(n.emit(relax.op.add(n.conv(x, 16), n.conv(x, 16, 1))))
        return n.relu(n.emit(relax.op.nn.conv2d_transpose(y, n.const((16, 24, 2, 2), 0.2), strides=2)))

    return nets.build(SHAPE, body=body)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    (folder / "head.json").write_text(tvm.ir.save_json(head()))
    (folder / "space.toml").write_text(SPACE)
    return folder


@pytest.fixture(scope="module")
def last(folder: Path) -> Tuned:
    """Tuned with channels last on the way out, and whatever costs least on the way in, which two kernels read."""
    out = folder / "out"
    options = ["--space", folder / "space.toml", "--trials", 2, "--threads", 1, "--time-budget", "120s"]
    words = ["--io-layout", "free", "--io-layout", "output0=NHWC"]
    done = run("tune", folder / "head.json", *options, *words, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    return Tuned(out, last_json(done.stdout), done.stderr)


def test_the_plan_says_how_inputs_and_outputs_are(last: Tuned) -> None:
    plan = LayoutPlan.load(last.plan)
    (given,), (made,) = plan.model["inputs"], plan.model["outputs"]
    assert (given["name"], given["shape"], given["axes"]) == ("x", list(SHAPE), "NCHW")
    assert made == {
        "name": "output0", "shape": [1, 24, 10, 18], "dtype": "float32", "axes": "NCHW", "layout": "NHWC",
    }  # fmt: skip
    readers = {str(op.choice.data) for op in plan.ops if op.kind.startswith("conv2d") and op.choice} - {""}
    # Free, so it comes as one of its readers wants it, and is changed for the other at most.
    assert given["layout"] in readers
    assert sum(t.tensor == "x" for t in plan.transforms) <= 1
    assert plan.validation["max_rel_error"] < 1e-4


def test_every_baseline_has_the_same_border(last: Tuned) -> None:
    uniforms = sorted((last.out / "uniform").glob("*.json"))
    assert {p.stem for p in uniforms} == {"NCHW", "NHWC"}
    for path in uniforms:
        plan = LayoutPlan.load(path)
        assert plan.model["outputs"][0]["layout"] == "NHWC"
        # Its own best where the border is free.
        assert plan.model["inputs"][0]["layout"] == path.stem
        # A kernel that the search saw no reason to measure in a layout stands in the other one in its baseline.
        last_anchor = next(op for op in plan.ops if op.kind == "conv2d_transpose" and op.choice)
        assert last_anchor.choice
        changed = [t for t in plan.transforms if t.tensor == plan.ops[-1].id]
        assert [t.target for t in changed] == (["NHWC"] if str(last_anchor.choice.out) == "NCHW" else [])


def test_the_transposed_convolution_was_searched(last: Tuned) -> None:
    """An anchor with a candidate in every layout, measured or held for slower, and a measured kernel in the plan."""
    plan = LayoutPlan.load(last.plan)
    row = next(op for op in plan.ops if op.kind == "conv2d_transpose")
    assert row.measured_us
    assert row.choice
    lines = gzip.decompress((last.out / "plan.costs.jsonl.gz").read_bytes()).decode().splitlines()
    (found,) = (c for c in map(json.loads, lines) if c.get("kernel") == row.id)
    assert set(found["candidates"]) == {"NCHW,IOHW,NCHW", "NHWC,HWIO,NHWC"}
    with RecordStore(last.out / "records.sqlite") as store:
        ran = {r.candidate for r in store.records() if r.workload == row.workload and r.measurement.ok}
    assert str(row.choice) in ran <= set(found["candidates"])


def test_check(folder: Path, last: Tuned, capfd: Capture) -> None:
    code, out, _ = call(capfd, "check", folder / "head.json", "--plan", last.plan, "--json")
    result = last_json(out)
    assert (code, result["mismatches"]) == (0, [])
    assert result["transforms"] == len(LayoutPlan.load(last.plan).transforms)
    assert result["max_rel_error"] < 1e-4


def test_compile_then_run(folder: Path, last: Tuned, tmp_path: Path) -> None:
    done = run("compile", folder / "head.json", "--plan", last.plan, "-o", tmp_path / "model.so")
    assert done.returncode == 0, done.stderr
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / "model.so")), tvm.cpu())
    x = np.random.default_rng(0).normal(size=SHAPE).astype("float32")
    last_axis = LayoutPlan.load(last.plan).model["inputs"][0]["layout"] == "NHWC"
    given = np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if last_axis else x
    got = machine["main"](tvm.runtime.tensor(given)).numpy()
    assert range_error(got.transpose(0, 3, 1, 2), run_tvm(head(), [x])[0]) < 1e-5


def test_in_a_script_of_ones_own(last: Tuned) -> None:
    plan = LayoutPlan.load(last.plan)
    executable = tvm.compile(head(), native_target(), relax_pipeline=layoutsearch.pipeline(plan))
    x = np.zeros((1, 5, 9, 8) if plan.io_layouts.get("input x") == "NHWC" else SHAPE, "float32")
    got = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy()
    assert got.shape == (1, 10, 18, 24)


def test_explain(last: Tuned, capfd: Capture) -> None:
    code, out, _ = call(capfd, "explain", last.plan)
    assert code == 0
    assert "output output0 of the compiled module is in NHWC" in out


def test_what_another_layout_would_cost(last: Tuned, capfd: Capture) -> None:
    """The input goes along with whatever is cheapest then."""
    code, out, err = call(capfd, "explain", last.plan, "--pin", "nn.conv2d=NCHW", "--json")
    assert (code, err) == (0, "")
    found = last_json(out)
    assert found["best_us"] <= found["after_us"]
    changed = {kernel["id"] for kernel in found["kernels"]}
    assert changed <= {op.id for op in LayoutPlan.load(last.plan).ops}


@pytest.mark.slow
def test_bench_model_gives_the_plan_what_it_takes(folder: Path, last: Tuned) -> None:
    done = run(
        "bench", "model", folder / "head.json", "--plan", last.plan, "--against", f"tvm,{last.out}/uniform/NCHW.json",
        "--starts", 1, "--rounds", 2, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = last_json(done.stdout)
    assert result["plan_max_rel_error"] < 1e-4
    assert result["NCHW_max_rel_error"] < 1e-4


def test_resumed_with_another_border_is_another_run(folder: Path, last: Tuned, capfd: Capture) -> None:
    options = ["--space", folder / "space.toml", "--trials", 2, "--threads", 1, "--out", last.out]
    options += ["--resume", "--quiet"]
    line = refused(capfd, "tune", folder / "head.json", *options, "--io-layout", "x=NHWC")
    assert line == (
        f"layoutsearch: --resume: the run in {last.out} has another --io-layout; use another --out, or leave --resume "
        "away"
    )
    assert "has another --io-layout" in refused(capfd, "tune", folder / "head.json", *options)


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("image=NHWC", "--io-layout: the model has no 'image'; its inputs are x, its outputs output0"),
        (
            "x=NCHW16c",
            "--io-layout x=NCHW16c: input x is NCHW 1x8x5x9: block 16 does not divide C=8; give another layout",
        ),
        ("sideways", "--io-layout 'sideways': expected keep, free or NAME=LAYOUT, such as x=NHWC"),
    ],
)
def test_what_cannot_be(folder: Path, word: str, line: str, tmp_path: Path, capfd: Capture) -> None:
    done = refused(capfd, "tune", folder / "head.json", "--io-layout", word, "--out", tmp_path)
    assert done == f"layoutsearch: {line}"


def test_a_vector_has_no_layout(files: Path, tmp_path: Path, capfd: Capture) -> None:
    line = refused(capfd, "tune", files / "outputs.json", "--io-layout", "output2=NHWC", "--out", tmp_path)
    assert line == (
        "layoutsearch: --io-layout output2=NHWC: output output2 has 2 dimensions; only a tensor of four, of fixed "
        "shape, can have another layout"
    )


def test_a_plan_without_a_device(folder: Path, tmp_path: Path, capfd: Capture) -> None:
    options = ["--space", folder / "space.toml", "--io-layout", "x=NHWC", "-o", tmp_path / "plan.json"]
    code, _, err = call(capfd, "plan", folder / "head.json", *options)
    assert (code, err) == (0, "")
    assert LayoutPlan.load(tmp_path / "plan.json").io_layouts == {"input x": "NHWC"}
    assert "no 'y'; its inputs are x" in refused(
        capfd, "plan", folder / "head.json", "--io-layout", "y=NHWC", *options[2:]
    )


def test_what_a_border_may_be(folder: Path, capfd: Capture) -> None:
    options = ["--space", folder / "space.toml", "--io-layout", "free", "--io-layout", "output0=NHWC"]
    code, out, _ = call(capfd, "space", "show", folder / "head.json", *options)
    assert code == 0
    assert out.splitlines()[-2:] == ["input x  any of NCHW  NHWC", "output output0  NHWC"]
    code, out, _ = call(capfd, "space", "show", folder / "head.json", *options, "--json")
    assert last_json(out)["border"][0] == {"what": "input x", "layouts": ["NCHW", "NHWC"], "free": True}


def test_a_replay_has_its_own_border(files: Path, tmp_path: Path, capfd: Capture) -> None:
    table = Path(__file__).resolve().parents[1] / "replay" / "golden" / "v1_residual.jsonl.gz"
    line = refused(capfd, "tune", files / "residual.json", "--replay", table, "--io-layout", "free", "--out", tmp_path)
    assert line == "layoutsearch: --replay has the borders it was recorded with; leave --io-layout away"
