"""The converted module with its layout changes checked, composed and shared.

What ConvertLayout inserted between two operators is checked against what the assignment implies, and replaced by one
transform per (tensor, layout); constants are replaced by transformed constants.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import tvm
from tvm import relax

from layoutsearch.errors import MaterializeError
from layoutsearch.layout.candidate import Assignment, Candidate
from layoutsearch.layout.graph import LayoutGraph, OpNode
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.rules import made_layouts, operand_layouts
from layoutsearch.materialize.library import library
from layoutsearch.materialize.moves import is_move, logical_index, move, move_array, moved_index, physical_index
from layoutsearch.materialize.winograd import transformed_weights, winograd_call
from layoutsearch.materialize.writer import FunctionWriter, main_of, with_main


@dataclass(frozen=True)
class TransformInfo:
    """One transform of the converted module: `tensor` goes from one layout to another, for all its consumers."""

    name: str
    tensor: str
    source: Layout
    target: Layout
    bytes: int


@dataclass(frozen=True)
class Materialized:
    """A module in the layouts of an assignment, as verified."""

    module: tvm.IRModule
    transforms: tuple[TransformInfo, ...]


@dataclass(frozen=True)
class _Ref:
    """What a variable of the converted module is in the resolved one.

    Attributes:
        expr: variable, parameter or constant that holds the data.
        layout: how it is stored; None for scalars and what the graph does not know.
        axes: axis names of the variable in its logical order.
        tensor: the graph's name for it.
        moves: layout changes of the pass between `expr` and the variable.
    """

    expr: relax.Expr
    layout: Layout | None
    axes: str = ""
    tensor: str = ""
    moves: tuple[relax.Call, ...] = ()


def resolve(converted: tvm.IRModule, graph: LayoutGraph, assignment: Assignment) -> Materialized:
    """Replace what the pass inserted by one transform per (tensor, layout).

    Raises:
        MaterializeError: the pass brought an operand elsewhere than the assignment implies.
    """
    return _Resolution(converted, graph, assignment).run()


class _Resolution:
    def __init__(self, module: tvm.IRModule, graph: LayoutGraph, assignment: Assignment) -> None:
        self.module, self.graph, self.assignment = module, graph, assignment
        self.refs: dict[relax.Var, _Ref] = {}
        self.made = made_layouts(graph, assignment)
        self.shared: dict[tuple[relax.Expr, Layout], relax.Expr] = {}
        self.transforms: list[TransformInfo] = []
        self.writer = FunctionWriter()

    def run(self) -> Materialized:
        main = main_of(self.module)
        for param in main.params:
            self.refs[param] = self._stored(param, param.name)
        for block in main.body.blocks:
            dataflow = isinstance(block, relax.DataflowBlock)
            for binding in block.bindings:
                self._bind(binding, dataflow)
            self.writer.end_block(dataflow)
        result = self._plain(main.body.body)
        function = self.writer.function(main.params, result, main.attrs)
        module = relax.transform.DeadCodeElimination()(with_main(self.module, function))
        return Materialized(module, tuple(self.transforms))

    def _stored(self, expr: relax.Expr, tensor: str) -> _Ref:
        """`expr` as the tensor (or the tuple of tensors) that the graph calls `tensor`."""
        info = self.graph.tensors.get(tensor)
        return _Ref(expr, self.made[tensor], info.axes, tensor) if info is not None else _Ref(expr, None, "", tensor)

    def _bind(self, binding: relax.Binding, dataflow: bool) -> None:
        var, value = binding.var, binding.value
        name = var.name
        match = binding.ty if isinstance(binding, relax.MatchCast) else None
        op = self.graph.by_name.get(name)
        if op is not None and dataflow:
            self._bind_op(var, value, op, match)
        elif name in self.graph.views:
            self.refs[var] = replace(self._ref(value.args[0]), axes=self.graph.views[name].info.axes)
        elif dataflow and (is_move(value) or isinstance(value, relax.Var)):
            ref = self._ref(value)
            if not isinstance(var, relax.DataflowVar):
                # An output of the block, in its original layout.
                made = self.writer.bind(name, self._original(ref), output=True)
                ref = _Ref(made, Layout(ref.axes) if ref.axes else None, ref.axes, ref.tensor)
            self.refs[var] = ref
        elif dataflow and isinstance(value, relax.TupleGetItem):
            whole = self._ref(value.tuple_value)
            item = self.writer.bind(name, relax.TupleGetItem(whole.expr, value.index))
            self.refs[var] = self._stored(item, f"{whole.tensor}.{value.index}")
        else:
            output = not isinstance(var, relax.DataflowVar)
            self.refs[var] = self._stored(self.writer.bind(name, self._plain(value), output=output, match=match), name)

    def _bind_op(self, var: relax.Var, value: relax.Expr, op: OpNode, match: relax.Type | None) -> None:
        choice = self.assignment.get(op.name) if op.role is not Role.FROZEN else None
        if choice is None:
            new = self.writer.bind(op.name, self._plain(value), match=match)
        else:
            wanted = iter(enumerate(operand_layouts(op, choice)))
            args = [self._argument(a, op, wanted) for a in value.args]
            call = relax.Call(value.op, args, value.attrs, value.ty_args)
            if choice.winograd:
                call = winograd_call(value, args[0], self._transformed(args[1], op, choice))
            elif choice.extern:
                call = self._external(call, op, choice)
            new = self.writer.bind(op.name, call)
        self.refs[var] = self._stored(new, op.name)

    def _transformed(self, kernel: relax.Expr, op: OpNode, choice: Candidate) -> relax.Expr:
        """The weights of a Winograd convolution; those of a variable by a call in front."""
        weights = transformed_weights(kernel, choice)
        return self.writer.bind(f"{op.name}__weights", weights) if isinstance(weights, relax.Call) else weights

    def _external(self, call: relax.Call, op: OpNode, choice: Candidate) -> relax.Call:
        """The convolution by an external library, its weights packed; those of a variable by a call in front."""
        backend, (data, kernel) = library(choice.extern), call.args
        weights = backend.packed_weights(call, data, kernel)
        if isinstance(weights, relax.Call):
            weights = self.writer.bind(f"{op.name}__weights", weights)
        return backend.conv_call(call, data, weights, tuple(int(s) for s in kernel.ty.shape.values))

    def _argument(self, expr: relax.Expr, op: OpNode, wanted: object) -> relax.Expr:
        if isinstance(expr, relax.Tuple) and all(isinstance(f.ty, relax.TensorType) for f in expr.fields):
            return relax.Tuple([self._argument(f, op, wanted) for f in expr.fields])
        if not isinstance(expr.ty, relax.TensorType):
            return expr
        index, layout = next(wanted)  # type: ignore[call-overload]
        return self._operand(expr, op, index, layout)

    def _operand(self, expr: relax.Expr, op: OpNode, index: int, want: Layout | None) -> relax.Expr:
        """Operand `index` of `op` in its wanted layout, by a transform that is shared, checked, or folded."""
        ref, info = self._ref(expr), op.operands[index].info
        if want is None or not info.axes:
            return ref.expr
        layout = ref.layout or Layout(info.axes)
        self._check_moves(ref, layout, want, f"operand {index} of {op.name}")
        return self._moved(ref, layout, want)

    def _plain(self, expr: relax.Expr) -> relax.Expr:
        """`expr` over resolved variables, every tensor in its original layout."""
        if isinstance(expr, relax.Var):
            return self._original(self._ref(expr))
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._plain(f) for f in expr.fields])
        if isinstance(expr, relax.TupleGetItem):
            return relax.TupleGetItem(self._plain(expr.tuple_value), expr.index)
        if isinstance(expr, relax.Call):
            return relax.Call(expr.op, [self._plain(a) for a in expr.args], expr.attrs, expr.ty_args)
        return expr

    def _original(self, ref: _Ref) -> relax.Expr:
        """The variable in its original layout."""
        if ref.layout is None or not ref.axes:
            return ref.expr
        self._check_moves(ref, ref.layout, Layout(ref.axes), f"a use of {ref.tensor} in its original layout")
        return self._moved(ref, ref.layout, Layout(ref.axes))

    def _ref(self, expr: relax.Expr) -> _Ref:
        if isinstance(expr, relax.Var):
            return self.refs[expr]
        if is_move(expr):
            inner = self._ref(expr.args[0])
            return replace(inner, moves=(*inner.moves, expr))
        return _Ref(expr, None)

    def _moved(self, ref: _Ref, source: Layout, target: Layout) -> relax.Expr:
        if source == target:
            return ref.expr
        key = (ref.expr, target)
        if key not in self.shared:
            if isinstance(ref.expr, tvm.ir.GenericConst):
                array = move_array(ref.expr.value.numpy(), source, target)
                self.shared[key] = relax.const(array)
            else:
                name = f"{ref.tensor}__{target}"
                self.shared[key] = self.writer.bind(name, move(ref.expr, source, target))
                size = self.graph.tensors[ref.tensor].bytes
                self.transforms.append(TransformInfo(name, ref.tensor, source, target, size))
        return self.shared[key]

    def _check_moves(self, ref: _Ref, source: Layout, target: Layout, what: str) -> None:
        """The pass's own way from `source` to `target` must be the same permutation of elements."""
        if not ref.moves:
            if source != target:
                raise MaterializeError(f"ConvertLayout left {what} in {source}; requested {target}")
            return
        shape = [int(s) for s in ref.expr.ty.shape.values]
        for index in _samples(shape):
            landed = list(index)
            for call in ref.moves:
                landed = moved_index(call, landed)
            expected = physical_index(target, logical_index(source, index))
            if landed != expected:
                raise MaterializeError(
                    f"ConvertLayout brings {what} elsewhere than {source} to {target}: element {index} to {landed}, "
                    f"expected {expected}"
                )


def _samples(shape: list[int]) -> list[list[int]]:
    """A few physical indices that tell axes and blocks apart."""
    generator = np.random.default_rng(len(shape) + sum(shape))
    corners = [[s - 1 for s in shape]]
    return corners + [[int(generator.integers(s)) for s in shape] for _ in range(3)]
