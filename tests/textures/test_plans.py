"""Plans with textures: made from rules, saved, loaded, applied, run; and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm import relax

import layoutsearch
from layoutsearch.errors import InfeasibleError, LayoutSearchError, MaterializeError, PlanError, SpaceError
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.io_layouts import IoLayouts
from layoutsearch.layout.scopes import GLOBAL, TEXTURE, TEXTURE_NHWC, TEXTURE_WEIGHT, Texture
from layoutsearch.materialize.convert import materialize
from layoutsearch.materialize.lower import lower
from layoutsearch.materialize.scopes import put_in_scopes, scope_of
from layoutsearch.materialize.verify_scopes import verify_scopes
from layoutsearch.model.load import load
from layoutsearch.plan.apply import apply_plan
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.plan.schema import digests
from layoutsearch.schedule.opencl import PIPELINE
from layoutsearch.search.first import first_plan
from layoutsearch.search.setup import set_up
from tests.cli.running import call, refused
from tests.materialize.cases import Case, assert_outputs
from tests.models import nets
from tests.textures.pocl import Pocl
from tests.textures.programs import TARGET, opencl_sources, program_of
from tests.textures.scoped import SPACE, case_of, placed

TAG = "qcom/adreno-opencl-texture"
HEAD = '[target]\nmatch = { kind = "opencl", feature = "texture" }\nblocks = [4]\n'
MIXED = f"""{HEAD}
[[rule]]
name = "into_buffers"
match = {{ op = "nn.conv2d", kernel = [1, 1] }}
layouts = ["NCHW{{i}}c->NCHW{{o}}c:OIHW{{o}}o"]
scope = "global"
weight_scope = "global.texture-weight"

[[rule]]
name = "into_textures"
match = {{ op = "nn.conv2d" }}
layouts = ["NCHW{{i}}c->NCHW{{o}}c:OIHW{{o}}o"]
scope = "global.texture"
weight_scope = "global"

[[rule]]
name = "pools"
match = {{ op = "nn.max_pool2d" }}
layouts = ["NCHW{{b}}c"]
scope = ["global.texture-nhwc"]

[[rule]]
name = "rest"
match = {{}}
layouts = ["NCHW{{b}}c", "NCHW"]
"""


def net() -> tvm.IRModule:
    """3x3 to 12 channels, pool, 1x1 to 16, each with bias and ReLU."""

    def body(n: nets.Net, x: relax.Expr) -> relax.Expr:
        pooled = n.emit(relax.op.nn.max_pool2d(n.conv_relu(x, 12), pool_size=2, strides=2))
        return n.conv_relu(pooled, 16, 1)

    return nets.build((1, 8, 6, 10), body=body)


@pytest.fixture
def mixed(tmp_path: Path) -> LayoutPlan:
    """A plan whose scopes a user's rules force, saved and loaded."""
    space = tmp_path / "mine.toml"
    space.write_text(MIXED)
    path = tmp_path / "plan.json"
    first_plan(net(), target=TAG, space=space).save(path)
    return LayoutPlan.load(path)


def scopes_of(plan: LayoutPlan) -> dict[str, tuple[str, str]]:
    return {op.kind: (op.choice.scope, op.choice.weight_scope) for op in plan.ops if op.choice}


def test_rules_force_buffers_and_textures(mixed: LayoutPlan) -> None:
    """What is fused behind a convolution follows it, though its own rule names no scope."""
    assert scopes_of(mixed) == {
        "conv2d": (TEXTURE, GLOBAL),
        "max_pool2d": (TEXTURE_NHWC, GLOBAL),
        "conv2d_pointwise": (GLOBAL, TEXTURE_WEIGHT),
        # The last of each kind: those behind the pointwise convolution.
        "add": (GLOBAL, GLOBAL),
        "relu": (GLOBAL, GLOBAL),
    }
    fused = [op.choice.scope for op in mixed.ops if op.choice and op.kind in ("add", "relu")]
    assert fused == [TEXTURE, TEXTURE, GLOBAL, GLOBAL]


def test_a_plan_of_mixed_scopes_is_applied(mixed: LayoutPlan, pocl: Pocl) -> None:
    """Saved, loaded, applied: types, images and numbers."""
    case = case_of(net())
    applied = apply_plan(net(), mixed)
    results = [scope_of(b.value.ty_args[0]) for block in applied.module["main"].body.blocks for b in block.bindings]
    assert results == [GLOBAL, TEXTURE, TEXTURE_NHWC, GLOBAL, GLOBAL]
    program = program_of(applied.module, case.inputs)
    textures = {place.texels for place in program.places.values() if place.texels}
    # NCHW4c of 12 x 6 x 10 as 3 images; of 12 x 3 x 5 as one with 3 rows; OIHW4o of 16 x 12 as one with 4 rows.
    assert textures == {(10, 6, 3), (15, 3, 1), (12, 4, 1)}
    assert_outputs(list(pocl.run(program)), case.wanted)


