"""Run modules with plain TVM and models with ONNX Runtime, and compare what they return."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import tvm
from tvm import relax


def native_target() -> tvm.target.Target:
    """The CPU the tests run on."""
    return tvm.target.Target({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu()})


def run_tvm(module: tvm.IRModule, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Outputs of `main`, built with TVM's default pipeline."""
    machine = relax.VirtualMachine(tvm.compile(module, native_target()), tvm.cpu())
    result = machine["main"](*(tvm.runtime.tensor(array) for array in inputs))
    outputs = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    return [output.numpy() for output in outputs]


def run_onnx(proto: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs in ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(output) for output in session.run(None, inputs)]


def range_error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference over the range of the wanted values; infinite where shapes differ or a value is not finite."""
    if got.shape != want.shape or not np.all(np.isfinite(got)):
        return float("inf")
    spread = float(np.max(want) - np.min(want)) if want.size else 0.0
    return float(np.max(np.abs(got.astype("float64") - want.astype("float64")), initial=0.0)) / (spread or 1.0)
