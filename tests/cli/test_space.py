"""`space show`, and rules on the command line: what they say, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import tvm

from tests.cli.running import SPACE, call, last_json, refused
from tests.models import nets

Capture = pytest.CaptureFixture[str]
AVX512 = '{"kind": "llvm", "mcpu": "skylake-avx512"}'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 to 16 to 24 channels by 3x3 of stride 2, depthwise, pointwise to 20."""
    path = tmp_path_factory.mktemp("space") / "model.json"

    def body(n: nets.Net, x: nets.relax.Expr) -> nets.relax.Expr:
        y = n.conv_relu(n.conv_relu(x, 16, stride=2), 24, stride=2)
        return n.conv(n.relu(n.depthwise(y)), 20, 1)

    path.write_text(tvm.ir.save_json(nets.build((1, 3, 20, 28), body=body)))
    return path


def shown(capfd: Capture, model: Path, *args: object) -> dict[str, dict[str, object]]:
    """Operators by name, of `space show --json` for AVX-512."""
    code, out, err = call(capfd, "space", "show", model, "--target", AVX512, "--json", *args)
    assert (code, err) == (0, "")
    return {op["name"]: op for op in last_json(out)["ops"]}


def why(op: dict[str, object], candidate: str) -> str:
    found = op["out"]
    assert isinstance(found, list)
    (reason,) = [entry["why"] for entry in found if entry["candidate"] == candidate]
    return str(reason)


def test_every_operator_has_its_rule_and_candidates(capfd: Capture, model: Path) -> None:
    ops = shown(capfd, model)
    rules = {name: op["rule"] for name, op in ops.items() if op["role"] == "anchor"}
    assert rules == {
        "conv2d_0": "conv2d_stem",
        "conv2d_1": "conv2d",
        "conv2d_depthwise_0": "conv2d_depthwise",
        "conv2d_pointwise_0": "conv2d",
    }
    assert set(ops["conv2d_depthwise_0"]["candidates"]) == {  # type: ignore[call-overload]
        "NCHW,OIHW,NCHW", "NHWC,HWIO,NHWC", "NCHW8c,OIHW8o,NCHW8c",
    }  # fmt: skip
    assert ops["relu_0"]["follows"] == ops["conv2d_0"]["id"]
    assert ops["conv2d_0"]["follows"] is None


def test_why_others_are_out(capfd: Capture, model: Path, tmp_path: Path) -> None:
    ops = shown(capfd, model, "--desired-layout", "nn.conv2d_pointwise=NHWC")
    assert why(ops["conv2d_0"], "NCHW->NCHW32c") == "block 32 does not divide 16 output channels"
    assert "no winograd2 kernel for stride 2" in why(ops["conv2d_1"], "NHWC,HWIO,NHWC,winograd2")
    assert why(ops["conv2d_0"], "NHWC,OHWI16o,NHWC") == "rule 'conv2d_stem' does not list it"
    pointwise = ops["conv2d_pointwise_0"]
    assert pointwise["pinned"] == "--desired-layout nn.conv2d_pointwise=NHWC"
    assert why(pointwise, "NCHW,OIHW,NCHW") == "pinned by --desired-layout nn.conv2d_pointwise=NHWC"
    rules = tmp_path / "rules.toml"
    rules.write_text(
        SPACE.replace("[[rule]]", '[[rule]]\nname = "dw"\nmatch = { depthwise = true }\nlayouts = ["NCHW", "NHWC"]\n'
        'forbid = ["NHWC"]\n\n[[rule]]\nname = "one"\nmatch = { kind = "conv2d", position = "first" }\n'
        'pin = ["NCHW", "OIHW8o", "NCHW8c"]\n\n[[rule]]')
    )  # fmt: skip
    ops = shown(capfd, model, "--space", rules)
    assert ops["conv2d_0"]["candidates"] == ["NCHW,OIHW8o,NCHW8c"]
    assert why(ops["conv2d_0"], "NCHW,OIHW,NCHW") == "pinned by rule 'one'"
    assert why(ops["conv2d_depthwise_0"], "NHWC,HWIO,NHWC") == "forbidden by rule 'dw'"
    assert why(ops["conv2d_depthwise_0"], "NCHW8c,OIHW8o,NCHW8c") == "rule 'dw' does not list it"


