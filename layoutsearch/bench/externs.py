"""What it is worth that layouts pass through external functions: convolutions of oneDNN with TVM's operators between.

One model, conv - max_pool2d - conv - global average pool - dense, whose convolutions are external functions:

* `blocked`: both declared NCHW16c, which the pool between them takes over: two transforms at the ends;
* `plain`: NCHW at their borders, oneDNN's own kernels for it;
* `around`: NCHW16c within the functions alone, transforms around each.

And `tvm`: the same model by TVM's untouched operators, what outputs are compared with.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tvm
from tvm import relax

from layoutsearch.bench.compare import BenchResult, run_comparison
from layoutsearch.bench.runtimes import RuntimeSpec
from layoutsearch.contrib.onednn.codegen import declaration, partition
from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.candidates import enumerate_candidates, nearest
from layoutsearch.layout.declare import declare_layouts
from layoutsearch.layout.graph import OpNode, declared_choices
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.space import builtin_space
from layoutsearch.materialize.convert import materialize
from layoutsearch.materialize.library import link_input
from layoutsearch.materialize.lower import lower
from layoutsearch.model.canonicalize import canonicalize
from layoutsearch.plan.apply import schedule_kernels
from layoutsearch.plan.compile import build_executable
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.targets import default_threads, has_feature, local_target
from layoutsearch.toolchain import export

_BLOCKED, _PLAIN = Layout("NCHW16c"), Layout("NCHW")
_SHAPE = (1, 64, 56, 56)


@dataclass(frozen=True)
class ExternBench:
    """Times, and the transforms that each variant has."""

    result: BenchResult
    transforms: dict[str, int]


def bench_externs(
    *,
    threads: int | None = None,
    starts: int = 3,
    rounds: int = 8,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> ExternBench:
    """Build and time the variants in interleaved blocks, each in a process of its own.

    Raises:
        ToolchainError: oneDNN is not installed.
    """
    count, target = threads or default_threads(), local_target()
    x = np.random.default_rng(0).standard_normal(_SHAPE).astype("float32")
    transforms: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="layoutsearch-") as folder:
        specs = {}
        for name, externs, rest in (
            ("blocked", _BLOCKED, _BLOCKED),
            ("plain", _PLAIN, _PLAIN),
            ("around", _BLOCKED, _PLAIN),
        ):
            tell(f"building {name}")
            path = f"{folder}/{name}.so"
            transforms[name] = _build(_model(), externs, rest, target, count, path)
            specs[name] = RuntimeSpec("tvm", path, count, ((x,),))
        tell("building tvm")
        stock = Path(folder, "tvm.so")
        export(tvm.compile(_model(), target), stock, target)
        specs["tvm"] = RuntimeSpec("tvm", str(stock), count, ((x,),))
        return ExternBench(run_comparison(specs, starts=starts, rounds=rounds, seed=seed, tell=tell), transforms)


def _model() -> tvm.IRModule:
    rng, op = np.random.default_rng(0), relax.op

    def const(*shape: int) -> relax.Expr:
        return relax.const((rng.standard_normal(shape) * 0.05).astype("float32"))

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(_SHAPE, "float32"))

    def conv(y: relax.Expr, inputs: int, outputs: int) -> relax.Expr:
        y = builder.emit(op.nn.conv2d(y, const(outputs, inputs, 3, 3), padding=1))
        return builder.emit(op.nn.relu(builder.emit(op.add(y, const(1, outputs, 1, 1)))))

    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(op.nn.max_pool2d(conv(x, 64, 128), pool_size=3, strides=2, padding=1))
            y = builder.emit(op.nn.adaptive_avg_pool2d(conv(y, 128, 256), (1, 1)))
            out = builder.emit_output(op.matmul(builder.emit(op.reshape(y, (1, 256))), const(256, 1000)))
        builder.emit_func_output(out)
    return builder.get()


def _build(
    module: tvm.IRModule, externs: Layout, rest: Layout, target: tvm.target.Target, threads: int, path: str
) -> int:
    """Write the library; returns the number of transforms."""
    canonical = canonicalize(declare_layouts(partition(module), declaration))
    graph = build_graph(canonical)
    spaces = enumerate_candidates(graph, builtin_space("llvm", lambda feature: has_feature(target, feature)))

    def choice(node: OpNode) -> Candidate:
        wanted = externs if declared_choices(node) else rest
        return nearest(spaces[node.name].candidates, wanted)

    assignment = {node.name: choice(node) for node in graph.ops if node.name in spaces}
    converted = materialize(canonical, graph, assignment)
    scheduled, _ = schedule_kernels(lower(converted.module, target), {}, TargetInfo.from_target(target, threads))
    export(build_executable(scheduled, target), path, target, link_input(scheduled, target))
    return len(converted.transforms)
