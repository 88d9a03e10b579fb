"""The kernel calls that an assignment implies: which operators in each, what they read and make, in which layouts.

Layouts and shapes come from the plan's choices by `layout.rules`. Only which operators share a kernel, and the order of
a kernel's parameters, is taken from the converted module, whose operators have been verified one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import relax

from layoutsearch.layout import kinds
from layoutsearch.layout.border import Border
from layoutsearch.layout.candidate import DIRECT, Candidate
from layoutsearch.layout.graph import LayoutGraph, OpNode, axis_names
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.rules import made_layouts, operand_layouts, result_layouts
from layoutsearch.materialize.axes import Letters
from layoutsearch.materialize.fuse import Kernel
from layoutsearch.materialize.resolve import Materialized
from layoutsearch.materialize.verify import calls_by_name, planned_shape
from layoutsearch.plan.pairs import Join


@dataclass(frozen=True)
class Value:
    """A tensor as a kernel reads or makes it.

    Attributes:
        tensor: the graph's name; empty for a constant.
        layout: how it is stored; None for scalars and what the graph does not know.
        shape: in memory; None where it is not static.
    """

    tensor: str
    layout: Layout | None = None
    shape: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{self.tensor or 'a constant'} in {self.layout}" if self.layout else self.tensor or "a constant"


@dataclass(frozen=True)
class ExpectedCall:
    """One call of a kernel.

    Attributes:
        name: what it is, for people: the id of its root, or a transform.
        ops: its operators, by bound variable, root first; empty for a transform.
        reads: operands in order.
        makes: results in order.
        function: name of the kernel; empty where only its place in the program is known.
        position: in the program.
        checked: whether the operators are known; else only the calls are counted.
        axes: letters of the dimensions of each operand and result, see `materialize.axes`; None where a kernel is not
            looked into: an operator without layouts, an algorithm that walks tiles, a library.
    """

    name: str
    ops: tuple[str, ...]
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]
    function: str = ""
    position: int = 0
    checked: bool = True
    axes: tuple[Letters | None, ...] | None = None

    @property
    def is_transform(self) -> bool:
        """Whether it only changes the layout of a tensor."""
        return not self.ops and self.checked


@dataclass(frozen=True)
class Expectation:
    """What a lowered module has to do.

    Attributes:
        inputs: of `main`.
        calls: of kernels, in program order.
        outputs: of `main`.
        makers: id of the operator behind each tensor, for messages.
        readers: ids of those that read it.
    """

    inputs: tuple[Value, ...]
    calls: tuple[ExpectedCall, ...]
    outputs: tuple[Value, ...]
    makers: Mapping[str, str]
    readers: Mapping[str, tuple[str, ...]]


def expect(
    materialized: Materialized,
    kernels: Sequence[Kernel],
    graph: LayoutGraph,
    assignment: Mapping[str, Candidate],
    border: Border,
) -> Expectation:
    """The calls of an assignment whose converted module was fused into `kernels`."""
    return _Expecting(materialized, graph, assignment, border).run(kernels)


def joined(expectation: Expectation, joins: Sequence[Join]) -> Expectation:
    """The same where two kernels are one: it reads what both read, but for the tensor between them."""
    calls = {call.ops[0]: call for call in expectation.calls if call.ops}
    for join in joins:
        first, second = calls.pop(join.first[0]), calls.pop(join.second[0])
        rest = (value for i, value in enumerate(second.reads) if i != join.reads)
        calls[join.first[0]] = ExpectedCall(
            f"{first.name} with {second.name}",
            (*first.ops, *second.ops),
            (*first.reads, *rest),
            second.makes,
            join.function,
            second.position,
        )
    found = [*calls.values(), *(call for call in expectation.calls if not call.ops)]
    return replace(expectation, calls=tuple(sorted(found, key=lambda call: call.position)))


class _Expecting:
    def __init__(
        self, materialized: Materialized, graph: LayoutGraph, assignment: Mapping[str, Candidate], border: Border
    ) -> None:
        self._graph, self._assignment, self._border = graph, assignment, border
        self._calls = calls_by_name(materialized.module)
        self._position = {name: i for i, name in enumerate(self._calls)}
        self._moves = {t.name: t for t in materialized.transforms}

    def run(self, kernels: Sequence[Kernel]) -> Expectation:
        found = []
        inside: set[str] = set()
        for kernel in kernels:
            for group in kernel.groups:
                inside.update(group)
                # A kernel of what the converted module did not have is nothing that is expected.
                if all(name in self._position for name in group):
                    found.append(replace(self._group(group), function=kernel.function))
        found += [_alone(self._group((name,)), call) for name, call in self._calls.items() if name not in inside]
        graph = self._graph
        made = made_layouts(graph, self._assignment, self._border)
        outputs = []
        for i, output in enumerate(graph.outputs):
            layout = self._border.of_output(i, output)
            outputs.append(Value(output.tensor or "", layout, planned_shape(output.info, layout, None)))
        return Expectation(
            tuple(Value(t.name, made[t.name], planned_shape(t, made[t.name], None)) for t in graph.inputs),
            tuple(sorted(found, key=lambda call: call.position)),
            tuple(outputs),
            {t.name: op.id for op in graph.ops for t in op.results},
            {name: tuple(dict.fromkeys(op.id for op, _ in uses)) for name, uses in graph.consumers.items()},
        )

    def _group(self, group: tuple[str, ...]) -> ExpectedCall:
        position = self._position[group[-1]]
        if group[0] in self._moves:
            move = self._moves[group[0]]
            info = self._graph.tensors[move.tensor]
            source, target = (Value(move.tensor, x, planned_shape(info, x, None)) for x in (move.source, move.target))
            name = f"the transform of {move.tensor} from {move.source} to {move.target}"
            axes = (_letters(move.source), _letters(move.target))
            return ExpectedCall(name, (), (source,), (target,), position=position, axes=axes)
        ops = [self._graph.by_name.get(name) for name in group]
        if any(op is None for op in ops):
            # What belongs to no operator of the model, such as the transform of variable weights.
            return ExpectedCall(group[0], group, (), (), position=position, checked=False)
        known = [op for op in ops if op is not None]
        reads, makes = self._reads(known), self._makes(known[-1])
        return ExpectedCall(
            known[0].id,
            group,
            tuple(value for value, _ in reads),
            tuple(value for value, _ in makes),
            position=position,
            axes=tuple(letters for _, letters in (*reads, *makes)) if self._is_seen_through(known) else None,
        )

    def _is_seen_through(self, ops: Sequence[OpNode]) -> bool:
        other = any(choice is not None and choice.algorithm != DIRECT for choice in map(self._choice, ops))
        return not other and all(op.role is not Role.FROZEN and op.op not in _MOVES for op in ops)

    def _reads(self, ops: Sequence[OpNode]) -> list[tuple[Value, Letters | None]]:
        """Operands from outside, each once, in the order in which they are read; see `kernel_function`."""
        inside = {t.name for op in ops for t in op.results}
        found: list[tuple[Any, Value, Letters | None]] = []
        for op in ops:
            choice = self._choice(op)
            leaves = list(_leaves(self._calls[op.name].args))
            wanted = operand_layouts(op, choice)
            for index, (key, operand, layout) in enumerate(zip(leaves, op.operands, wanted, strict=True)):
                is_kernel = index == 1 and op.op in kinds.CONVOLUTIONS
                shape = planned_shape(operand.info, layout, choice, is_kernel=is_kernel)
                if operand.tensor in inside or (operand.tensor is None and shape == ()):
                    continue
                value = Value(operand.tensor or "", layout if operand.tensor else None, shape)
                if not any(_is_same(known, key) for known, _, _ in found):
                    found.append((key, value, _letters(layout)))
        return [(value, letters) for _, value, letters in found]

    def _makes(self, op: OpNode) -> list[tuple[Value, Letters | None]]:
        choice = self._choice(op)
        layouts = result_layouts(op, choice)
        return [
            (Value(t.name, lay, planned_shape(t, lay, choice)), _letters(lay))
            for t, lay in zip(op.results, layouts, strict=True)
        ]

    def _choice(self, op: OpNode) -> Candidate | None:
        return None if op.role is Role.FROZEN else self._assignment.get(op.name)


_MOVES = (kinds.PERMUTE, kinds.TRANSFORM)


def _letters(layout: Layout | None) -> Letters | None:
    """Axis of every dimension; None where the names mean nothing."""
    if layout is None or layout.name == axis_names(layout.ndim):
        return None
    return tuple(axis.letter.upper() for axis in layout.axes)


def _alone(expected: ExpectedCall, call: relax.Call) -> ExpectedCall:
    """The call of an operator that is in no fusion group: an external function keeps its name."""
    return replace(expected, function=call.op.name_hint) if isinstance(call.op, tvm.ir.GlobalVar) else expected


def _leaves(args: Sequence[relax.Expr]) -> Iterator[Any]:
    """What tells the tensor operands of a call apart: constants by identity, variables with their field."""
    for arg in args:
        if isinstance(arg, relax.Tuple):
            yield from _leaves(arg.fields)
        elif isinstance(arg.ty, relax.TensorType):
            yield arg
        elif isinstance(arg.ty, relax.TupleType):
            yield from ((arg, i) for i, field in enumerate(arg.ty.fields) if isinstance(field, relax.TensorType))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) or isinstance(other, tuple):
        return bool(one == other)
    return bool(one.same_as(other))