def test_what_its_kernel_cannot_follow_is_out(capfd: Capture, model: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    relu = '[[rule]]\nname = "relu"\nmatch = { op = "nn.relu" }\nlayouts = ["NCHW"]\n\n[[rule]]'
    rules.write_text(SPACE.replace("[[rule]]", relu))
    ops = shown(capfd, model, "--space", rules)
    assert ops["conv2d_1"]["candidates"] == ["NCHW,OIHW,NCHW"]
    reason = why(ops["conv2d_1"], "NCHW8c,OIHW8i8o,NCHW8c")
    assert reason == f"{ops['relu_1']['id']} in its kernel cannot be NCHW8c"


def test_the_text_names_every_operator_within_100_columns(capfd: Capture, model: Path) -> None:
    ops = shown(capfd, model)
    code, out, err = call(capfd, "space", "show", model, "--target", AVX512, "--desired-layout", "default=NCHW")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    assert all(str(op["id"]) in out for op in ops.values())
    assert "pinned by --desired-layout default=NCHW" in out


def test_a_rule_that_matches_nothing_is_a_warning(capfd: Capture, model: Path) -> None:
    code, out, err = call(capfd, "space", "show", model, "--desired-layout", "nn.conv2d_grouped=NCHW", "--json")
    assert code == 0
    line = (
        "--desired-layout nn.conv2d_grouped=NCHW matches no op of the model; the nearest op of the model is nn.conv2d"
    )
    assert err.startswith(f"warning: {line}")
    assert err.count("\n") == 1
    assert last_json(out)["notes"]


@pytest.mark.parametrize("command", [["space", "show"], ["tune", "--quiet"]])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nn.conv9d=NHWC"], ["unknown op 'nn.conv9d'", "nearest", "nn.conv2d"]),
        (["nn.conv2d"], ["expected KEY=LAYOUT"]),
        (["nn.conv2d=NHWC", "nn.conv2d=NCHW"], ["contradict"]),
        (["nn.conv2d=NCHW16c"], ["nn.conv2d=NCHW16c", "conv2d:", "does not divide C=3"]),
        (["nn.conv2d=NCHX"], ["NCHX"]),
    ],
)
def test_wrong_rules(
    capfd: Capture, model: Path, tmp_path: Path, command: list[str], options: list[str], words: list[str]
) -> None:
    args = [a for option in options for a in ("--desired-layout", option)]
    out = ["--out", tmp_path / "out"] if command[0] == "tune" else []
    line = refused(capfd, *command, model, *args, *out)
    assert all(word in line for word in ["--desired-layout", *words]), line
    assert not (tmp_path / "out").exists()


DEPTHWISE = "[8]\n\n[[rule]]\nname = 'dw'\nmatch = { depthwise = true }\n"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("match = {}", 'match = { op = "nn.conv9d" }'), ["'everything'", "nn.conv9d", "nearest"]),
        (("match = {}", "match = { kernels = [1, 1] }"), ["line 8", "kernels"]),
        (("[8]", DEPTHWISE + "layouts = ['NCHW{b}c', 'NCHW']\nblocks = [7]"), ["'dw'", "[7]", "24"]),
        (("[8]", DEPTHWISE + "pin = ['NCHW7c']"), ["'dw'", "block 7", "conv2d_depthwise:"]),
    ],
)
def test_wrong_files(capfd: Capture, model: Path, tmp_path: Path, change: tuple[str, str], words: list[str]) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(SPACE.replace(*change))
    line = refused(capfd, "space", "show", model, "--space", path)
    assert all(word in line for word in ["rules.toml", *words]), line


def test_help(capfd: Capture) -> None:
    for args, words in (
        (["--help"], ["space"]),
        (["space", "show", "--help"], ["--shape", "--target", "--space", "--desired-layout", "--json"]),
        (["tune", "--help"], ["--desired-layout", "nn.conv2d_depthwise"]),
        (["explain", "--help"], ["--pin", "--costs", "--json"]),
    ):
        code, out, _ = call(capfd, *args)
        assert code == 0
        assert all(word in out for word in words)