def test_the_plan_file_carries_scopes(mixed: LayoutPlan, tmp_path: Path) -> None:
    data = json.loads((tmp_path / "plan.json").read_text())
    ops = {op["kind"]: op for op in data["ops"]}
    assert ops["conv2d"]["scope"] == TEXTURE
    assert "weight_scope" not in ops["conv2d"]
    assert ops["conv2d_pointwise"]["scope"] == GLOBAL
    assert ops["conv2d_pointwise"]["weight_scope"] == TEXTURE_WEIGHT
    assert data["objective"]["measured"] is False
    assert data["objective"]["predicted_us"] is None
    assert data["validation"]["accepted"] is False
    assert LayoutPlan.from_json(data) == mixed


@pytest.mark.parametrize("one_line", [False, True], ids=["compile", "relax_pipeline"])
def test_production_compiles(mixed: LayoutPlan, one_line: bool) -> None:
    """Our compile, and TVM's with our pipeline, make the same kernels."""
    if one_line:
        built = tvm.compile(net(), TARGET, relax_pipeline=layoutsearch.pipeline(mixed), tir_pipeline=PIPELINE)
    else:
        built = layoutsearch.compile(net(), mixed)
    sources = opencl_sources(built)
    images = {name: source.split("{")[0].count("image2d_array_t") for name, source in sources.items()}
    assert sorted(images.values()) == [0, 0, 1, 2, 2]
    # Texels are written whole, each once.
    assert sum(source.count("write_imagef") for source in sources.values()) == 2
    # One device: a VM is made for what it runs on, not for every scope.
    storage = [line for line in built.as_text().splitlines() if "alloc_storage in: %vm" in line]
    assert storage
    assert all(", i0, " in line for line in storage)


def test_first_choices_of_the_shipped_space() -> None:
    plan = first_plan(net(), target=TAG)
    assert scopes_of(plan)["conv2d"] == (TEXTURE_WEIGHT, TEXTURE_WEIGHT)
    assert len(plan.transforms) == 2
    assert all(op.predicted_us is None and op.measured_us is None for op in plan.ops)
    roots = [op for op in plan.ops if op.fused_into is None]
    assert all("not measured" in op.why for op in roots)


def test_a_cpu_plan_knows_no_scopes() -> None:
    plan = first_plan(net())
    assert all(op.choice is not None and not op.choice.has_textures for op in plan.ops)
    text = json.dumps(plan.to_json()["ops"])
    assert "texture" not in text
    assert "weight_scope" not in text


# What is refused.


