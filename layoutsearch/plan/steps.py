"""What each kernel of a plan's sequence holds: operators and facts, or a layout transform."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.facts import KernelFacts, kernel_facts
from layoutsearch.layout.footprint import footprint
from layoutsearch.layout.graph import OpNode
from layoutsearch.layout.transform import TransformKey
from layoutsearch.plan.apply import Applied, tensor_id
from layoutsearch.plan.sequence import sequence_steps


@dataclass(frozen=True)
class PlanStep:
    """One call of a kernel.

    Attributes:
        function: name of the kernel.
        ops: ids of the operators in it, root first; empty for a layout transform and for what belongs to no operator.
            Of two kernels that became one, those of the first and then those of the second.
        choice: candidate of the root; None for a frozen operator.
        facts: what the operators compute; None where there are none. Of two kernels that became one, the first root's
            geometry with the operations, weights and results of both.
        tensor: what a layout transform moves, as plans name it; empty for other kernels.
        transform: how it moves it.
        second: id of the root of the second of two kernels that became one; empty for other kernels.
    """

    function: str
    ops: tuple[str, ...] = ()
    choice: Candidate | None = None
    facts: KernelFacts | None = None
    tensor: str = ""
    transform: TransformKey | None = None
    second: str = ""


def plan_steps(applied: Applied) -> tuple[PlanStep, ...] | None:
    """The kernels of an applied plan in the order in which they run; None where they are not in one sequence.

    What became memory (reshapes, concatenations) is not among them.
    """
    steps = sequence_steps(applied.module)
    if steps is None:
        return None
    graph, size = applied.graph, footprint(applied.graph)
    groups = {kernel.function: kernel.groups for kernel in applied.lowered.kernels}
    moves = {transform.name: transform for transform in applied.materialized.transforms}
    ids = {op.name: op.id for op in graph.ops}
    joins = {join.first[0]: join for join in applied.joins}
    found = []
    for step in steps:
        calls = groups.get(step.function, ())
        names = calls[step.call] if step.call < len(calls) else ()
        if names and all(name in graph.by_name for name in names):
            ops = [graph.by_name[name] for name in names]
            choice, join = applied.assignment.get(names[0]), joins.get(names[0])
            facts = kernel_facts(ops, size) if join is None else _of_both(ops, len(join.first), size)
            second = ids[join.second[0]] if join is not None else ""
            found.append(PlanStep(step.function, tuple(op.id for op in ops), choice, facts, second=second))
        elif names and names[0] in moves:
            move = moves[names[0]]
            key = TransformKey.of(graph.tensors[move.tensor], move.source, move.target)
            found.append(PlanStep(step.function, tensor=tensor_id(move.tensor, ids), transform=key))
        else:
            found.append(PlanStep(step.function))
    return tuple(found)


def _of_both(ops: Sequence[OpNode], count: int, size: int) -> KernelFacts:
    """Facts of two kernels that became one; the first has `count` of the operators."""
    parts = [kernel_facts(part, size) for part in (ops[:count], ops[count:])]
    # The second root is no epilogue, and its operations are counted with the others.
    return replace(kernel_facts(ops, size), epilogue=(*parts[0].epilogue, *parts[1].epilogue))
