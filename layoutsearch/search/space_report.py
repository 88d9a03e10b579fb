"""What a search space makes of a model: for each operator its rule, its candidates, and why others are out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.desired import Desired
from layoutsearch.layout.graph import LayoutGraph, OpNode, declared_choices
from layoutsearch.layout.groups import graph_groups
from layoutsearch.layout.io_layouts import AS_THEY_ARE, IoLayouts
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.outside import outside
from layoutsearch.layout.space import Rule
from layoutsearch.model.canonicalize import canonicalize
from layoutsearch.model.load import load
from layoutsearch.plan.apply import target_json
from layoutsearch.search.border_report import BorderReport, border_reports
from layoutsearch.search.externs import check_externs
from layoutsearch.search.setup import ModelCandidates, candidates_of
from layoutsearch.search.workloads import choices_of
from layoutsearch.targets import as_target


@dataclass(frozen=True)
class OpReport:
    """One operator.

    Attributes:
        op: the operator.
        rule: that decides; empty where there is nothing to choose.
        pinned: what pins it, in words; empty where it is free.
        candidates: what a search chooses from.
        out: what else the space knows for operators like it, each with the reason why it is out.
        follows: id of the operator whose kernel it is part of, and whose out layout it has; empty where it has its own.
    """

    op: OpNode
    rule: str
    pinned: str
    candidates: tuple[str, ...]
    out: Mapping[str, str]
    follows: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "id": self.op.id,
            "name": self.op.name,
            "op": self.op.op.removeprefix("relax."),
            "kind": self.op.kind,
            "role": self.op.role.value,
            "why_frozen": self.op.why_frozen or None,
            "rule": self.rule or None,
            "pinned": self.pinned or None,
            "follows": self.follows or None,
            "candidates": list(self.candidates),
            "out": [{"candidate": text, "why": reason} for text, reason in self.out.items()],
        }


@dataclass(frozen=True)
class SpaceReport:
    """All operators in program order, the file that the rules are in, rules that match nothing, a line each, and the
    model's inputs and outputs with the layouts that they may have."""

    source: str
    target: Mapping[str, Any]
    desired: tuple[str, ...]
    ops: tuple[OpReport, ...]
    notes: tuple[str, ...]
    border: tuple[BorderReport, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The object that `space show --json` prints."""
        return {
            "space": self.source,
            "target": dict(self.target),
            "desired_layouts": list(self.desired),
            "ops": [op.to_json() for op in self.ops],
            "border": [one.to_json() for one in self.border],
            "notes": list(self.notes),
        }


def space_report(
    model: Any,
    shapes: Mapping[str, Sequence[int]] | None = None,
    target: Any = None,
    space: str | None = None,
    desired: Sequence[Desired] = (),
    externs: Sequence[str] = (),
    io_layouts: IoLayouts = AS_THEY_ARE,
) -> SpaceReport:
    """What a search of `model` would choose from; no device is needed.

    Raises:
        LayoutSearchError: the model cannot be read, a rule is wrong, or what is wanted cannot be.
    """
    check_externs(externs)
    loaded = load(model, shapes)
    canonical, tvm_target = canonicalize(loaded.module), as_target(target)
    graph = build_graph(canonical)
    names = [i.name for i in loaded.inputs], [o.name for o in loaded.outputs]
    border = io_layouts.rules(graph, *names)
    found = candidates_of(canonical, graph, tvm_target, space, desired, externs=externs)
    reports = _reports(graph, found)
    return SpaceReport(
        found.rules.source,
        target_json(tvm_target),
        tuple(str(d) for d in desired),
        tuple(reports[op.name] for op in graph.ops),
        found.notes,
        border_reports(graph, border, *names, found.spaces),
    )


def _reports(graph: LayoutGraph, found: ModelCandidates) -> dict[str, OpReport]:
    rules = found.rules.rules_for(graph)
    reports = {}
    for group in graph_groups(graph):
        ops = [graph.by_name[name] for name in group]
        # A kernel whose members have no layout in common is taken apart.
        parts = [ops] if choices_of(ops, found.spaces) else [[op] for op in ops]
        for root, *rest in parts:
            choices = [c for c in choices_of([root, *rest], found.spaces) if c is not None]
            reports[root.name] = _root(root, rest, choices, rules[root.name], found)
            outs = tuple(dict.fromkeys(str(c.out) for c in choices))
            for op in rest:
                if op.role is Role.FROZEN:
                    reports[op.name] = OpReport(op, "", "", (), {}, root.id)
                    continue
                own = found.spaces[op.name]
                reports[op.name] = OpReport(op, own.rule, own.pinned, outs, {}, root.id)
    return reports


def _root(
    root: OpNode, rest: Sequence[OpNode], choices: Sequence[Candidate], rules: Sequence[Rule], found: ModelCandidates
) -> OpReport:
    if root.role is Role.FROZEN:
        return OpReport(root, "", "", (), {})
    own = found.spaces[root.name]
    if declared_choices(root):
        return OpReport(root, own.rule, own.pinned, tuple(map(str, choices)), {})
    out = {}
    for candidate in (c for c in own.candidates if c not in choices):
        others = [op.id for op in rest if not found.spaces[op.name].allows(candidate.follower)]
        out[str(candidate)] = f"{' and '.join(others)} in its kernel cannot be {candidate.out}"
    return OpReport(root, own.rule, own.pinned, tuple(map(str, choices)), out | outside(root, own, rules, found.rules))
