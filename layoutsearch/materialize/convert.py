"""The canonical module in the layouts of an assignment, by TVM's ConvertLayout.

Three steps. *Prepare*: every operator becomes a dataflow binding of its own name, and where one blocked layout meets
another an identity transpose is put in between, since the pass has no direct way. *Convert*: the pass runs with layout
inference that answers from the assignment. *Resolve*: what the pass inserted between two operators is checked against
what the assignment implies, and replaced by one transform per (tensor, layout), constants by transformed constants.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import tvm
from tvm import relax

from layoutsearch.errors import InfeasibleError, MaterializeError
from layoutsearch.layout.candidate import Assignment
from layoutsearch.layout.graph import LayoutGraph, OpNode
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.rules import check_assignment, made_layouts, operand_layouts, result_layouts
from layoutsearch.materialize.answers import answer, view_answer
from layoutsearch.materialize.inference import layout_inference
from layoutsearch.materialize.moves import (
    is_move,
    logical_index,
    move,
    move_array,
    moved_index,
    physical_index,
)
from layoutsearch.materialize.objects import infer_output
from layoutsearch.materialize.verify import verify_layouts
from layoutsearch.materialize.writer import FunctionWriter, main_of, substitute, with_main

_STEP = "__step"


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


def materialize(module: tvm.IRModule, graph: LayoutGraph, assignment: Assignment) -> Materialized:
    """Convert the canonical `module` (with its `graph`) to the layouts of `assignment`.

    The result's `main` has the same inputs and outputs, in their original layouts.

    Raises:
        InfeasibleError: a choice is illegal, missing or for an unknown operator; nothing was converted.
        MaterializeError: the converted module is not what was asked for.
    """
    problems = check_assignment(graph, assignment)
    if problems:
        name, reason = problems[0]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InfeasibleError(f"{name}: {reason}{more}")
    prepared = _Preparation(module, graph, assignment).run()
    converted = _convert(prepared, graph, assignment)
    result = _Resolution(converted, graph, assignment).run()
    verify_layouts(result.module, graph, assignment)
    return result


class _Preparation:
    def __init__(self, module: tvm.IRModule, graph: LayoutGraph, assignment: Assignment) -> None:
        self.module, self.graph, self.assignment = module, graph, assignment
        self.made: dict[str, Layout | None] = {t.name: t.initial for t in graph.inputs}
        self.writer = FunctionWriter()
        self.env: dict[relax.Var, relax.Expr] = {}

    def run(self) -> tvm.IRModule:
        main = main_of(self.module)
        for block in main.body.blocks:
            dataflow = isinstance(block, relax.DataflowBlock)
            outputs = []
            for binding in block.bindings:
                value = substitute(binding.value, self.env)
                op = self.graph.by_name.get(binding.var.name)
                match = binding.ty if isinstance(binding, relax.MatchCast) else None
                if op is not None and dataflow:
                    value = self._with_steps(op, value)
                    made = result_layouts(op, self.assignment.get(op.name))
                    self.made.update({t.name: lay for t, lay in zip(op.results, made, strict=True)})
                    inner = self.writer.bind(op.name, value, match=match)
                else:
                    inner = self.writer.bind(binding.var.name, value, output=not dataflow, match=match)
                self.env[binding.var] = inner
                if dataflow and not isinstance(binding.var, relax.DataflowVar):
                    outputs.append(binding.var)
            for var in outputs:
                self.env[var] = self.writer.bind(f"{var.name}__out", self.env[var], output=True)
            self.writer.end_block(dataflow)
        result = substitute(main.body.body, self.env)
        return with_main(self.module, self.writer.function(main.params, result, main.attrs))

    def _with_steps(self, op: OpNode, value: relax.Expr) -> relax.Expr:
        """Put an identity in front of operands that go from one blocked layout to another."""
        wanted = operand_layouts(op, self.assignment.get(op.name))
        position = 0

        def visit(expr: relax.Expr) -> relax.Expr:
            nonlocal position
            if isinstance(expr, relax.Tuple):
                return relax.Tuple([visit(f) for f in expr.fields])
            if isinstance(expr.ty, relax.TupleType):
                position += len(expr.ty.fields)
                return expr
            if not isinstance(expr.ty, relax.TensorType):
                return expr
            operand, want = op.operands[position], wanted[position]
            position += 1
            if operand.tensor is None or want is None:
                return expr
            have = self.made[operand.tensor]
            if have is None or not have.is_blocked or not want.is_blocked or have == want:
                return expr
            step = relax.op.permute_dims(expr, list(range(expr.ty.ndim)))
            return self.writer.bind(f"{op.name}{_STEP}{position}", step)

        if not isinstance(value, relax.Call) or op.role is Role.FROZEN:
            return value
        return relax.Call(value.op, [visit(a) for a in value.args], value.attrs, value.ty_args)


def _convert(prepared: tvm.IRModule, graph: LayoutGraph, assignment: Assignment) -> tvm.IRModule:
    answers = {}
    made = made_layouts(graph, assignment)
    for block in main_of(prepared).body.blocks:
        for binding in block.bindings:
            name, value = binding.var.name, binding.value
            if not isinstance(value, relax.Call):
                continue
            if _STEP in name:
                letters = "ABCDEFGH"[: value.ty.ndim]
                answers[value] = infer_output([letters], [letters], value.attrs)
            elif name in graph.views:
                view = graph.views[name]
                layout = made[view.tensor or ""]
                if layout is not None:
                    answers[value] = view_answer(value, _axes_before(value, view.info.axes), view.info.axes, layout)
            elif name in assignment and graph.by_name[name].role is not Role.FROZEN:
                answers[value] = answer(value, graph.by_name[name], assignment[name])
    with layout_inference(answers):
        # The callback only switches the pass from its map to per-call decisions; the answers hold them.
        return relax.transform.ConvertLayout({}, lambda call: {})(prepared)


def _axes_before(transpose: relax.Call, after: str) -> str:
    """Axis names of a transpose's operand, from those of its result."""
    axes = transpose.attrs.axes
    order = [int(a) % len(after) for a in axes] if axes is not None else list(reversed(range(len(after))))
    return "".join(after[order.index(i)] for i in range(len(after)))


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


