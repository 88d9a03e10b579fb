"""The light models of the onnx package with weights: the same network, outputs that say something."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from layoutsearch.model.load import ModelInput
from layoutsearch.model.samples import sample_inputs
from layoutsearch.zoo import MODELS
from layoutsearch.zoo.light import LIGHT

CONVOLUTIONS = {"resnet50": 53, "shufflenet": 49, "squeezenet": 26}


@pytest.mark.parametrize("name", LIGHT)
def test_runs_and_tells_inputs_apart(name: str) -> None:
    proto = MODELS[name](0)
    ops = Counter(node.op_type for node in proto.graph.node)
    assert ops["Conv"] == CONVOLUTIONS[name]
    assert not ops["ConstantOfShape"]
    assert [[d.dim_value for d in i.type.tensor_type.shape.dim] for i in proto.graph.input] == [[1, 3, 224, 224]]
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    input_name = session.get_inputs()[0].name
    first, second = (
        session.run(None, {input_name: sample_inputs([ModelInput("x", (1, 3, 224, 224), "float32")], s)[0]})[0]
        for s in (0, 1)
    )
    assert first.size == 1000
    assert np.isfinite(first).all()
    assert 1e-4 < first.max() < 0.5
    assert np.abs(first - second).max() > 1e-3 * np.ptp(first)


def test_weights_depend_on_the_seed_alone() -> None:
    drawn = [
        {i.name: numpy_helper.to_array(i) for i in MODELS["squeezenet"](seed).graph.initializer} for seed in (0, 0, 1)
    ]
    assert all(np.array_equal(drawn[0][n], drawn[1][n]) for n in drawn[0])
    assert any(not np.array_equal(drawn[0][n], drawn[2][n]) for n in drawn[0])
