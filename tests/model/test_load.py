"""Loading: every way in, and the one line a user gets when it does not work."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from layoutsearch.errors import ModelError
from layoutsearch.model import ModelInput, ModelOutput, canonicalize, fingerprint, load, parse_shapes
from tests.models import nets, onnx_nets, zoo
from tests.models.onnx_nets import X, model, node
from tests.models.running import range_error, run_tvm

DYNAMIC = {"picture": ("n", 3, None, "w"), "scale": (1,)}


def dynamic() -> onnx.ModelProto:
    return model([node("Mul", "picture scale", "y")], DYNAMIC)


def message(action: Callable[[], object]) -> str:
    """The text of the ModelError an action raises, which is a single line."""
    with pytest.raises(ModelError) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    assert caught.value.exit_code == 2
    return text


def test_onnx_file_and_object_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "three.onnx"
    onnx.save(onnx_nets.two_outputs(), str(path))
    from_file, from_text, from_object = load(path), load(os.fspath(path)), load(onnx_nets.two_outputs())
    assert (from_file.name, from_object.name) == ("three", "net")
    assert from_file.inputs == from_text.inputs == from_object.inputs == (ModelInput("x", (1, 6, 5, 7), "float32"),)
    shape = (1, 6, 5, 7)
    assert from_file.outputs == (ModelOutput("z", shape, "float32"), ModelOutput("y", shape, "float32"))
    assert from_file.module.script() == from_object.module.script()


def test_the_source_is_not_changed() -> None:
    proto = dynamic()
    before = proto.SerializeToString()
    loaded = load(proto, {"picture": (1, 3, 8, 8)})
    assert proto.SerializeToString() == before
    text = loaded.module.script()
    canonicalize(loaded.module)
    assert loaded.module.script() == text


def test_dynamic_input_gets_its_shape() -> None:
    loaded = load(dynamic(), {"picture": (2, 3, 8, 9)})
    assert loaded.inputs == (ModelInput("picture", (2, 3, 8, 9), "float32"), ModelInput("scale", (1,), "float32"))
    assert loaded.outputs[0].shape == (2, 3, 8, 9)


def test_a_shape_replaces_a_fixed_one() -> None:
    assert load(onnx_nets.conv_batch_norm_relu(), {"x": (3, 6, 11, 9)}).outputs[0].shape == (3, 8, 6, 9)


def test_missing_shape_lists_inputs_and_the_flag() -> None:
    text = message(lambda: load(dynamic()))
    assert "picture (n,3,?,w)" in text
    assert "scale (1)" in text
    assert "--shape picture=1,3,224,224" in text


def test_the_flag_in_the_advice_works() -> None:
    flag = message(lambda: load(dynamic())).rsplit("--shape ", 1)[1]
    assert load(dynamic(), parse_shapes([flag])).outputs[0].shape == (1, 3, 224, 224)


def test_unknown_name_lists_inputs() -> None:
    text = message(lambda: load(dynamic(), {"image": (1, 3, 8, 8)}))
    assert "'image'" in text
    assert "picture" in text
    assert "scale" in text


def test_wrong_rank_and_impossible_extent() -> None:
    assert "3 dimensions" in message(lambda: load(dynamic(), {"picture": (3, 8, 8)}))
    assert "below 1" in message(lambda: load(dynamic(), {"picture": (1, 3, 0, 8)}))


def test_shape_that_the_graph_refuses() -> None:
    text = message(lambda: load(onnx_nets.conv_batch_norm_relu(), {"x": (1, 5, 9, 9)}))
    assert "net" in text


@pytest.mark.parametrize("item", ["x", "=1,3", "x=1,a", "x=1,-3", "x=1,,3", "x=0"])
def test_malformed_shapes(item: str) -> None:
    text = message(lambda: parse_shapes([item]))
    assert repr(item) in text
    assert "x=1,3,320,320" in text


def test_shapes_are_parsed() -> None:
    assert parse_shapes(["x=1,3,320,320", "gpu_0/data:0=2", "a=b=4,5", "scalar="]) == {
        "x": (1, 3, 320, 320),
        "gpu_0/data:0": (2,),
        "a=b": (4, 5),
        "scalar": (),
    }
    assert parse_shapes([]) == {}
    assert "twice" in message(lambda: parse_shapes(["x=1", "x=2"]))


def test_file_that_is_not_there(tmp_path: Path) -> None:
    assert str(tmp_path / "no.onnx") in message(lambda: load(tmp_path / "no.onnx"))
    assert "no such file" in message(lambda: load(tmp_path))


@pytest.mark.parametrize(
    "content", [b"", b"hello, this is text\n" * 20, bytes(range(256)) * 4, b"\x89PNG\r\n\x1a\n" + b"0" * 99]
)
def test_file_that_is_no_model(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "picture.onnx"
    path.write_bytes(content)
    text = message(lambda: load(path))
    assert str(path) in text
    assert "not an ONNX model" in text


def test_truncated_file(tmp_path: Path) -> None:
    whole = zoo.classifier_path().read_bytes()
    path = tmp_path / "cut.onnx"
    for size in (len(whole) // 2, len(whole) - 7, 1000):
        path.write_bytes(whole[:size])
        assert str(path) in message(lambda: load(path, {"x": (1, 3, 48, 192)}))


def test_unsupported_operator_is_named() -> None:
    proto = model([node("Relu", "x", "r"), node("NotAnOperator", "r", "y", domain="their.domain")], X)
    proto.opset_import.append(helper.make_opsetid("their.domain", 1))
    text = message(lambda: load(proto))
    assert "NotAnOperator" in text


def test_input_that_is_no_tensor() -> None:
    proto = onnx_nets.two_outputs()
    sequence = helper.make_tensor_sequence_value_info("parts", TensorProto.FLOAT, (2,))
    proto.graph.input.append(sequence)
    assert "'parts'" in message(lambda: load(proto))


def test_weights_listed_as_inputs_are_no_inputs() -> None:
    proto = onnx_nets.conv_batch_norm_relu()
    for weight in proto.graph.initializer:
        proto.graph.input.append(helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims))
    assert [spec.name for spec in load(proto).inputs] == ["x"]


def test_an_input_that_nothing_reads_stays() -> None:
    proto = model([node("Relu", "b", "y")], {"a": (1, 2), "b": (2, 3), "c": (4,)})
    loaded = load(proto)
    assert [spec.name for spec in loaded.inputs] == ["a", "b", "c"]
    arrays = [np.ones(spec.shape, "float32") for spec in loaded.inputs]
    assert run_tvm(canonicalize(loaded.module), arrays)[0].shape == (2, 3)


def test_external_weights(tmp_path: Path) -> None:
    path = tmp_path / "outside.onnx"
    onnx.save(
        onnx_nets.conv_batch_norm_relu(), str(path), save_as_external_data=True, location="w.bin", size_threshold=0
    )
    assert (tmp_path / "w.bin").stat().st_size > 0
    x = np.ones((1, 6, 5, 7), "float32")
    inside = run_tvm(load(onnx_nets.conv_batch_norm_relu()).module, [x])[0]
    assert range_error(run_tvm(load(path).module, [x])[0], inside) < 1e-6
    (tmp_path / "w.bin").unlink()
    text = message(lambda: load(path))
    assert str(path) in text
    assert "w.bin" in text


def test_onnx_runtime_makes_no_difference() -> None:
    """It is no dependency, and simplifiers behave differently where it is found."""
    script = (
        "import sys; sys.modules['onnxruntime'] = None\n"
        "from layoutsearch.model import *; from tests.models import onnx_nets, zoo\n"
        "print(fingerprint(canonicalize(load(zoo.classifier_path(), {'x': (1, 3, 48, 192)}).module)))\n"
        "print(fingerprint(canonicalize(load(onnx_nets.computed_flatten(), {'x': (2, 6, 5, 7)}).module)))"
    )
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root)
    here = [
        load(zoo.classifier_path(), {"x": (1, 3, 48, 192)}),
        load(onnx_nets.computed_flatten(), {"x": (2, 6, 5, 7)}),
    ]
    assert run.stdout.split() == [fingerprint(canonicalize(loaded.module)) for loaded in here]


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    load(zoo.classifier_path(), {"x": (1, 3, 48, 192)})
    message(lambda: load(onnx_nets.conv_batch_norm_relu(), {"x": (1, 5, 9, 9)}))
    gc.collect()
    assert tuple(capfd.readouterr()) == ("", "")


def test_relax_object_and_file(tmp_path: Path) -> None:
    module = nets.residual()
    path = tmp_path / "net.json"
    path.write_text(tvm.ir.save_json(module), encoding="utf-8")
    loaded, read = load(module), load(path)
    assert loaded.module.same_as(module)
    assert (loaded.name, read.name) == ("model", "net")
    assert read.inputs == loaded.inputs == (ModelInput("x", (1, 16, 10, 14), "float32"),)
    assert loaded.outputs == (ModelOutput("output0", (1, 32, 10, 14), "float32"),)
    assert read.module.script() == module.script()


def test_relax_file_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    path.write_text('{"root_index": 1', encoding="utf-8")
    assert str(path) in message(lambda: load(path))
    path.write_text(tvm.ir.save_json(relax.const(np.ones(3, "float32"))), encoding="utf-8")
    assert "IRModule" in message(lambda: load(path))
    script = tmp_path / "net.py"
    script.write_text("raise SystemExit('this must not run')\n", encoding="utf-8")
    assert "not run" in message(lambda: load(script))


def test_relax_symbolic_extents() -> None:
    @I.ir_module
    class Symbolic:
        @R.function
        def main(x: R.Tensor(("n", 3, "h", "w"), "float32"), y: R.Tensor(("n", 3, "h", "w"), "float32")) -> R.Tensor(
            ("n", 3, "h", "w"), "float32"
        ):
            z = R.add(x, y)
            return R.nn.relu(z)

    shape = (2, 3, 4, 5)
    loaded = load(Symbolic, {"x": shape, "y": shape})
    assert [spec.shape for spec in (*loaded.inputs, *loaded.outputs)] == [shape] * 3
    text = message(lambda: load(Symbolic, {"x": shape}))
    assert "y (n,3,h,w)" in text
    assert "--shape y=" in text
    assert "'y'" in message(lambda: load(Symbolic, {"x": shape, "y": (2, 3, 4, 6)}))
    assert "'x'" in message(lambda: load(Symbolic, {"x": (2, 4, 4, 5), "y": shape}))


def test_relax_module_without_main() -> None:
    @I.ir_module
    class Other:
        @R.function
        def forward(x: R.Tensor((2, 3), "float32")) -> R.Tensor((2, 3), "float32"):
            return R.nn.relu(x)

    assert "forward" in message(lambda: load(Other))
