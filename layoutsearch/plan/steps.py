"""What each kernel of a plan's sequence holds: operators and facts, or a layout transform."""

from __future__ import annotations

from dataclasses import dataclass

from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.facts import KernelFacts, kernel_facts
from layoutsearch.layout.footprint import footprint
from layoutsearch.layout.transform import TransformKey
from layoutsearch.plan.apply import Applied, tensor_id
from layoutsearch.plan.sequence import sequence_steps


@dataclass(frozen=True)
class PlanStep:
    """One call of a kernel.

    Attributes:
        function: name of the kernel.
        ops: ids of the operators in it, root first; empty for a layout transform and for what belongs to no operator.
        choice: candidate of the root; None for a frozen operator.
        facts: what the operators compute; None where there are none.
        tensor: what a layout transform moves, as plans name it; empty for other kernels.
        transform: how it moves it.
    """

    function: str
    ops: tuple[str, ...] = ()
    choice: Candidate | None = None
    facts: KernelFacts | None = None
    tensor: str = ""
    transform: TransformKey | None = None


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
    found = []
    for step in steps:
        calls = groups.get(step.function, ())
        names = calls[step.call] if step.call < len(calls) else ()
        if names and all(name in graph.by_name for name in names):
            ops = [graph.by_name[name] for name in names]
            choice = applied.assignment.get(names[0])
            found.append(PlanStep(step.function, tuple(op.id for op in ops), choice, kernel_facts(ops, size)))
        elif names and names[0] in moves:
            move = moves[names[0]]
            key = TransformKey.of(graph.tensors[move.tensor], move.source, move.target)
            found.append(PlanStep(step.function, tensor=tensor_id(move.tensor, ids), transform=key))
        else:
            found.append(PlanStep(step.function))
    return tuple(found)
