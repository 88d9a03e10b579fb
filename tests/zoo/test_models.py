"""The project's own models: the architecture to the last weight, valid ONNX, activations of sane scale."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from layoutsearch.model.load import ModelInput
from layoutsearch.model.samples import sample_inputs
from layoutsearch.zoo import MODELS
from layoutsearch.zoo.__main__ import main
from layoutsearch.zoo.network import Network

# Weights and operators of the published architectures; batch normalization has four numbers a channel.
COUNTS = {
    "mobilenet_v2": (3_504_872 + 2 * 17_056, {"Conv": 52, "BatchNormalization": 52, "Clip": 35, "Add": 10, "Gemm": 1}),
    "vgg16": (138_357_544, {"Conv": 13, "Relu": 15, "MaxPool": 5, "Gemm": 3}),
    "unet": (None, {"Conv": 19, "ConvTranspose": 4, "Concat": 4, "MaxPool": 4, "Sigmoid": 1}),
}
SMALL = [name for name in COUNTS if name != "vgg16"]


def weights(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {init.name: numpy_helper.to_array(init) for init in proto.graph.initializer}


@pytest.mark.parametrize("name", COUNTS)
def test_architecture(name: str) -> None:
    proto = MODELS[name](0)
    count, ops = COUNTS[name]
    found = Counter(node.op_type for node in proto.graph.node)
    assert {op: found[op] for op in ops} == ops
    if count is not None:
        assert sum(value.size for value in weights(proto).values() if value.ndim) == count
    assert all(opset.version >= 13 for opset in proto.opset_import)
    output = proto.graph.output[0].type.tensor_type.shape.dim
    assert [d.dim_value for d in output] == ([1, 1, 256, 256] if name == "unet" else [1, 1000])


@pytest.mark.parametrize("name", SMALL)
def test_activations_neither_vanish_nor_explode(name: str) -> None:
    proto = MODELS[name](1)
    shape = tuple(d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim)
    inner = [n.output[0] for n in proto.graph.node if n.op_type in ("Conv", "ConvTranspose", "Add", "Gemm")]
    for value in inner:
        proto.graph.output.append(onnx.helper.make_tensor_value_info(value, onnx.TensorProto.FLOAT, None))
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (sample,) = sample_inputs([ModelInput("input", shape, "float32")], 0)
    for value, array in zip(inner, session.run(inner, {"input": sample}), strict=True):
        assert 0.05 < float(array.std()) < 20, value
    (output,) = session.run(["output"], {"input": sample})
    assert np.isfinite(output).all()
    assert float(output.std()) > 0.01


def test_weights_depend_on_the_seed_alone() -> None:
    first, again, other = (weights(MODELS["unet"](seed)) for seed in (0, 0, 1))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert any(not np.array_equal(first[name], other[name]) for name in first)


def test_names_do_not_clash() -> None:
    """relu and relu6 count apart: result 60 of one is not result 0 of the other."""
    net = Network("clash", (1, 4, 8, 8), 0)
    value = net.input
    for _ in range(61):
        value = net.relu(value)
    proto = net.model(net.relu6(value))
    assert len({node.output[0] for node in proto.graph.node}) == len(proto.graph.node)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mobilenet_v2", "--out", str(tmp_path / "new")]) == 0
    path = Path(capsys.readouterr().out.strip())
    onnx.checker.check_model(onnx.load(str(path)))
    (tmp_path / "file").write_text("")
    assert main(["mobilenet_v2", "--out", str(tmp_path / "file")]) == 2
    assert "error: cannot write" in capsys.readouterr().err
