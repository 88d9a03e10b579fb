"""The canonical module made ready for ConvertLayout: what the pass has no way to do is put into steps it has.

Every operator becomes a dataflow binding of its own name. Tuples disappear but for the operands and results of
operators, so that the pass only ever moves tensors. Where one blocked layout meets another, and in front of a cast, an
identity transpose is put in between, since the pass has no direct way.
"""

from __future__ import annotations

import tvm
from tvm import relax

from layoutsearch.layout.candidate import Assignment
from layoutsearch.layout.graph import LayoutGraph, OpNode
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.rules import made_layouts, operand_layouts
from layoutsearch.materialize.writer import FunctionWriter, main_of, substitute, with_main

_STEP = "__step"


def is_step(name: str) -> bool:
    """Whether a bound variable is one of the identities that `prepare` adds."""
    return _STEP in name


def prepare(module: tvm.IRModule, graph: LayoutGraph, assignment: Assignment) -> tvm.IRModule:
    """The module with steps between blocked layouts and without tuples of its own."""
    return _Preparation(module, graph, assignment).run()


class _Preparation:
    def __init__(self, module: tvm.IRModule, graph: LayoutGraph, assignment: Assignment) -> None:
        self.module, self.graph, self.assignment = module, graph, assignment
        self.made = made_layouts(graph, assignment)
        self.writer = FunctionWriter()
        self.env: dict[relax.Var, relax.Expr] = {}
        self.unpacked: dict[relax.Var, list[relax.Expr]] = {}

    def run(self) -> tvm.IRModule:
        main = main_of(self.module)
        for block in main.body.blocks:
            if isinstance(block, relax.DataflowBlock):
                self._dataflow(block)
                continue
            for binding in block.bindings:
                value = substitute(binding.value, self.env)
                match = binding.ty if isinstance(binding, relax.MatchCast) else None
                self.env[binding.var] = self.writer.bind(binding.var.name, value, output=True, match=match)
            self.writer.end_block(dataflow=False)
        result = substitute(main.body.body, self.env)
        return with_main(self.module, self.writer.function(main.params, result, main.attrs))

    def _dataflow(self, block: relax.DataflowBlock) -> None:
        for binding in block.bindings:
            var, value = binding.var, _without_items(substitute(binding.value, self.env))
            op = self.graph.by_name.get(var.name)
            if op is not None:
                match = binding.ty if isinstance(binding, relax.MatchCast) else None
                self.env[var] = self.writer.bind(op.name, self._with_steps(op, value), match=match)
            elif isinstance(value, relax.TupleGetItem):
                self.env[var] = self._fields(value.tuple_value)[value.index]
            elif isinstance(value, relax.Call):
                # A transpose that is a view.
                self.env[var] = self.writer.bind(var.name, value)
            else:
                self.env[var] = value
        for binding in block.bindings:
            if not isinstance(binding.var, relax.DataflowVar):
                self.env[binding.var] = self._output(binding.var.name, self.env[binding.var])
        self.unpacked.clear()
        self.writer.end_block(dataflow=True)

    def _output(self, name: str, value: relax.Expr) -> relax.Expr:
        """`value` as variables that are visible outside the block, tensor by tensor."""
        if isinstance(value.ty, relax.TupleType):
            return relax.Tuple([self._output(f"{name}.{i}", f) for i, f in enumerate(self._fields(value))])
        if isinstance(value, tvm.ir.GenericConst):
            return value
        return self.writer.bind(f"{name}__out", value, output=True)

    def _fields(self, value: relax.Expr) -> list[relax.Expr]:
        """The fields of a tuple, taken out of it once."""
        if isinstance(value, relax.Tuple):
            return list(value.fields)
        if value not in self.unpacked:
            self.unpacked[value] = [
                self.writer.bind(f"{value.name}.{i}", relax.TupleGetItem(value, i)) for i in range(len(value.ty.fields))
            ]
        return self.unpacked[value]

    def _with_steps(self, op: OpNode, value: relax.Expr) -> relax.Expr:
        """Put an identity in front of operands that go from one blocked layout to another."""
        layouts = operand_layouts(op, self.assignment.get(op.name))
        wanted = iter(zip(op.operands, layouts, strict=True))
        count = 0

        def visit(expr: relax.Expr) -> relax.Expr:
            nonlocal count
            if isinstance(expr.ty, relax.TupleType):
                return relax.Tuple([visit(f) for f in self._fields(expr)])
            if not isinstance(expr.ty, relax.TensorType):
                return expr
            operand, want = next(wanted)
            have = self.made[operand.tensor] if operand.tensor is not None else None
            if have is None or want is None or not have.is_blocked or have == want:
                return expr
            if op.role is Role.FROZEN and isinstance(value, relax.Call):
                return expr
            if not want.is_blocked and isinstance(value, relax.Call):
                return expr
            count += 1
            step = relax.op.permute_dims(expr, list(range(expr.ty.ndim)))
            return self.writer.bind(f"{op.name}{_STEP}{count}", step)

        if not isinstance(value, relax.Call):
            # A cast: the pass gives it the operand as it is stored.
            return visit(value) if isinstance(value.ty, relax.TensorType) else value
        return relax.Call(value.op, [visit(a) for a in value.args], value.attrs, value.ty_args)


def _without_items(expr: relax.Expr) -> relax.Expr:
    """`expr` with the fields of written-out tuples taken directly."""
    if isinstance(expr, relax.TupleGetItem):
        inner = _without_items(expr.tuple_value)
        return inner.fields[expr.index] if isinstance(inner, relax.Tuple) else relax.TupleGetItem(inner, expr.index)
    if isinstance(expr, relax.Tuple):
        return relax.Tuple([_without_items(f) for f in expr.fields])
    if isinstance(expr, relax.Call):
        return relax.Call(expr.op, [_without_items(a) for a in expr.args], expr.attrs, expr.ty_args)
    return expr
