"""A model with its layout problem: what a search is about, before anything is measured."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx
import tvm

from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidates import OpSpace, enumerate_candidates, uniform_layouts
from layoutsearch.layout.desired import Desired
from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.layout.io_layouts import AS_THEY_ARE, KEEP_ALL, BorderRules, IoLayouts
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.narrow import narrow
from layoutsearch.layout.space import SearchSpace, builtin_space, load_space
from layoutsearch.layout.unmatched import unmatched_layouts, unmatched_rules
from layoutsearch.measure.device import DeviceIdentity
from layoutsearch.measure.operand_state import PROTOCOL
from layoutsearch.measure.records import RecordContext
from layoutsearch.measure.results import WARMUP
from layoutsearch.model.canonicalize import canonicalize
from layoutsearch.model.fingerprint import fingerprint
from layoutsearch.model.load import LoadedModel, load
from layoutsearch.plan.apply import target_json
from layoutsearch.schedule import metaschedule, pair
from layoutsearch.schedule.dispatch import LIBRARY
from layoutsearch.schedule.templates import workitems
from layoutsearch.schedule.value import TEMPLATES
from layoutsearch.search.externs import with_externs
from layoutsearch.search.handed_out import in_buffers
from layoutsearch.search.jobs import file_stamp
from layoutsearch.search.numerics import Errors, algorithm_errors, within
from layoutsearch.search.parameters import AssignmentSpace
from layoutsearch.search.skeleton import Skeleton, build_skeleton
from layoutsearch.search.whole import MAX_REL_ERROR, ModelSource
from layoutsearch.search.workloads import kernel_nodes
from layoutsearch.targets import as_target, check_textures, has_feature


@dataclass(frozen=True)
class ModelSetup:
    """A model with its layout problem for one target.

    Attributes:
        loaded: the model.
        source: where workers load it from.
        target: what code is built for.
        graph: the layout graph.
        skeleton: the layout problem without costs.
        anchors: indices of the nodes whose root is layout-sensitive.
        layouts: uniform layouts of the search space.
        fingerprint: of the canonical module.
        notes: rules of a user's that match nothing, a line each.
        errors: of operators by algorithms that are not exact, see `search.numerics`.
        pins: what pins an operator, in words, by bound variable.
        io_layouts: what the user wants of inputs and outputs.
        rules: what that means for this model.
    """

    loaded: LoadedModel
    source: ModelSource
    target: tvm.target.Target
    graph: LayoutGraph
    skeleton: Skeleton
    anchors: tuple[int, ...]
    layouts: tuple[Layout, ...]
    fingerprint: str
    notes: tuple[str, ...] = ()
    errors: Errors = field(default_factory=dict, hash=False)
    pins: Mapping[str, str] = field(default_factory=dict, hash=False)
    io_layouts: IoLayouts = AS_THEY_ARE
    rules: BorderRules = KEEP_ALL

    @cached_property
    def assignments(self) -> AssignmentSpace:
        """The choices of a search, called as the plan calls the operators."""
        # What an assignment costs depends on the border, so it is another study.
        about = " ".join(self.io_layouts.words or ())
        return AssignmentSpace.of(self.skeleton, {op.name: op.id for op in self.graph.ops}, self.pins.keys(), about)

    def context(self, device: DeviceIdentity, templates: str) -> RecordContext:
        """Context of the records that are made on a device."""
        return RecordContext(
            target=json.dumps(target_json(self.target), sort_keys=True),
            device=device.key,
            cpu=device.cpu,
            threads=device.threads,
            tvm=tvm.__version__,
            template=templates,
        )


def set_up(
    model: Any,
    folder: Path,
    shapes: Mapping[str, Sequence[int]] | None = None,
    target: Any = None,
    space: SearchSpace | str | os.PathLike[str] | None = None,
    max_rel_error: float = MAX_REL_ERROR,
    desired: Sequence[Desired] = (),
    externs: Sequence[str] = (),
    io_layouts: IoLayouts = AS_THEY_ARE,
) -> ModelSetup:
    """Load a model and build its layout problem.

    Args:
        model: path, ONNX model, Relax module or `LoadedModel`.
        folder: a model that is no file is written there, for the workers.
        shapes: of dynamic inputs.
        target: what code is built for; this CPU by default.
        space: search space; the one shipped for the target by default.
        max_rel_error: candidates whose operator alone is off by more are left out.
        desired: layouts that are wanted beside the search space.
        externs: external libraries that may compute operators, see `check_externs`.
        io_layouts: layouts of inputs and outputs.

    Raises:
        ModelError: the model cannot be read.
        SpaceError: the search-space file is wrong, or what is wanted of operators, inputs or outputs cannot be.
    """
    loaded = model if isinstance(model, LoadedModel) else load(model, shapes)
    tvm_target = as_target(target)
    canonical = canonicalize(loaded.module)
    graph = build_graph(canonical)
    border = io_layouts.rules(graph, [i.name for i in loaded.inputs], [o.name for o in loaded.outputs])
    found = candidates_of(canonical, graph, tvm_target, space, desired, max_rel_error, externs)
    spaces = found.spaces
    nodes = in_buffers(kernel_nodes(canonical, graph, spaces), graph, border)
    anchors = {op.name for op in graph.anchors}
    return ModelSetup(
        loaded=loaded,
        source=_source(model, loaded, folder),
        target=tvm_target,
        graph=graph,
        skeleton=build_skeleton(graph, nodes, border),
        anchors=tuple(i for i, node in enumerate(nodes) if node.root in anchors),
        layouts=tuple(uniform_layouts([spaces[op.name] for op in graph.anchors])),
        fingerprint=fingerprint(canonical),
        notes=found.notes,
        errors=found.errors,
        pins={name: found.pinned for name, found in spaces.items() if found.pinned},
        io_layouts=io_layouts,
        rules=border,
    )


@dataclass(frozen=True)
class ModelCandidates:
    """The candidates of a model.

    Attributes:
        rules: the search space they are of.
        spaces: by bound variable.
        errors: of operators by algorithms that are not exact.
        notes: rules that match nothing, a line each.
    """

    rules: SearchSpace
    spaces: Mapping[str, OpSpace]
    errors: Errors
    notes: tuple[str, ...]


def candidates_of(
    canonical: tvm.IRModule,
    graph: LayoutGraph,
    target: tvm.target.Target,
    space: SearchSpace | str | os.PathLike[str] | None = None,
    desired: Sequence[Desired] = (),
    max_rel_error: float = MAX_REL_ERROR,
    externs: Sequence[str] = (),
) -> ModelCandidates:
    """Candidates of every operator, see `set_up`.

    Raises:
        SpaceError: the search-space file is wrong, or what is wanted cannot be.
    """
    rules = with_externs(_space(space, target), externs)
    notes = [*(unmatched_rules(rules, graph) if space is not None else ()), *unmatched_layouts(desired, graph)]
    spaces = narrow(graph, rules, enumerate_candidates(graph, rules), desired)
    check_textures(rules.source, [c for s in spaces.values() for c in s.candidates], target)
    errors = algorithm_errors(canonical, graph, spaces)
    return ModelCandidates(rules, within(spaces, errors, max_rel_error), errors, tuple(notes))


def template_versions(target: tvm.target.Target | None = None) -> str:
    """Versions of all schedule templates and of the way kernels are timed: records made with others are not used.

    `target` is a CPU where it is None.
    """
    if target is not None and target.kind.name != "llvm":
        return f"{workitems.NAME}{TEMPLATES[workitems.NAME].version} warm{WARMUP}"
    # A trace, or a call of a library, is the same kernel whatever templates do; pairs of kernels are recorded apart.
    apart = (metaschedule.NAME, *pair.TEMPLATES, LIBRARY.template, workitems.NAME)
    own = {name: spec for name, spec in TEMPLATES.items() if name not in apart}
    versions = {name: f"{name}{spec.version}.{spec.revision}".removesuffix(".0") for name, spec in own.items()}
    return ",".join(versions[name] for name in sorted(versions)) + f" {PROTOCOL} warm{WARMUP}"


def _space(space: SearchSpace | str | os.PathLike[str] | None, target: tvm.target.Target) -> SearchSpace:
    if isinstance(space, SearchSpace):
        return space
    if space is not None:
        return load_space(Path(space))
    return builtin_space(target.kind.name, lambda feature: has_feature(target, feature))


def _source(model: Any, loaded: LoadedModel, folder: Path) -> ModelSource:
    shapes = tuple((i.name, tuple(i.shape)) for i in loaded.inputs)
    if isinstance(model, (str, os.PathLike)):
        path = str(Path(model).resolve())
        return ModelSource(path, False, file_stamp(path), shapes)
    if isinstance(model, onnx.ModelProto):
        path = str(folder / "model.onnx")
        onnx.save(model, path)
        return ModelSource(path, False, file_stamp(path), shapes)
    path = str(folder / "model.json")
    Path(path).write_text(tvm.ir.save_json(loaded.module), encoding="utf-8")
    return ModelSource(path, True, file_stamp(path), shapes)
