"""Real models: what their canonical form consists of, and that it computes what ONNX Runtime computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import onnx
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import GenericConst

from layoutsearch.model import LoadedModel, canonicalize, load, op_ids, parse_shapes
from tests.models import inputs, zoo
from tests.models.running import range_error, run_onnx, run_tvm

TRANSPARENT = {
    "conv2d", "conv2d_pointwise", "conv2d_depthwise", "conv2d_grouped", "conv2d_transpose", "max_pool2d", "avg_pool2d",
    "adaptive_avg_pool2d", "resize2d", "add", "multiply", "clip", "relu", "sigmoid", "concat", "softmax", "matmul",
}  # fmt: skip
FROZEN = {"reshape", "permute_dims"}


def histogram(module: tvm.IRModule) -> Counter[str]:
    return Counter(name.split(":")[0] for name in op_ids(module).values())


def assert_canonical(canonical: tvm.IRModule) -> None:
    """One function, one dataflow block, every bias (1, C, 1, 1), every other constant operand a scalar; settled."""
    assert [var.name_hint for var in canonical.get_global_vars()] == ["main"]
    (block,) = canonical["main"].body.blocks
    assert isinstance(block, relax.DataflowBlock)
    for binding in block.bindings:
        call = binding.value
        if isinstance(call, relax.Call) and call.op.name in ("relax.add", "relax.multiply"):
            assert not isinstance(call.args[0], GenericConst)
            if isinstance(call.args[1], GenericConst) and len(call.ty.shape) == 4:
                shape = [int(extent) for extent in call.args[1].ty.shape]
                assert shape in ([], [1, int(call.ty.shape[1]), 1, 1])
    assert tvm_ffi.structural_equal(canonicalize(canonical), canonical)


def assert_equals_onnx_runtime(proto: onnx.ModelProto, model: LoadedModel, canonical: tvm.IRModule) -> None:
    arrays = inputs.for_model(model)
    feeds = {spec.name: array for spec, array in zip(model.inputs, arrays, strict=True)}
    for got, want in zip(run_tvm(canonical, arrays), run_onnx(proto, feeds), strict=True):
        # An output that hardly varies would hide any error.
        assert float(np.std(want)) > 1e-3
        assert range_error(got, want) < 1e-4


@pytest.mark.slow
def test_detector() -> None:
    proto = zoo.logits(onnx.load(str(zoo.detector_path())))
    model = load(proto, parse_shapes(["x=1,3,64,96"]))
    model = LoadedModel(model.module, "ppocr", model.inputs, model.outputs)
    canonical = canonicalize(model.module)
    assert_canonical(canonical)
    assert_equals_onnx_runtime(proto, model, canonical)


@pytest.mark.parametrize("size", [320, 640])
def test_detector_is_the_same_graph_at_every_size(size: int) -> None:
    model = load(zoo.detector_path(), {"x": (1, 3, size, size)})
    assert model.outputs[0].shape == (1, 1, size, size)
    canonical = canonicalize(model.module)
    assert_canonical(canonical)
    assert histogram(canonical) == {
        "conv2d": 6,
        "conv2d_pointwise": 42,
        "conv2d_depthwise": 14,
        "conv2d_transpose": 2,
        "adaptive_avg_pool2d": 10,
        "resize2d": 6,
        "add": 115,
        "multiply": 58,
        "clip": 34,
        "relu": 12,
        "concat": 1,
        "sigmoid": 1,
    }


@pytest.mark.slow
def test_classifier() -> None:
    model = load(zoo.classifier_path(), {"x": (1, 3, 48, 192)})
    canonical = canonicalize(model.module)
    assert_canonical(canonical)
    ops = histogram(canonical)
    assert set(ops) <= TRANSPARENT | FROZEN
    assert {k: v for k, v in ops.items() if k.startswith("conv2d")} == {
        "conv2d": 1,
        "conv2d_pointwise": 41,
        "conv2d_depthwise": 11,
    }
    proto = zoo.logits(onnx.load(str(zoo.classifier_path())))
    model = load(proto, {"x": (1, 3, 48, 192)})
    model = LoadedModel(model.module, "ppocr", model.inputs, model.outputs)
    assert_equals_onnx_runtime(proto, model, canonicalize(model.module))


LIGHT: Mapping[str, Mapping[str, int]] = {
    "resnet50": {
        "conv2d": 17,
        "conv2d_pointwise": 36,
        "add": 70,
        "relu": 49,
        "max_pool2d": 1,
        "adaptive_avg_pool2d": 1,
    },
    "squeezenet": {"conv2d": 9, "conv2d_pointwise": 17, "add": 26, "relu": 26, "max_pool2d": 3, "concat": 8},
    "shufflenet": {"conv2d": 1, "conv2d_grouped": 32, "conv2d_depthwise": 16, "add": 63, "relu": 33, "concat": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIGHT)
def test_light_zoo(name: str) -> None:
    proto = zoo.logits(zoo.light(name))
    model = load(proto)
    canonical = canonicalize(model.module)
    assert_canonical(canonical)
    ops = histogram(canonical)
    assert set(ops) <= TRANSPARENT | FROZEN
    assert {kind: ops[kind] for kind in LIGHT[name]} == LIGHT[name]
    assert_equals_onnx_runtime(proto, model, canonical)


@pytest.mark.parametrize("name", ["densenet121", "inception_v2"])
def test_light_zoo_structure(name: str) -> None:
    """Pre-activation batch norms stay as a product and a sum; those behind a convolution are gone."""
    canonical = canonicalize(load(zoo.light(name)).module)
    assert_canonical(canonical)
    ops = histogram(canonical)
    assert set(ops) <= TRANSPARENT | FROZEN
    assert ops["multiply"] == {"densenet121": 62, "inception_v2": 0}[name]


def test_local_response_normalization_stays_as_it_is() -> None:
    canonical = canonicalize(load(zoo.light("inception_v1")).module)
    assert histogram(canonical)["avg_pool3d"] == 2
    assert "call_tir" not in histogram(canonical)


def test_light_path_is_the_same_model() -> None:
    path = zoo.light_path("squeezenet")
    assert path.is_file()
    assert load(path).module.script() == load(zoo.light("squeezenet")).module.script()
