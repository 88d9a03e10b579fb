"""One runtime in a process of its own: loads a model, then runs blocks of calls on request.

Idle thread pools spin and steal each other's cores, so runtimes never share a process. Spoken to by pickles over
stdin and stdout: `("run", seconds)` is answered by the median seconds of a call, `("outputs",)` by the outputs for
every set of inputs.
"""

from __future__ import annotations

import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from layoutsearch.measure.placement import bind, bind_tvm, core_of_each


@dataclass(frozen=True)
class RuntimeSpec:
    """What a child process runs.

    Attributes:
        kind: `tvm` (a shared library), `onnxruntime` or `openvino` (an ONNX file).
        path: the file.
        threads: threads of the runtime.
        samples: sets of inputs, each with its arrays in the model's order; the first is the one that is timed.
    """

    kind: str
    path: str
    threads: int
    samples: tuple[tuple[np.ndarray, ...], ...]


Call = Callable[[Sequence[Any]], Sequence[np.ndarray]]
Prepare = Callable[[Sequence[np.ndarray]], Sequence[Any]]


def _tvm(spec: RuntimeSpec) -> tuple[Prepare, Call]:
    import tvm
    from tvm import relax

    bind_tvm(spec.threads)
    vm = relax.VirtualMachine(tvm.runtime.load_module(spec.path), tvm.cpu())
    main = vm["main"]

    def flat(value: Any) -> list[np.ndarray]:
        if hasattr(value, "numpy"):
            return [value.numpy()]
        return [leaf for item in value for leaf in flat(item)]

    return lambda arrays: [tvm.runtime.tensor(a) for a in arrays], lambda arrays: flat(main(*arrays))


def _onnxruntime(spec: RuntimeSpec) -> tuple[Prepare, Call]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = spec.threads
    options.inter_op_num_threads = 1
    if cores := core_of_each(spec.threads):
        # Its own threads, whose cores count from 1; the calling one is the first.
        options.add_session_config_entry("session.intra_op_thread_affinities", ";".join(str(c + 1) for c in cores[1:]))
    session = onnxruntime.InferenceSession(spec.path, options, providers=["CPUExecutionProvider"])
    if cores:
        bind({0: cores[0]})
    names = [i.name for i in session.get_inputs()]
    return lambda arrays: arrays, lambda arrays: session.run(None, dict(zip(names, arrays, strict=False)))


def _openvino(spec: RuntimeSpec) -> tuple[Prepare, Call]:
    import openvino

    config = {
        "INFERENCE_NUM_THREADS": spec.threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        # On CPUs with AMX its default is bfloat16.
        "INFERENCE_PRECISION_HINT": "f32",
    }
    request = openvino.Core().compile_model(spec.path, "CPU", config).create_infer_request()

    def call(arrays: Sequence[Any]) -> Sequence[np.ndarray]:
        return list(request.infer(list(arrays), share_inputs=True, share_outputs=True).values())

    return lambda arrays: arrays, call


RUNTIMES: dict[str, Callable[[RuntimeSpec], tuple[Prepare, Call]]] = {
    "tvm": _tvm,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}


def _block(call: Callable[[], object], seconds: float) -> float:
    """Median seconds of a call over about `seconds`, after two that wake the threads.

    A runtime of which one call takes longer than the whole block is called once.
    """

    def timed() -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    first = timed()
    if first > seconds:
        return first
    timed()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < 3 or (time.perf_counter() < end and len(samples) < 10_000):
        samples.append(timed())
    return statistics.median(samples)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the requests end."""
    spec: RuntimeSpec = pickle.load(requests)
    try:
        prepare, call = RUNTIMES[spec.kind](spec)
        timed = prepare(spec.samples[0])
        call(timed)
        answer: Any = ("ready", None)
    except Exception as error:
        answer = ("failed", f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:300]}")
    pickle.dump(answer, answers)
    answers.flush()
    while answer[0] != "failed":
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        if request[0] == "run":
            result: Any = _block(lambda: call(timed), request[1])
        else:
            # Copies: a runtime may hand out memory that its next call writes to.
            result = [[np.array(o) for o in call(prepare(sample))] for sample in spec.samples]
        pickle.dump(("ok", result), answers)
        answers.flush()


if __name__ == "__main__":
    # Whatever a library prints must not get into the answers.
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, channel)