def edited(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('scope = "global"\n', 'scope = "local"\n', ["line 9", "'local'"]),
        ('scope = "global.texture"\n', "scope = []\n", ["line 16", "[]"]),
        ('layouts = ["NCHW{b}c"]\nscope = ["global.texture-nhwc"]', 'layouts = ["NCHW"]\nscope = "global.texture"',
         ["'pools'", "max_pool2d:", "ends in a block of 4, not NCHW"]),
        ('name = "rest"\nmatch = {}\n', 'name = "rest"\nmatch = {}\nscope = ["global", "global.texture-nhwc"]\n',
         ["'into_textures'", "conv2d:", "'rest'", "add:", "give both one scope"]),
    ],
)  # fmt: skip
def test_rules_that_cannot_be(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    space = tmp_path / "mine.toml"
    space.write_text(edited(MIXED, old, new))
    with pytest.raises(SpaceError) as caught:
        first_plan(net(), target=TAG, space=space)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_textures_are_for_targets_that_have_them(mixed: LayoutPlan, tmp_path: Path) -> None:
    with pytest.raises(LayoutSearchError, match=r"adreno\.toml has .*, but target llvm has no textures"):
        first_plan(net(), space=SPACE)
    with pytest.raises(LayoutSearchError, match=r"the plan has .*, but target opencl has no textures"):
        apply_plan(net(), replace(mixed, target={"kind": "opencl", "device": "adreno"}))
    with pytest.raises(PlanError, match="tuned for target"):
        apply_plan(net(), mixed, tvm.target.Target("llvm"))


def test_a_plan_with_an_unknown_scope(mixed: LayoutPlan) -> None:
    data: dict[str, Any] = mixed.to_json()
    data["ops"][0]["scope"] = "global.picture"
    data["digests"] = digests(data)
    with pytest.raises(PlanError, match=r"op conv2d:.*'global\.picture' is not a memory scope; known are global, "):
        LayoutPlan.from_json(data)


def test_operators_of_one_kernel_have_one_scope(mixed: LayoutPlan) -> None:
    ops = tuple(
        replace(op, choice=replace(op.choice, scope=GLOBAL)) if i == 1 and op.choice else op
        for i, op in enumerate(mixed.ops)
    )
    with pytest.raises(MaterializeError, match=r"op add:.* has scope global, but is fused behind conv2d:"):
        apply_plan(net(), replace(mixed, ops=ops))


def test_weights_that_are_inputs_are_in_buffers() -> None:
    def body(n: nets.Net, x: relax.Expr, w: relax.Expr) -> relax.Expr:
        return n.relu(n.emit(relax.op.nn.conv2d(x, w)))

    case = case_of(nets.build((1, 8, 6, 7), (12, 8, 1, 1), body=body))
    conv = case.graph.anchors[0].name
    assert {c.weight_scope for c in case.spaces[conv].candidates} == {GLOBAL}
    choice = Candidate.of("NCHW4c", "OIHW4o", "NCHW4c", weight_scope=TEXTURE_WEIGHT)
    with pytest.raises(MaterializeError, match=r"weights that are not constant, which cannot be in global\.text"):
        placed(case, {conv: choice, "relu_0": choice.follower})


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"scope": TEXTURE_NHWC}, "the result is in global.texture, requested global.texture-nhwc"),
        ({"scope": GLOBAL}, "the result is in global.texture, requested global"),
        ({"weight_scope": GLOBAL}, "the weights are in global.texture-weight, requested global"),
    ],
)
def test_scopes_that_are_not_as_requested_are_found(asked: dict[str, str], words: str) -> None:
    case = case_of(nets.build((1, 8, 5, 7), body=lambda n, x: n.relu(n.conv(x, 12, bias=False))))
    choice = Candidate.of("NCHW4c", "OIHW4o", "NCHW4c", scope=TEXTURE, weight_scope=TEXTURE_WEIGHT)
    lowered = placed(case, {"conv2d_0": choice, "relu_0": choice.follower})
    other = replace(choice, **asked)
    with pytest.raises(MaterializeError, match=f"^op conv2d:.*{words}"):
        verify_scopes(lowered, case.graph, {"conv2d_0": other, "relu_0": other.follower})


def shared_weights() -> Case:
    """Two convolutions whose weights are equal."""

    def body(n: nets.Net, x: relax.Expr) -> relax.Expr:
        weight = n.const((8, 8, 1, 1), 0.3)
        other = relax.const(weight.value.numpy().copy())
        return n.relu(n.emit(relax.op.nn.conv2d(n.relu(n.emit(relax.op.nn.conv2d(x, weight))), other)))

    return case_of(nets.build((1, 8, 5, 7), body=body))


def test_equal_weights_have_one_scope() -> None:
    """TVM stores them once, and would put both where the last of them is."""
    case = shared_weights()
    textured = Candidate.of("NCHW4c", "OIHW4o", "NCHW4c", weight_scope=TEXTURE_WEIGHT)
    one, other = (op.name for op in case.graph.anchors)
    after = {"relu_0": textured.follower, "relu_1": textured.follower}
    placed(case, {one: textured, other: textured, **after})
    with pytest.raises(MaterializeError, match=r"equal constants are stored once, so give both"):
        placed(case, {one: textured, other: textured.in_buffers, **after})


def test_a_texture_does_not_leave_the_model() -> None:
    """Rules do not let it; were one to come through, the model would hand out a texture for a buffer."""
    case = case_of(nets.build((1, 8, 5, 7), body=lambda n, x: n.conv(x, 12, 1, bias=False)))
    (conv,) = case.spaces
    plain = case.spaces[conv].candidates[-1]
    converted = materialize(case.module, case.graph, {conv: plain}).module
    textured = {conv: replace(plain, scope=TEXTURE)}
    with pytest.raises(MaterializeError, match=r"the model's output reads conv2d.* in global\.texture; only k"):
        put_in_scopes(lower(converted, TARGET), converted, case.graph, textured, TARGET)