class _Resolution:
    def __init__(self, module: tvm.IRModule, graph: LayoutGraph, assignment: Assignment) -> None:
        self.module, self.graph, self.assignment = module, graph, assignment
        self.refs: dict[relax.Var, _Ref] = {}
        # Tuples stay apart until they leave: the pass moves their fields where they are taken out again.
        self.tuples: dict[relax.Var, tuple[_Ref, ...]] = {}
        self.shared: dict[tuple[relax.Expr, Layout], relax.Expr] = {}
        self.transforms: list[TransformInfo] = []
        self.writer = FunctionWriter()

    def run(self) -> Materialized:
        main = main_of(self.module)
        for param in main.params:
            info = self.graph.tensors.get(param.name)
            self.refs[param] = _Ref(param, info.initial, info.axes, param.name) if info else _Ref(param, None)
        for block in main.body.blocks:
            dataflow = isinstance(block, relax.DataflowBlock)
            for binding in block.bindings:
                self._bind(binding, dataflow)
            self.writer.end_block(dataflow)
        result = self._plain(main.body.body)
        function = self.writer.function(main.params, result, main.attrs)
        module = relax.transform.DeadCodeElimination()(with_main(self.module, function))
        return Materialized(module, tuple(self.transforms))

    def _bind(self, binding: relax.Binding, dataflow: bool) -> None:
        var, value = binding.var, binding.value
        name = var.name
        match = binding.ty if isinstance(binding, relax.MatchCast) else None
        op = self.graph.by_name.get(name)
        if op is not None and match is None and isinstance(var, relax.DataflowVar):
            self._bind_op(var, value, op)
        elif name in self.graph.views:
            self.refs[var] = replace(self._ref(value.args[0]), axes=self.graph.views[name].info.axes)
        elif isinstance(var, relax.DataflowVar) and _is_flat(value):
            self.tuples[var] = tuple(self._ref(f) for f in value.fields)
        elif is_move(value) or (isinstance(value, relax.Var) and value not in self.tuples):
            ref = self._ref(value)
            if dataflow and not isinstance(var, relax.DataflowVar):
                # An output of the block, in its original layout.
                ref = _Ref(self.writer.bind(name, self._original(ref), output=True), None)
            self.refs[var] = ref
        elif isinstance(value, relax.TupleGetItem) and value.tuple_value in self.tuples:
            self.refs[var] = self.tuples[value.tuple_value][value.index]
        elif isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Var):
            whole = self._ref(value.tuple_value)
            new = self.writer.bind(name, relax.TupleGetItem(whole.expr, value.index))
            self.refs[var] = _Ref(new, whole.layout, whole.axes, f"{whole.tensor}.{value.index}")
        else:
            output = not isinstance(var, relax.DataflowVar)
            self.refs[var] = _Ref(self.writer.bind(name, self._plain(value), output=output, match=match), None)

    def _bind_op(self, var: relax.Var, value: relax.Expr, op: OpNode) -> None:
        choice = self.assignment.get(op.name) if op.role is not Role.FROZEN else None
        made = result_layouts(op, choice)
        if choice is None:
            new = self.writer.bind(op.name, self._plain(value))
        else:
            wanted = iter(enumerate(operand_layouts(op, choice)))
            args = [self._argument(a, op, wanted) for a in value.args]
            new = self.writer.bind(op.name, relax.Call(value.op, args, value.attrs, value.ty_args))
        tensor = op.name if len(op.results) != 1 else op.result.name
        axes = op.results[0].axes if op.results else ""
        self.refs[var] = _Ref(new, made[0] if made else None, axes, tensor)

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
        if expr in self.tuples:
            return relax.Tuple([self._original(ref) for ref in self.tuples[expr]])
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
                name = f"{ref.tensor or 'value'}__{target}"
                self.shared[key] = self.writer.bind(name, move(ref.expr, source, target))
                shape = [int(s) for s in ref.expr.ty.shape.values]
                size = int(np.prod(shape)) * np.dtype(str(ref.expr.ty.dtype)).itemsize
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


def _is_flat(value: relax.Expr) -> bool:
    """A tuple of variables and constants that are tensors."""
    return isinstance(value, relax.Tuple) and all(isinstance(f.ty, relax.TensorType) for f in value.fields)


def _samples(shape: list[int]) -> list[list[int]]:
    """A few physical indices that tell axes and blocks apart."""
    generator = np.random.default_rng(len(shape) + sum(shape))
    corners = [[s - 1 for s in shape]]
    return corners + [[int(generator.integers(s)) for s in shape] for _ in range(3)]
