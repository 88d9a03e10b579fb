"""Real models: PP-OCR from the demo's wheel, and the `onnx` package's light zoo with random weights put in.

Files are kept under `models/` at the top of the repository, which git ignores.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import onnx

from layoutsearch.demo import CLASSIFIER, DETECTOR, fetch_demo_model
from layoutsearch.zoo.light import light, randomize

__all__ = ["classifier_path", "detector_path", "light", "light_path", "logits", "randomize"]

MODELS = Path(__file__).resolve().parents[2] / "models"
SATURATING = ("Softmax", "Sigmoid", "LogSoftmax")


@cache
def detector_path() -> Path:
    """PP-OCRv4 text detector; input `x` of (?, 3, ?, ?), height and width multiples of 32."""
    return fetch_demo_model(MODELS, DETECTOR)


@cache
def classifier_path() -> Path:
    """PP-OCR angle classifier; input `x` of (?, 3, 48, 192)."""
    return fetch_demo_model(MODELS, CLASSIFIER)


def light_path(name: str, seed: int = 0) -> Path:
    """`light` as a file."""
    path = MODELS / "light" / f"{name}-{seed}.onnx"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        onnx.save(light(name, seed), str(part))
        os.replace(part, path)
    return path


def logits(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy that ends before its last softmax or sigmoid, where differences are not squeezed to nothing."""
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    graph = proto.graph
    producers = {name: node for node in graph.node for name in node.output}
    for output in graph.output:
        node = producers[output.name]
        while node.op_type in ("Identity", "Reshape"):
            node = producers[node.input[0]]
        if node.op_type in SATURATING:
            output.name = node.input[0]
            output.type.tensor_type.ClearField("shape")
    used: set[str] = {output.name for output in graph.output}
    for node in reversed(list(graph.node)):
        if used & set(node.output):
            used |= set(node.input)
        else:
            graph.node.remove(node)
    return proto