@pytest.mark.parametrize(
    ("scope", "choice", "reason"),
    [
        (TEXTURE, "NCHW,OIHW,NCHW", "needs a layout that ends in a block of 4, not NCHW"),
        (TEXTURE, "NCHW4c,OIHW4i6o,NCHW6c", "needs a layout that ends in a block of 4, not NCHW6c"),
        (TEXTURE_NHWC, "NHWC,HWIO,NHWC", "needs a layout that ends in a block of 4, not NHWC"),
    ],
)
def test_what_cannot_be_a_texture(scope: str, choice: str, reason: str) -> None:
    case = case_of(net())
    wanted = replace(Candidate.parse(choice), scope=scope)
    with pytest.raises(InfeasibleError, match=reason):
        placed(case, {**{n: s.candidates[-1] for n, s in case.spaces.items()}, "conv2d_0": wanted})


def test_a_texture_has_limits() -> None:
    """17 000 columns of an image are too many in any fold; 20 000 pixels are, unless rows stay rows."""

    def scopes(height: int, width: int) -> set[str]:
        case = case_of(nets.build((1, 8, height, width), body=lambda n, x: n.relu(n.conv(x, 12, 1))))
        return {c.scope for c in case.spaces[case.graph.anchors[0].name].candidates}

    assert scopes(1, 17000) == {GLOBAL}
    assert scopes(200, 100) == {GLOBAL, TEXTURE}


@pytest.mark.parametrize(
    ("scope", "texels"), [(TEXTURE, (7, 5, 6)), (TEXTURE_WEIGHT, (105, 2, 1)), (TEXTURE_NHWC, (35, 3, 2))]
)
def test_how_tensors_are_folded(scope: str, texels: tuple[int, int, int]) -> None:
    """TVM's own size of the memory agrees, with rows padded to 64 bytes."""
    shape = (2, 3, 5, 7, 4)
    texture = Texture.of(shape, scope)
    assert (texture.width, texture.height, texture.depth) == texels
    row = -(-texture.width * 16 // 64) * 64
    size = tvm.get_global_func("DeviceGetMemSize.opencl")
    extents = [tvm.tirx.IntImm("int64", s) for s in shape]
    assert int(size(extents, "float32", relax.VDevice(TARGET, 0, scope))) == row * texture.height * texture.depth


@pytest.mark.parametrize("words", ["free", "NCHW4c", "NHWC"])
def test_outputs_in_other_layouts_come_out_of_buffers(tmp_path: Path, words: str) -> None:
    """Where nothing transforms it on its way out, the last kernel writes a buffer."""
    module = net()
    name = load(module).outputs[0].name
    wanted = IoLayouts.parse(words if words == "free" else f"{name}={words}")
    *before, last = set_up(module, tmp_path, target=TAG, io_layouts=wanted).skeleton.nodes
    assert all(any(c is not None and c.scope != GLOBAL for c in node.choices) for node in before)
    scopes = {c.scope for c in last.choices if c is not None and c.out.name == "NCHW4c"}
    assert (scopes == {GLOBAL}) == (words != "NHWC")
    assert any(c is not None and c.weight_scope != GLOBAL for c in last.choices)


def test_an_output_cannot_be_forced_into_a_texture(tmp_path: Path) -> None:
    space = tmp_path / "mine.toml"
    space.write_text(edited(MIXED, 'scope = "global"\n', 'scope = "global.texture"\n'))
    with pytest.raises(SpaceError, match=r"op relu:.* is in a texture by its rule, and makes output 0"):
        set_up(net(), tmp_path, target=TAG, space=space, io_layouts=IoLayouts.parse("free"))


# The command line.


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "net.json"
    path.write_text(tvm.ir.save_json(net()))
    return path


def test_plan_compile_explain(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    code, out, _ = call(capfd, "plan", model, "--target", TAG, "-o", plan)
    assert code == 0
    assert out == f"wrote {plan}: 7 ops, 7 of them with textures, 2 transforms; nothing was measured\n"
    code, out, _ = call(capfd, "explain", plan)
    assert code == 0
    assert "texture-weight" in out
    assert "nothing was measured" in out
    code, out, _ = call(capfd, "compile", model, "--plan", plan, "-o", tmp_path / "net.so")
    assert code == 0
    assert (tmp_path / "net.so").stat().st_size > 0


def test_a_device_without_opencl(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    assert call(capfd, "plan", model, "--target", TAG, "-o", plan)[0] == 0
    line = refused(capfd, "check", model, "--plan", plan)
    assert "cannot run opencl" in line
    assert "--rpc" in line
    tuned = ["tune", model, "--target", TAG, "--out", tmp_path / "out", "--quiet"]
    assert "is for CPUs" in refused(capfd, *tuned, "--kernel-tuner", "both")


def test_a_space_for_another_target(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = refused(capfd, "plan", model, "--space", SPACE, "-o", tmp_path / "plan.json")
    assert "no textures" in line
    assert not (tmp_path / "plan.json").exists()
