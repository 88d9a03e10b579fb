"""The layout problem of a model without its costs: which candidates make and want which layouts of which tensors.

It depends on the model and the search space alone. Costs come from a lab (measured), a model (predicted) or bounds;
`Skeleton.problem` joins the two into the exact program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.candidates import nearest
from layoutsearch.layout.graph import LayoutGraph, OpNode, TensorInfo
from layoutsearch.layout.io_layouts import KEEP_ALL, BorderRules
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.rules import operand_layouts, result_layouts
from layoutsearch.layout.transform import TransformKey
from layoutsearch.search.problem import LayoutProblem, Node, Tensor, Use
from layoutsearch.search.workloads import KernelNode, Workload

KernelCost = Callable[[Workload, Candidate | None], float]
TransformCost = Callable[[TransformKey], float]


@dataclass(frozen=True)
class SkeletonTensor:
    """A tensor between kernels.

    Attributes:
        info: name, logical shape, axes, dtype.
        layouts: those it may have; the tables below are indices into it.
        producer: index of the kernel that makes it, None for a model input whose layout is fixed.
        made: layout made by each candidate of the producer; a single entry without one.
        uses: the operands that read it.
    """

    info: TensorInfo
    layouts: tuple[Layout, ...]
    producer: int | None
    made: tuple[int, ...]
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class SkeletonInput:
    """A model input in any of several layouts, each at no cost: a node without a kernel, behind all that have one.

    Attributes:
        name: the graph's name of the input.
        layouts: those it may have: its candidates.
    """

    name: str
    layouts: tuple[Layout, ...]


@dataclass(frozen=True)
class Skeleton:
    """Kernels with their candidates, the tensors between them, and inputs that are a choice of their own.

    A solution has the candidate of every kernel, then that of every such input.
    """

    nodes: tuple[KernelNode, ...]
    tensors: tuple[SkeletonTensor, ...]
    inputs: tuple[SkeletonInput, ...] = ()

    @property
    def size(self) -> int:
        """Entries of a solution."""
        return len(self.nodes) + len(self.inputs)

    @cached_property
    def keys(self) -> Mapping[tuple[int, int, int], TransformKey]:
        """(tensor, from, to) -> the transform, for every pair that some assignment can need."""
        found = {}
        for t, tensor in enumerate(self.tensors):
            wanted = sorted({w for use in tensor.uses for w in use.wanted})
            for source in sorted(set(tensor.made)):
                for target in wanted:
                    if source != target:
                        key = TransformKey.of(tensor.info, tensor.layouts[source], tensor.layouts[target])
                        found[t, source, target] = key
        return found

    @cached_property
    def workloads(self) -> Mapping[str, tuple[KernelNode, int]]:
        """Workload key -> a node that has it, with the choices of all that have it, and how many have.

        Equal workloads differ in their choices where a rule is about one of them, or an algorithm is too far off with
        the weights of one.
        """
        found: dict[str, tuple[KernelNode, int]] = {}
        for node in self.nodes:
            first, count = found.get(node.workload.key, (node, 0))
            if node.choices != first.choices:
                first = replace(first, choices=tuple(dict.fromkeys((*first.choices, *node.choices))))
            found[node.workload.key] = (first, count + 1)
        return found

    def problem(self, kernel: KernelCost, transform: TransformCost) -> LayoutProblem:
        """The exact program under the given costs, in microseconds; `inf` for what is impossible."""
        nodes = tuple(Node(n.root, tuple(kernel(n.workload, c) for c in n.choices)) for n in self.nodes)
        nodes += tuple(Node(i.name, (0.0,) * len(i.layouts)) for i in self.inputs)
        us = {key: transform(key) for key in dict.fromkeys(self.keys.values())}
        tensors = []
        for t, tensor in enumerate(self.tensors):
            side = len(tensor.layouts)
            matrix = [[0.0 if i == j else float("inf") for j in range(side)] for i in range(side)]
            for i in range(side):
                for j in range(side):
                    if (t, i, j) in self.keys:
                        matrix[i][j] = us[self.keys[t, i, j]]
            rows = tuple(tuple(row) for row in matrix)
            tensors.append(Tensor(tensor.info.name, tensor.producer, tensor.made, tensor.uses, rows))
        return LayoutProblem(nodes, tuple(tensors))

    def choices(self, solution: Sequence[int]) -> dict[str, Candidate]:
        """A solution as an assignment of operators."""
        found: dict[str, Candidate] = {}
        for node, index in zip(self.nodes, self.of_kernels(solution), strict=True):
            found.update(node.assignment(node.choices[index]))
        return found

    def of_kernels(self, solution: Sequence[int]) -> Sequence[int]:
        """The part of a solution that is about kernels."""
        return solution[: len(self.nodes)]

    def chosen_inputs(self, solution: Sequence[int]) -> dict[str, Layout]:
        """The layouts of inputs that are a choice of their own."""
        rest = solution[len(self.nodes) :]
        return {i.name: i.layouts[index] for i, index in zip(self.inputs, rest, strict=True)}

    def transforms(self, solution: Sequence[int]) -> list[TransformKey]:
        """The transforms a solution pays for, in order of tensor and wanted layout; equal ones repeat."""
        found = []
        for t, tensor in enumerate(self.tensors):
            made = tensor.made[0 if tensor.producer is None else solution[tensor.producer]]
            wanted = {use.wanted[0 if use.node is None else solution[use.node]] for use in tensor.uses}
            found += [self.keys[t, made, w] for w in sorted(wanted - {made})]
        return found


def build_skeleton(graph: LayoutGraph, nodes: Sequence[KernelNode], rules: BorderRules = KEEP_ALL) -> Skeleton:
    """The skeleton of a model. Without nodes (nothing to choose) it is empty.

    A free output costs nothing in whatever layout it is made, a free input in the one it is read in; where several
    kernels may read it in different ones, it is a choice of its own.
    """
    if not nodes:
        return Skeleton((), ())
    owner = {name: index for index, node in enumerate(nodes) for name in node.members}
    layouts: dict[str, dict[Layout, int]] = {}
    made: dict[str, tuple[int | None, tuple[int, ...]]] = {}
    uses: dict[str, list[Use]] = {}

    def number(tensor: str, layout: Layout) -> int:
        table = layouts.setdefault(tensor, {})
        return table.setdefault(layout, len(table))

    def choice_of(op: OpNode, node: KernelNode, choice: Candidate | None) -> Candidate | None:
        return node.assignment(choice).get(op.name)

    for info in graph.inputs:
        layout = rules.fixed.of_input(info)
        if layout is not None:
            made[info.name] = (None, (number(info.name, layout),))
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
            rows = [row[position] or operand.info.initial for row in wanted]
            asked = tuple(number(tensor, lay) for lay in rows if lay is not None)
            uses.setdefault(tensor, []).append(Use(index, asked))
    for place, output in enumerate(graph.outputs):
        layout = rules.fixed.of_output(place, output)
        if output.tensor in made and layout is not None and place not in rules.free_outputs:
            uses.setdefault(output.tensor, []).append(Use(None, (number(output.tensor, layout),)))
    inputs: list[SkeletonInput] = []
    for name in (t.name for t in graph.inputs if t.name in rules.free_inputs):
        if len(set(uses.get(name, ()))) <= 1:
            uses.pop(name, None)
            continue
        made[name] = (len(nodes) + len(inputs), tuple(range(len(layouts[name]))))
        inputs.append(SkeletonInput(name, tuple(layouts[name])))
    tensors = tuple(
        SkeletonTensor(graph.tensors[name], tuple(layouts[name]), *made[name], tuple(found))
        for name, found in uses.items()
    )
    return Skeleton(tuple(nodes), tensors, tuple(inputs))


def uniform_solution(nodes: Sequence[KernelNode], problem: LayoutProblem, layout: Layout) -> tuple[int, ...] | None:
    """The uniform assignment of `layout`, among candidates of finite cost; None if a kernel has none.

    Inputs that are a choice of their own are in the layouts that cost the assignment least.
    """
    found = []
    for node, costs in zip(nodes, problem.nodes, strict=False):
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
    return _with_inputs(problem, found)


def _with_inputs(problem: LayoutProblem, kernels: Sequence[int]) -> tuple[int, ...]:
    """A solution for the kernels with the cheapest layout of every input that is a choice of its own."""
    found = list(kernels)
    for index in range(len(kernels), len(problem.nodes)):
        (tensor,) = (t for t in problem.tensors if t.producer == index)
        wanted = {use.wanted[0 if use.node is None else found[use.node]] for use in tensor.uses}
        paid = [sum(tensor.cost[made][w] for w in wanted - {made}) for made in tensor.made]
        found.append(paid.index(min(paid)))
    return tuple(found)
