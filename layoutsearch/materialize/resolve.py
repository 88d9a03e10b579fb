"""The converted module with its layout changes checked, composed and shared.

What ConvertLayout inserted between two operators is checked against what the assignment implies, and replaced by one
transform per (tensor, layout); constants are replaced by transformed constants.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tvm
from tvm import relax

from layoutsearch.errors import MaterializeError
from layoutsearch.layout.border import ORIGINAL, Border
from layoutsearch.layout.candidate import Assignment, Candidate
from layoutsearch.layout.graph import LayoutGraph, Operand, OpNode
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
        before: what the pass took that for, where it is another layout: of an input that is given differently.
        axes: axis names of the variable in its logical order.
        tensor: the graph's name for it.
        moves: layout changes of the pass between `expr` and the variable.
    """

    expr: relax.Expr
    layout: Layout | None
    axes: str = ""
    tensor: str = ""
    moves: tuple[relax.Call, ...] = ()
    before: Layout | None = None


def resolve(
    converted: tvm.IRModule, graph: LayoutGraph, assignment: Assignment, border: Border = ORIGINAL
) -> Materialized:
    """Replace what the pass inserted by one transform per (tensor, layout), and take the inputs as `border` has them.

    Raises:
        MaterializeError: the pass brought an operand elsewhere than the assignment implies.
    """
    return _Resolution(converted, graph, assignment, border).run()


class _Resolution:
    def __init__(self, module: tvm.IRModule, graph: LayoutGraph, assignment: Assignment, border: Border) -> None:
        self.module, self.graph, self.assignment, self.border = module, graph, assignment, border
        self.refs: dict[relax.Var, _Ref] = {}
        self.made = made_layouts(graph, assignment, border)
        self.outside = _outside(main_of(module), graph, border)
        self.given: dict[tuple[relax.Expr, Layout | None], relax.Expr] = {}
        self.shared: dict[tuple[relax.Expr, Layout], relax.Expr] = {}
        self.transforms: list[TransformInfo] = []
        self.writer = FunctionWriter()

    def run(self) -> Materialized:
        main = main_of(self.module)
        params = [self._parameter(param) for param in main.params]
        last = next((b for b in reversed(list(main.body.blocks)) if isinstance(b, relax.DataflowBlock)), None)
        for block in main.body.blocks:
            dataflow = isinstance(block, relax.DataflowBlock)
            for binding in block.bindings:
                self._bind(binding, dataflow)
            if dataflow and block.same_as(last):
                self._give_parameters(main.params)
            self.writer.end_block(dataflow)
        result = self._results(main.body.body, iter(enumerate(self.graph.outputs)))
        self.writer.end_block(dataflow=True)
        function = self.writer.function(params, result, main.attrs)
        module = relax.transform.DeadCodeElimination()(with_main(self.module, function))
        return Materialized(module, tuple(self.transforms))

    def _parameter(self, param: relax.Var) -> relax.Var:
        """The parameter in the border's layout."""
        info = self.graph.tensors.get(param.name)
        layout = self.border.inputs.get(param.name)
        if info is None or layout is None or info.shape is None:
            self.refs[param] = self._stored(param, param.name)
            return param
        shape = layout.physical_shape(info.shape, info.axes)
        new = relax.Var(param.name, relax.TensorType(shape, str(param.ty.dtype)))
        self.refs[param] = replace(self._stored(new, param.name), before=info.initial)
        return new

    def _give_parameters(self, params: Sequence[relax.Var]) -> None:
        """Inputs that are returned as they are, in the layouts that the border wants them in."""
        for param in params:
            for layout in self.outside.get(param, ()):
                ref = self.refs[param]
                wanted = layout or (Layout(ref.axes) if ref.axes else None)
                if ref.layout is not None and wanted is not None and wanted != ref.layout:
                    moved = self._moved(ref, ref.layout, wanted)
                    self.given[param, layout] = self.writer.bind(f"{param.name}__out", moved, output=True)

    def _results(self, expr: relax.Expr, outputs: Iterator[tuple[int, Operand]]) -> relax.Expr:
        """What `main` returns, every tensor in the border's layout."""
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._results(f, outputs) for f in expr.fields])
        places = [next(outputs) for _ in range(_tensors_in(expr.ty))]
        if not isinstance(expr, (relax.Var, tvm.ir.GenericConst)) or not isinstance(expr.ty, relax.TensorType):
            # A tuple that another part of the function made has no layouts.
            return self._plain(expr)
        ((position, output),) = places
        layout = self.border.outputs.get(position)
        if isinstance(expr, tvm.ir.GenericConst) and layout is not None:
            return relax.const(move_array(expr.value.numpy(), Layout(output.info.axes), layout))
        if (expr, layout) in self.given:
            return self.given[expr, layout]
        ref = self._ref(expr)
        wanted = layout or (Layout(ref.axes) if ref.axes else None)
        if ref.layout is None or wanted is None or wanted == ref.layout:
            return ref.expr
        # Bound outside of all dataflow blocks, where nothing is shared.
        return self.writer.bind(f"{ref.tensor}__out", self._moved(ref, ref.layout, wanted), output=True)

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
                # An output of the block: in its original layout, unless it is only returned, in another.
                layouts = self.outside.get(var) or {None: None}
                original = self._original(ref) if None in layouts else None
                for layout in (x for x in layouts if x is not None):
                    self._check_original(ref)
                    moved = self._moved(ref, ref.layout or Layout(ref.axes), layout)
                    self.given[var, layout] = self.writer.bind(f"{name}__{layout}", moved, output=True)
                if original is not None:
                    made = self.writer.bind(name, original, output=True)
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
        self._check_original(ref)
        return self._moved(ref, ref.layout, Layout(ref.axes))

    def _check_original(self, ref: _Ref) -> None:
        """The pass must have brought the variable to its original layout."""
        if ref.layout is not None and ref.axes:
            self._check_moves(ref, ref.layout, Layout(ref.axes), f"a use of {ref.tensor} in its original layout")

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
        """The pass's own way from `source` to `target` must be the same permutation of elements.

        Of an input that is given in another layout, the way from the one that the pass saw.
        """
        source = ref.before or source
        if not ref.moves:
            if source != target:
                raise MaterializeError(f"ConvertLayout left {what} in {source}; requested {target}")
            return
        shape = [int(s) for s in ref.expr.ty.shape.values]
        if ref.before is not None:
            shape = list(self.graph.tensors[ref.tensor].shape or ())
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


