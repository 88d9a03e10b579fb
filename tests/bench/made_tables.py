"""Tables of small real networks with made-up times: the base by a law of a few factors, and the sum of it whole."""

from __future__ import annotations

import math

import numpy as np
import tvm

from layoutsearch.cost.base import transform_base
from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidates import enumerate_candidates
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.space import parse_space
from layoutsearch.measure.results import Measurement, Status
from layoutsearch.model.canonicalize import canonicalize
from layoutsearch.replay.table import RecordedTry, RecordedWhole, Table, TableHeader
from layoutsearch.search.skeleton import build_skeleton
from layoutsearch.search.workloads import kernel_nodes
from tests.cli.running import SPACE
from tests.cost.rows import MACHINE, true_us


def made_table(name: str, module: tvm.IRModule, seed: int, wholes: int = 12, whole_factor: float = 1.1) -> Table:
    """A full table. Kernels follow `true_us` but for 2 % noise; whole models take `whole_factor` times the sum."""
    canonical = canonicalize(module)
    graph = build_graph(canonical)
    nodes = kernel_nodes(canonical, graph, enumerate_candidates(graph, parse_space(SPACE, "test")))
    skeleton = build_skeleton(graph, nodes)
    rng = np.random.default_rng(seed)

    def timed(us: float) -> Measurement:
        return Measurement(Status.OK, (us * math.exp(0.02 * rng.standard_normal()),))

    kernels = []
    for node, _ in skeleton.workloads.values():
        for choice in node.choices:
            text = str(choice) if choice is not None else ""
            us = true_us(node.workload.facts, choice)
            kernels.append(RecordedTry(node.workload.key, text, '{"n":0}', timed(us)))
            kernels.append(RecordedTry(node.workload.key, text, '{"n":1}', timed(1.5 * us)))
    transforms = [
        RecordedTry(key.workload, key.candidate, "{}", timed(1.3 * transform_base(key, MACHINE)))
        for key in dict.fromkeys(skeleton.keys.values())
    ]
    target = {"kind": "llvm", "mcpu": "skylake-avx512"}
    device = {"key": "local", "cpu": "made up", "features": [], "cores": 2, "threads": 2}
    header = TableHeader(
        name, name, target, device, None, 2, "0.27", "t1", "2025-01-01T00:00:00Z",
        (Layout("NCHW"),), (0,),
    )  # fmt: skip
    plain = Table(header, skeleton, tuple(kernels), tuple(transforms), ())
    recorded = []
    for index in range(wholes):
        solution = tuple(int(rng.integers(len(node.choices))) for node in nodes)
        us = whole_factor * plain.additive_us(solution) * math.exp(0.01 * rng.standard_normal())
        recorded.append(RecordedWhole(0, 1, f"mix {index}", solution, (us, 1.01 * us, 0.99 * us)))
    return Table(header, skeleton, tuple(kernels), tuple(transforms), tuple(recorded))
