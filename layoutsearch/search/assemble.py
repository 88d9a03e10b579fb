"""From measured costs to the exact program, and from its answer back to an assignment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.candidates import nearest
from layoutsearch.layout.graph import LayoutGraph, OpNode
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.rules import operand_layouts, result_layouts
from layoutsearch.search.kernels import KernelLab, TransformKey
from layoutsearch.search.problem import LayoutProblem, Node, Tensor, Use
from layoutsearch.search.workloads import KernelNode

# A transform is at least one kernel call; bytes per microsecond before anything was measured: 100 GB/s.
_CALL_US = 0.5
_FASTEST_BYTES_US = 100e3


@dataclass(frozen=True)
class Program:
    """The exact program of a model under the present costs.

    Attributes:
        problem: nodes are kernels, in the order of `nodes`.
        keys: (tensor index, from index, to index) -> the transform it stands for.
    """

    nodes: tuple[KernelNode, ...]
    problem: LayoutProblem
    keys: Mapping[tuple[int, int, int], TransformKey]

    def choices(self, solution: Sequence[int]) -> dict[str, Candidate]:
        """A solution as an assignment of operators."""
        found: dict[str, Candidate] = {}
        for node, index in zip(self.nodes, solution, strict=True):
            found.update(node.assignment(node.choices[index]))
        return found

    def transforms(self, solution: Sequence[int]) -> list[TransformKey]:
        """The transforms a solution pays for."""
        return [self.keys[t.tensor, t.source, t.wanted] for t in self.problem.evaluate(solution).transforms]


class TransformCosts:
    """Times of transforms: measured, or optimistic from the fastest one measured."""

    def __init__(self, lab: KernelLab) -> None:
        self._lab = lab
        self._fastest = _FASTEST_BYTES_US

    def us(self, key: TransformKey, size: int) -> float:
        """Microseconds; infinite where the transform cannot be built."""
        known = self._lab.transform(key)
        if known.tries:
            return known.best_us
        if known.closed:
            return float("inf")
        return _CALL_US + 2 * size / self._fastest


def build_program(graph: LayoutGraph, nodes: Sequence[KernelNode], lab: KernelLab) -> Program:
    """Kernels with their measured times (unmeasured ones are impossible), tensors with their transforms.

    Without nodes (nothing to choose) the program is empty.
    """
    if not nodes:
        return Program((), LayoutProblem((), ()), {})
    owner = {name: index for index, node in enumerate(nodes) for name in node.members}
    by_tensor: dict[str, list[Use]] = {}
    layouts: dict[str, dict[Layout, int]] = {}
    made: dict[str, tuple[int | None, tuple[int, ...]]] = {}

    def number(tensor: str, layout: Layout) -> int:
        table = layouts.setdefault(tensor, {})
        return table.setdefault(layout, len(table))

    def choice_of(op: OpNode, node: KernelNode, choice: Candidate | None) -> Candidate | None:
        return node.assignment(choice).get(op.name)

    for info in graph.inputs:
        if info.initial is not None:
            made[info.name] = (None, (number(info.name, info.initial),))
    for op in graph.ops:
        index = owner[op.name]
        node = nodes[index]
        per_choice = [result_layouts(op, choice_of(op, node, c)) for c in node.choices]
        for position, info in enumerate(op.results):
            if info.initial is not None:
                table = [row[position] or info.initial for row in per_choice]
                made[info.name] = (index, tuple(number(info.name, lay) for lay in table))
    for op in graph.ops:
        index = owner[op.name]
        node = nodes[index]
        inside = {t.name for name in node.members for t in graph.by_name[name].results}
        wanted = [operand_layouts(op, choice_of(op, node, c)) for c in node.choices]
        for position, operand in enumerate(op.operands):
            tensor = operand.tensor
            if tensor is None or tensor in inside or tensor not in made:
                continue
            initial = operand.info.initial
            rows = [row[position] or initial for row in wanted]
            asked = tuple(number(tensor, lay) for lay in rows if lay is not None)
            by_tensor.setdefault(tensor, []).append(Use(index, asked))
    for output in graph.outputs:
        if output.tensor in made and output.info.initial is not None:
            use = Use(None, (number(output.tensor, output.info.initial),))
            by_tensor.setdefault(output.tensor, []).append(use)

    costs = TransformCosts(lab)
    tensors: list[Tensor] = []
    keys: dict[tuple[int, int, int], TransformKey] = {}
    for tensor, uses in by_tensor.items():
        info = graph.tensors[tensor]
        table = list(layouts[tensor])
        producer, made_by = made[tensor]
        matrix = []
        for i, source in enumerate(table):
            row = []
            for j, target in enumerate(table):
                if i == j:
                    row.append(0.0)
                    continue
                key = TransformKey.of(info, source, target)
                keys[len(tensors), i, j] = key
                row.append(costs.us(key, info.bytes) if i in set(made_by) else float("inf"))
            matrix.append(tuple(row))
        tensors.append(Tensor(tensor, producer, made_by, tuple(uses), tuple(matrix)))
    program_nodes = tuple(
        Node(node.root, tuple(lab.of(node.workload, c).best_us for c in node.choices)) for node in nodes
    )
    return Program(tuple(nodes), LayoutProblem(program_nodes, tuple(tensors)), keys)


def uniform_solution(nodes: Sequence[KernelNode], problem: LayoutProblem, layout: Layout) -> tuple[int, ...] | None:
    """The uniform assignment of `layout`, among measured candidates; None if a kernel has none."""
    found = []
    for node, costs in zip(nodes, problem.nodes, strict=True):
        usable = [(i, c) for i, c in enumerate(node.choices) if costs.costs[i] < float("inf")]
        if not usable:
            return None
        free = [c for _, c in usable if c is not None]
        if not free:
            found.append(usable[0][0])
            continue
        chosen = nearest(free, layout)
        # Candidates that differ in the kernel's layout only are equally uniform: the faster one stands for them.
        same = [i for i, c in usable if c is not None and (c.data, c.out) == (chosen.data, chosen.out)]
        found.append(min(same, key=lambda i: costs.costs[i]))
    return tuple(found)
