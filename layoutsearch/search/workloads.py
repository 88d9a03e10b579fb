"""The model as a set of kernels: what each computes, its candidates, and which of them are the same work."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm

from layoutsearch.errors import SpaceError
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.candidates import OpSpace
from layoutsearch.layout.facts import KernelFacts, kernel_facts
from layoutsearch.layout.footprint import footprint
from layoutsearch.layout.graph import LayoutGraph, OpNode
from layoutsearch.layout.groups import graph_groups
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.rules import why_illegal
from layoutsearch.materialize.extract import Extractor
from layoutsearch.materialize.library import library
from layoutsearch.materialize.writer import FunctionWriter, substitute
from layoutsearch.model.fingerprint import fingerprint


@dataclass(frozen=True)
class Workload:
    """A kernel to be tuned once, however often the model holds it.

    Attributes:
        key: hash of operators, attributes, shapes, dtypes, axis names, and of the class of the model's footprint, which
            decides where the weights are.
        summary: for people, e.g. `conv2d_pointwise+add+relu 1x64x56x56 -> 1x256x56x56`.
        module_json: the kernel alone, as TVM writes a module.
        axes: axis names of its parameters.
        cold: positions of the parameters that are weights.
        members: number of operators in it.
        facts: the same for bounds and cost models.
    """

    key: str
    summary: str
    module_json: str
    axes: tuple[tuple[str, str], ...]
    cold: tuple[int, ...]
    members: int
    facts: KernelFacts


@dataclass(frozen=True)
class KernelNode:
    """One kernel of the model: a node of the search.

    Attributes:
        members: bound variables, root first in program order.
        workload: what it computes.
        choices: candidates of the root; the other members run in the root's result layout. A single None for a frozen
            kernel.
    """

    members: tuple[str, ...]
    workload: Workload
    choices: tuple[Candidate | None, ...]

    @property
    def root(self) -> str:
        """The operator that the kernel is about."""
        return self.members[0]

    def assignment(self, choice: Candidate | None) -> dict[str, Candidate]:
        """Candidate of every member under `choice`."""
        if choice is None:
            return {}
        return {name: choice if i == 0 else choice.follower for i, name in enumerate(self.members)}


def kernel_nodes(canonical: tvm.IRModule, graph: LayoutGraph, spaces: Mapping[str, OpSpace]) -> tuple[KernelNode, ...]:
    """The kernels of a canonical module, in program order of their roots.

    A kernel whose members have no layout in common is taken apart.
    """
    extractor, size = Extractor(canonical), footprint(graph)
    workloads: dict[str, Workload] = {}
    nodes = []
    for group in graph_groups(graph):
        ops = [graph.by_name[n] for n in group]
        choices = choices_of(ops, spaces)
        parts = [group] if choices else [(n,) for n in group]
        for part in parts:
            members = [graph.by_name[n] for n in part]
            workload = _workload(extractor, members, size)
            workload = workloads.setdefault(workload.key, workload)
            found = choices if len(parts) == 1 else choices_of(members, spaces)
            nodes.append(KernelNode(part, workload, _computed(found, members, workload)))
    return tuple(nodes)


def choices_of(ops: Sequence[OpNode], spaces: Mapping[str, OpSpace]) -> tuple[Candidate | None, ...]:
    """Candidates of a kernel of `ops`, root first; empty if its members have no layout in common."""
    root, rest = ops[0], ops[1:]
    if root.role is Role.FROZEN:
        return (None,) if not rest or all(op.role is Role.FROZEN for op in rest) else ()
    found: list[Candidate | None] = []
    for candidate in spaces[root.name].candidates:
        follower = candidate.follower
        allowed = all(
            op.role is not Role.FROZEN and spaces[op.name].allows(follower) and why_illegal(op, follower) is None
            for op in rest
        )
        if allowed:
            found.append(candidate)
    if not found:
        _check_scopes(root, rest, spaces)
    return tuple(found)


def _check_scopes(root: OpNode, rest: Sequence[OpNode], spaces: Mapping[str, OpSpace]) -> None:
    """Operators that have a layout in common become one kernel, whose result is in one memory scope.

    Raises:
        SpaceError: rules give them different ones.
    """
    for candidate in spaces[root.name].candidates:
        follower = candidate.follower
        if not all(_follows(op, follower, spaces) for op in rest):
            continue
        for op in rest:
            reason = why_illegal(op, follower)
            if not spaces[op.name].allows(follower):
                reason = f"its rule {spaces[op.name].rule!r} has scope {', '.join(spaces[op.name].scopes)}"
            if reason is not None:
                raise SpaceError(
                    f"rule {spaces[root.name].rule!r} puts {root.id} into {candidate.scope}, where {op.id}, which is "
                    f"fused into its kernel, cannot be: {reason}; give both one scope"
                )


def _follows(op: OpNode, follower: Candidate, spaces: Mapping[str, OpSpace]) -> bool:
    """Whether `op` can be fused behind another as far as layouts go."""
    if op.role is Role.FROZEN or why_illegal(op, follower.in_buffers) is not None:
        return False
    return spaces[op.name].allows(follower, in_any_scope=True)


def _computed(
    choices: tuple[Candidate | None, ...], ops: list[OpNode], workload: Workload
) -> tuple[Candidate | None, ...]:
    """The choices without those whose external library does not compute what is fused with the operator.

    Raises:
        SpaceError: that leaves none.
    """
    if not any(c is not None and c.extern for c in choices):
        return choices
    function = tvm.ir.load_json(workload.module_json)["main"]
    reasons = {c: library(c.extern).why_not_kernel(function, c) for c in choices if c is not None and c.extern}
    kept = tuple(c for c in choices if c is None or reasons.get(c) is None)
    if not kept:
        choice, reason = next(iter(reasons.items()))
        raise SpaceError(f"{ops[0].id} has no candidate: {choice}: {reason}; give it a layout without a library too")
    return kept


def _workload(extractor: Extractor, ops: list[OpNode], size: int) -> Workload:
    module, read = extractor.extract([op.name for op in ops])
    axes = _parameter_axes(module, ops)
    cold = tuple(i for i, p in enumerate(module["main"].params) if p.name not in read)
    text = fingerprint(_without_scalars(module)) + repr((axes, cold, size))
    key = hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]
    return Workload(key, _summary(ops), tvm.ir.save_json(module), axes, cold, len(ops), kernel_facts(ops, size))


def _without_scalars(module: tvm.IRModule) -> tvm.IRModule:
    """The module with every scalar constant set to one: values do not change what a kernel costs."""
    main, writer = module["main"], FunctionWriter()
    env: dict[tvm.relax.Var, tvm.relax.Expr] = {}

    def masked(expr: tvm.relax.Expr) -> tvm.relax.Expr:
        if isinstance(expr, tvm.ir.GenericConst) and isinstance(expr.ty, tvm.relax.TensorType) and expr.ty.ndim == 0:
            return tvm.relax.const(1, str(expr.ty.dtype))
        return env.get(expr, expr) if isinstance(expr, tvm.relax.Var) else expr

    for block in main.body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, tvm.relax.Call):
                value = tvm.relax.Call(value.op, [masked(a) for a in value.args], value.attrs, value.ty_args)
            output = not isinstance(binding.var, tvm.relax.DataflowVar)
            env[binding.var] = writer.bind(binding.var.name, substitute(value, env), output=output)
        writer.end_block(dataflow=True)
    rest = {g: f for g, f in module.functions_items() if g.name_hint != "main"}
    return tvm.IRModule(
        {**rest, tvm.ir.GlobalVar("main"): writer.function(main.params, substitute(main.body.body, env))}
    )


def _parameter_axes(module: tvm.IRModule, ops: list[OpNode]) -> tuple[tuple[str, str], ...]:
    """Axis names of four-dimensional parameters, as the operator that reads each first sees them."""
    seen: dict[str, str] = {}
    main = module["main"]
    params = {p.name: p for p in main.params}
    bindings = [b for block in main.body.blocks for b in block.bindings if b.var.name.startswith("t")]
    for binding, op in zip(bindings, ops, strict=False):
        operands = iter(op.operands)
        for arg in _flatten(binding.value.args):
            if not isinstance(arg.ty, tvm.relax.TensorType):
                continue
            operand = next(operands)
            name = getattr(arg, "name", "")
            if name in params and len(operand.info.axes) == 4:
                seen.setdefault(name, operand.info.axes)
    return tuple(sorted(seen.items()))


def _flatten(args: object) -> list[tvm.relax.Expr]:
    found = []
    for arg in args:  # type: ignore[attr-defined]
        found += _flatten(arg.fields) if isinstance(arg, tvm.relax.Tuple) else [arg]
    return found


def _summary(ops: list[OpNode]) -> str:
    words = "+".join([ops[0].kind, *(op.op.rsplit(".", 1)[-1] for op in ops[1:])])
    shape = "x".join(map(str, ops[0].operands[0].info.shape or ())) if ops[0].operands else ""
    out = "x".join(map(str, ops[-1].result.shape or ())) if ops[-1].results else ""
    kernel = ""
    if len(ops[0].operands) > 1 and ops[0].kind.startswith("conv"):
        kernel = " k" + "x".join(map(str, ops[0].operands[1].info.shape or ()))
    return f"{words} {shape}{kernel} -> {out}"
