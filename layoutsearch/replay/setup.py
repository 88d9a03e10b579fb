"""From a model to its layout problem: what recording and replaying have in common before anything is measured."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm

from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidates import enumerate_candidates, uniform_layouts
from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.space import builtin_space, load_space
from layoutsearch.measure.device import DeviceIdentity
from layoutsearch.measure.records import RecordContext
from layoutsearch.model.canonicalize import canonicalize
from layoutsearch.model.fingerprint import fingerprint
from layoutsearch.model.load import LoadedModel, load
from layoutsearch.plan.apply import target_json
from layoutsearch.search.jobs import file_stamp
from layoutsearch.search.skeleton import Skeleton, build_skeleton
from layoutsearch.search.tune import template_versions
from layoutsearch.search.whole import ModelSource
from layoutsearch.search.workloads import kernel_nodes
from layoutsearch.targets import as_target, has_feature


@dataclass(frozen=True)
class ModelSetup:
    """A model with its layout problem for one target.

    Attributes:
        source: where workers load the model from.
        anchors: indices of the nodes whose root is layout-sensitive.
        layouts: uniform layouts of the search space.
    """

    loaded: LoadedModel
    source: ModelSource
    target: tvm.target.Target
    graph: LayoutGraph
    skeleton: Skeleton
    anchors: tuple[int, ...]
    layouts: tuple[Layout, ...]
    fingerprint: str

    def context(self, device: DeviceIdentity) -> RecordContext:
        """Context of the records that are made on a device; the one that `tune` uses."""
        return RecordContext(
            target=json.dumps(target_json(self.target), sort_keys=True),
            device=device.key,
            cpu=device.cpu,
            threads=device.threads,
            tvm=tvm.__version__,
            template=template_versions(),
        )


def set_up(
    model: str | os.PathLike[str],
    shapes: Mapping[str, Sequence[int]] | None = None,
    target: Any = None,
    space: str | os.PathLike[str] | None = None,
) -> ModelSetup:
    """Load a model file and build its layout problem.

    Raises:
        ModelError: the model cannot be read.
        SpaceError: the search-space file is wrong.
    """
    loaded, tvm_target = load(model, shapes), as_target(target)
    canonical = canonicalize(loaded.module)
    graph = build_graph(canonical)
    rules = (
        load_space(Path(space))
        if space is not None
        else builtin_space(tvm_target.kind.name, lambda feature: has_feature(tvm_target, feature))
    )
    spaces = enumerate_candidates(graph, rules)
    nodes = kernel_nodes(canonical, graph, spaces)
    anchors = {op.name for op in graph.anchors}
    path = str(Path(model).resolve())
    return ModelSetup(
        loaded=loaded,
        source=ModelSource(path, False, file_stamp(path), tuple((i.name, tuple(i.shape)) for i in loaded.inputs)),
        target=tvm_target,
        graph=graph,
        skeleton=build_skeleton(graph, nodes),
        anchors=tuple(i for i, node in enumerate(nodes) if node.root in anchors),
        layouts=tuple(uniform_layouts([spaces[op.name] for op in graph.anchors])),
        fingerprint=fingerprint(canonical),
    )
