"""External functions in a conversion: calls of them become an operator, and calls of rewritten functions afterwards.

A function in other layouts is a new one, under a name of its own: its parameters and result are as they are stored, its
attribute `layoutsearch.chosen` is the choice that was made, and its body is the old one between transforms of its
parameters and of its result. So it still says exactly what is computed; a code generator that knows the layouts takes
them from the attribute and leaves the transforms away.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache

import tvm
from tvm import relax

from layoutsearch.layout import kinds
from layoutsearch.layout.candidate import Assignment
from layoutsearch.layout.declare import is_external
from layoutsearch.layout.declared import ATTRIBUTE, CHOSEN, Declared, natural_axes
from layoutsearch.layout.graph import LayoutGraph, OpNode
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.rules import declared_choice, result_layouts
from layoutsearch.materialize.moves import move
from layoutsearch.materialize.writer import FunctionWriter, main_of, substitute, with_main

_PRIORITY = 11

Functions = Mapping[str, relax.Function]


def set_apart(module: tvm.IRModule, graph: LayoutGraph) -> tuple[tvm.IRModule, Functions]:
    """The module without external functions, calls of those that take part as an operator; and the functions.

    Calls of functions that do not take part are left, without the function.
    """
    functions = {g.name_hint: f for g, f in module.functions_items() if is_external(f)}
    if not functions:
        return module, {}
    called = {op.name: op for op in graph.ops if op.op == kinds.EXTERN_CALL and op.role is not Role.FROZEN}

    def visit(name: str, value: relax.Expr) -> relax.Expr:
        if name not in called:
            return value
        op = called[name]
        attrs = _attrs(op.attrs["function"], list(op.result.shape or ()), op.result.dtype)
        return relax.Call(_operator(), list(value.args), attrs)

    rest = {g: f for g, f in module.functions_items() if g.name_hint not in functions}
    return rewritten(tvm.IRModule(rest, attrs=module.attrs), visit), functions


def proxy_attrs(call: relax.Call, op: OpNode, layout: Layout | None) -> tvm.ir.Attrs:
    """Attributes of the operator once its result is in `layout`."""
    shape = op.result.shape or ()
    physical = layout.physical_shape(shape, op.result.axes) if layout is not None else shape
    return _attrs(str(call.attrs["function"]), list(physical), op.result.dtype)


def put_back(module: tvm.IRModule, functions: Functions, graph: LayoutGraph, assignment: Assignment) -> tvm.IRModule:
    """The converted module with calls of functions in the layouts of the assignment."""
    if not functions:
        return module
    known: dict[str, tvm.ir.GlobalVar] = {}
    added: dict[tvm.ir.GlobalVar, relax.Function] = {}
    taken = {g.name_hint for g in module.get_global_vars()} | set(functions)

    def add(key: str, name: str, function: relax.Function) -> tvm.ir.GlobalVar:
        if key not in known:
            known[key] = tvm.ir.GlobalVar(name)
            relax.expr._update_type(known[key], function.ty)
            added[known[key]] = function
        return known[key]

    def visit(name: str, value: relax.Expr) -> relax.Expr:
        if not isinstance(value, relax.Call):
            return value
        if isinstance(value.op, tvm.ir.GlobalVar) and value.op.name_hint in functions:
            # One that does not take part.
            original = value.op.name_hint
            return relax.Call(add(original, original, functions[original]), value.args, value.attrs, value.ty_args)
        if not isinstance(value.op, tvm.ir.Op) or value.op.name != kinds.EXTERN_CALL:
            return value
        op = graph.by_name[name]
        original, choice = str(value.attrs["function"]), assignment[name]
        declared = declared_choice(op, choice)
        if all(lay is None or str(lay) == natural_axes(lay) for lay in (*declared.params, declared.destination)):
            gv = add(original, original, _marked(functions[original], declared))
        else:
            new = _fresh(f"{original}_{choice.data}_{choice.out}", known, taken)
            key = f"{original} {choice}"
            if key not in known:
                taken.add(new)
            gv = known.get(key) or add(key, new, _in_layouts(functions[original], new, op, declared))
        return relax.Call(gv, list(value.args))

    main = rewritten(module, visit)
    rest = dict(main.functions_items())
    return tvm.IRModule({**rest, **added}, attrs=module.attrs)


def rewritten(module: tvm.IRModule, visit: Callable[[str, relax.Expr], relax.Expr]) -> tvm.IRModule:
    """The module with the value of every binding of `main` replaced; `visit` gets its name and value."""
    main, writer = main_of(module), FunctionWriter()
    env: dict[relax.Var, relax.Expr] = {}
    for block in main.body.blocks:
        dataflow = isinstance(block, relax.DataflowBlock)
        for binding in block.bindings:
            value = visit(binding.var.name, substitute(binding.value, env))
            match = binding.ty if isinstance(binding, relax.MatchCast) else None
            output = not isinstance(binding.var, relax.DataflowVar)
            env[binding.var] = writer.bind(binding.var.name, value, output=output, match=match)
        writer.end_block(dataflow)
    return with_main(module, writer.function(main.params, substitute(main.body.body, env), main.attrs))


def _fresh(stem: str, known: Mapping[str, tvm.ir.GlobalVar], taken: set[str]) -> str:
    name, number = stem, 0
    while name in taken:
        number += 1
        name = f"{stem}_{number}"
    return name


def _marked(function: relax.Function, declared: Declared) -> relax.Function:
    return function.without_attr(ATTRIBUTE).with_attr(CHOSEN, json.dumps(declared.to_json()))


def _in_layouts(function: relax.Function, name: str, op: OpNode, declared: Declared) -> relax.Function:
    """The function over parameters as they are stored, and with such a result."""
    old = relax.utils.copy_with_new_vars(function)
    writer = FunctionWriter()
    env: dict[relax.Var, relax.Expr] = {}
    params = []
    for index, param in enumerate(old.params):
        layout = declared.param(index)
        if layout is None or str(layout) == natural_axes(layout):
            params.append(relax.Var(param.name, param.ty))
            env[param] = params[-1]
            continue
        axes = natural_axes(layout)
        shape = layout.physical_shape([int(s) for s in param.ty.shape.values], axes)
        params.append(relax.Var(param.name, relax.TensorType(shape, param.ty.dtype)))
        env[param] = writer.bind(f"{param.name}_plain", move(params[-1], layout, Layout(axes)), output=True)
    writer.end_block(dataflow=False)
    for block in old.body.blocks:
        for binding in block.bindings:
            match = binding.ty if isinstance(binding, relax.MatchCast) else None
            # A function within the function is a value; nothing of it is replaced.
            value = substitute(binding.value, env)
            env[binding.var] = writer.bind(binding.var.name, value, output=True, match=match)
        writer.end_block(dataflow=False)
    result = substitute(old.body.body, env)
    (layout,) = result_layouts(op, declared.candidate)
    if declared.destination is not None and layout is not None and str(layout) != op.result.axes:
        result = writer.bind("stored", move(result, Layout(op.result.axes), layout), output=True)
        writer.end_block(dataflow=False)
    made = writer.function(params, result, function.attrs)
    return _marked(made, declared).with_attr("global_symbol", name)


def _attrs(function: str, shape: list[int], dtype: str) -> tvm.ir.Attrs:
    return tvm.ir.make_node("ir.DictAttrs", function=function, shape=shape, dtype=dtype)


@cache
def _operator() -> tvm.ir.Op:
    """The operator that stands for calls while layouts are converted, registered on first use."""
    if kinds.EXTERN_CALL not in set(tvm.ir.Op.list_op_names()):
        tvm.get_global_func("ir.RegisterOp")(kinds.EXTERN_CALL, "")
        for key, value in (("FInferType", _infer), ("FPurity", True)):
            tvm.ir.register_op_attr(kinds.EXTERN_CALL, key, value, _PRIORITY)
    return tvm.ir.Op.get(kinds.EXTERN_CALL)


def _infer(call: relax.Call, _builder: relax.BlockBuilder) -> relax.TensorType:
    return relax.TensorType([int(s) for s in call.attrs["shape"]], str(call.attrs["dtype"]))
