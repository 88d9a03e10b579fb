"""A model with pairs of kernels, and what timing them may say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import tvm

from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidates import enumerate_candidates
from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.layout.space import load_space
from layoutsearch.measure.records import RecordContext, canonical_json
from layoutsearch.measure.results import Measurement, Status
from layoutsearch.model.canonicalize import canonicalize
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.schedule import Schedule
from layoutsearch.search.pairs import PairWork, pairs_of
from layoutsearch.search.workloads import KernelNode, kernel_nodes
from tests.models.plans import make_plan
from tests.models.running import native_target
from tests.plan.test_pairs import SPACE

CONTEXT = RecordContext("target", "local", "cpu", 2, "tvm", "templates")


def schedule(rows: int) -> Schedule:
    return Schedule.make("depthwise_pointwise", rows=rows, tile=4, vectors=1, dw_tile=3, dw_vectors=1)


def text(rows: int) -> str:
    return canonical_json(schedule(rows).to_json())


def took(*us: float) -> Measurement:
    return Measurement(Status.OK, us)


class Case:
    """A model with a plan in one layout."""

    def __init__(self, module: tvm.IRModule, layout: str, folder: Path) -> None:
        path = folder / "space.toml"
        path.write_text(SPACE.format(layout=layout, block=8))
        canonical = canonicalize(module)
        self.graph: LayoutGraph = build_graph(canonical)
        spaces = enumerate_candidates(self.graph, load_space(path))
        self.nodes: tuple[KernelNode, ...] = kernel_nodes(canonical, self.graph, spaces)
        plan = make_plan(module, native_target(), space=path)
        # Equal kernels of a plan have equal schedules, which are drawn here.
        first: dict[str, Schedule | None] = {}
        self.plan: LayoutPlan = replace(
            plan,
            ops=tuple(
                replace(op, schedule=first.setdefault(op.workload, op.schedule)) if op.schedule else op
                for op in plan.ops
            ),
        )

    def works(self, plan: LayoutPlan | None = None) -> list[PairWork]:
        return pairs_of(plan or self.plan, self.graph, self.nodes)


# The two kernels of a pair, one after the other.
APART_US = (took(10.0, 10.2, 9.8, 10.0), took(30.0, 30.3, 29.7, 30.0))