def _outside(main: relax.Function, graph: LayoutGraph, border: Border) -> dict[relax.Var, dict[Layout | None, None]]:
    """In which layouts variables are wanted outside the block that binds them, in order; None is the original one."""
    found: dict[relax.Var, dict[Layout | None, None]] = {}
    bound: set[relax.Var] = set()
    for block in main.body.blocks:
        here = {binding.var for binding in block.bindings}
        for binding in block.bindings:
            for var in relax.analysis.free_vars(binding.value):
                if var in bound:
                    found.setdefault(var, {})[None] = None
        bound |= here
    outputs = iter(enumerate(graph.outputs))

    def returned(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Tuple):
            for field in expr.fields:
                returned(field)
        else:
            positions = [next(outputs)[0] for _ in range(_tensors_in(expr.ty))]
            if isinstance(expr, relax.Var) and isinstance(expr.ty, relax.TensorType):
                (position,) = positions
                found.setdefault(expr, {})[border.outputs.get(position)] = None

    returned(main.body.body)
    return found


def _tensors_in(ty: relax.Type) -> int:
    """Number of tensors in a value of a type."""
    if isinstance(ty, relax.TupleType):
        return sum(_tensors_in(field) for field in ty.fields)
    return int(isinstance(ty, relax.TensorType))


def _samples(shape: list[int]) -> list[list[int]]:
    """A few physical indices that tell axes and blocks apart."""
    generator = np.random.default_rng(len(shape) + sum(shape))
    corners = [[s - 1 for s in shape]]
    return corners + [[int(generator.integers(s)) for s in shape] for _ in range(3)]
