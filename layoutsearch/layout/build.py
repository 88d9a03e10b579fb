"""From a canonical Relax module to its layout graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import relax

from layoutsearch.errors import ModelError
from layoutsearch.layout import kinds
from layoutsearch.layout.external import external_attrs, external_axes
from layoutsearch.layout.graph import LayoutGraph, Operand, OpNode, TensorInfo, axis_names, required_axes
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.names import Pin, Relation, assign_names
from layoutsearch.model.fingerprint import kind_of, op_ids


def build_graph(module: tvm.IRModule, axes: Mapping[str, str] | None = None) -> LayoutGraph:
    """Layout graph of the canonical `module`'s `main`.

    Args:
        module: the canonical module.
        axes: axis names of inputs, where they are known better than the module can tell (a kernel taken out of a
            model whose neighbours name its operands).

    Raises:
        ModelError: `main` is missing, or branches at run time.
    """
    return _Reader(module).graph(axes or {})


@dataclass(frozen=True)
class _Value:
    """What a Relax expression stands for: a tensor, or a tuple of values.

    Attributes:
        operand: the tensor; None for a tuple and for what is no tensor.
        fields: the fields of a tuple.
    """

    operand: Operand | None = None
    fields: tuple[_Value, ...] = ()

    @property
    def operands(self) -> list[Operand]:
        """All tensors, in order."""
        inner = [o for f in self.fields for o in f.operands]
        return [self.operand, *inner] if self.operand is not None else inner

    @classmethod
    def of(cls, tensors: Iterator[Operand], ty: Any) -> _Value:
        """The value of type `ty` that is made of the next of `tensors`."""
        if isinstance(ty, relax.TupleType):
            return cls(None, tuple(cls.of(tensors, f) for f in ty.fields))
        return cls(next(tensors)) if isinstance(ty, relax.TensorType) else cls()


class _Reader:
    def __init__(self, module: tvm.IRModule) -> None:
        names = {g.name_hint: g for g in module.get_global_vars()}
        if "main" not in names or not isinstance(module[names["main"]], relax.Function):
            raise ModelError("the module has no Relax function 'main'; pass a module whose entry is called main")
        self.main = module[names["main"]]
        self.module = module
        self.ids = op_ids(module)
        self.values: dict[relax.Var, _Value] = {}
        self.ops: list[OpNode] = []

    def graph(self, axes: Mapping[str, str]) -> LayoutGraph:
        inputs: list[TensorInfo] = []
        for param in self.main.params:
            inputs.extend(self._define(param))
        # A value that leaves a dataflow block does so in its original layout: only one block takes part.
        blocks = list(self.main.body.blocks)
        inside = max(
            (b for b in blocks if isinstance(b, relax.DataflowBlock)), key=lambda b: len(b.bindings), default=None
        )
        for block in blocks:
            for binding in block.bindings:
                self._bind(binding, inside is not None and block.same_as(inside))
        outputs = tuple(self._value(self.main.body.body).operands)
        return _without_views(_named(LayoutGraph(tuple(inputs), tuple(self.ops), outputs), axes))

    def _define(self, var: relax.Var) -> tuple[TensorInfo, ...]:
        """Tensors of a variable's own: of a parameter or a result."""
        tensors = _tensors(var.name, var.ty)
        self.values[var] = _Value.of((Operand(t.name, t) for t in tensors), var.ty)
        return tensors

    def _bind(self, binding: relax.Binding, inside: bool) -> None:
        var, value = binding.var, binding.value
        if isinstance(value, relax.If):
            raise ModelError(f"main branches at run time ({var.name} is an If); only straight models can be tuned")
        if isinstance(value, (relax.Var, relax.Tuple, relax.TupleGetItem, tvm.ir.GenericConst)) and not isinstance(
            binding, relax.MatchCast
        ):
            self.values[var] = self._value(value)
        else:
            self.ops.append(self._op(var, value, self._define(var), inside))

    def _op(self, var: relax.Var, value: relax.Expr, results: tuple[TensorInfo, ...], dataflow: bool) -> OpNode:
        is_call = isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op)
        op = value.op.name if is_call else f"{type(value).__name__.lower()}"
        attrs = _plain_attrs(value) if is_call else {}
        external = external_attrs(self.module, value)
        if external is not None:
            op, attrs = kinds.EXTERN_CALL, external
        arguments = value.args if isinstance(value, relax.Call) else [value]
        operands = tuple(o for a in arguments for o in self._value(a).operands)
        role = kinds.role_of(op)
        node = OpNode(
            name=var.name,
            id=self.ids.get(var.name, var.name),
            op=op,
            kind=kind_of(value) if is_call or external is not None else op,
            role=role,
            operands=operands,
            results=results,
            attrs=attrs,
        )
        why = "" if role is Role.FROZEN else _why_frozen(node, dataflow)
        return replace(node, role=Role.FROZEN, why_frozen=why) if why else node

    def _value(self, expr: relax.Expr) -> _Value:
        if isinstance(expr, relax.Var):
            return self.values[expr]
        if isinstance(expr, relax.Tuple):
            return _Value(None, tuple(self._value(f) for f in expr.fields))
        if isinstance(expr, relax.TupleGetItem):
            return self._value(expr.tuple_value).fields[expr.index]
        if isinstance(expr, tvm.ir.GenericConst):
            return _Value.of((Operand(None, t) for t in _tensors("", expr.ty)), expr.ty)
        return _Value()


def _tensors(name: str, ty: Any) -> tuple[TensorInfo, ...]:
    if isinstance(ty, relax.TensorType):
        shape = None
        if isinstance(ty.shape, relax.ShapeExpr):
            values = list(ty.shape.values)
            if all(isinstance(v, tvm.tirx.IntImm) for v in values):
                shape = tuple(int(v) for v in values)
        return (TensorInfo(name, shape, str(ty.dtype), axis_names(max(ty.ndim, 0))),)
    if isinstance(ty, relax.TupleType):
        fields = [_tensors(f"{name}.{i}", f) for i, f in enumerate(ty.fields)]
        return tuple(t for f in fields for t in f)
    return ()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tvm.tirx.IntImm, tvm.tirx.FloatImm)):
        return value.value
    if isinstance(value, relax.ShapeExpr):
        return tuple(_plain(v) for v in value.values)
    if isinstance(value, relax.Tuple):
        return tuple(_plain(f) for f in value.fields)
    if hasattr(value, "__iter__"):
        return tuple(_plain(v) for v in value)
    return str(value)


_ARGUMENTS = {kinds.SLICE: ("axes", "begin", "end", "strides")}


def _plain_attrs(call: relax.Call) -> dict[str, Any]:
    """Attributes, and the non-tensor arguments of the operators that have some, as plain Python values."""
    attrs = {}
    if call.attrs is not None:
        fields = call.attrs.keys() if hasattr(call.attrs, "keys") else _field_names(call.attrs)
        attrs = {
            str(k): _plain(call.attrs[k] if hasattr(call.attrs, "keys") else getattr(call.attrs, k)) for k in fields
        }
    for name, arg in zip(_ARGUMENTS.get(call.op.name, ()), call.args[1:], strict=False):
        attrs[name] = _plain(arg)
    return attrs


def _field_names(attrs: Any) -> list[str]:
    return [f.name for f in type(attrs).__tvm_ffi_type_info__.fields]


def _why_frozen(node: OpNode, dataflow: bool) -> str:
    if node.op == kinds.EXTERN_CALL and not node.attrs["declared"]:
        return f"external function {node.attrs['function']} declares no layouts"
    if node.op == kinds.EXTERN_CALL and (len(node.results) != 1 or len(node.operands) != node.attrs["arguments"]):
        return "an argument is no tensor, or it returns several"
    if not dataflow:
        return "it is bound outside the main dataflow block"
    tensors = [o.info for o in node.operands] + list(node.results)
    if any(t.shape is None for t in tensors):
        return "a shape is not static"
    axes = required_axes(node.op, node.attrs)
    if axes is not None and any(not a.isalpha() or not a.isupper() for a in axes if a):
        return f"the model already blocks it ({axes[0]})"
    if node.op == kinds.CONV and sorted(axes[1] if axes else "") != sorted("OIHW"):
        return f"unknown kernel layout {axes[1] if axes else ''}"
    if node.operands and len(node.operands[0].info.axes) != 4 and len(node.result.axes) != 4:
        return "it has no operand of four dimensions"
    if node.op in kinds.BROADCAST and any(0 < len(t.axes) < 4 or len(t.axes) > 4 for t in tensors):
        return "an operand has neither zero nor four dimensions"
    if node.op == kinds.PAD and node.attrs.get("pad_mode", "constant") != "constant":
        return f"pad mode {node.attrs['pad_mode']}"
    return ""


def _relations(graph: LayoutGraph) -> tuple[list[Relation], list[Pin]]:
    relations, pins = [], []
    for op in graph.ops:
        if op.role is Role.FROZEN:
            continue
        if op.op == kinds.EXTERN_CALL:
            named = [(o.tensor, n) for o, n in zip(op.operands, external_axes(op), strict=False)]
            named.append((op.result.name, external_axes(op)[-1]))
            pins += [Pin(op.name, tensor, names) for tensor, names in named if tensor is not None and names]
            continue
        axes = required_axes(op.op, op.attrs)
        if axes is not None:
            if op.operands[0].tensor is not None:
                pins.append(Pin(op.name, op.operands[0].tensor, axes[0]))
            if axes[1] and op.operands[1].tensor is not None:
                pins.append(Pin(op.name, op.operands[1].tensor, axes[1]))
            pins.append(Pin(op.name, op.result.name, axes[2]))
            continue
        others = [o.tensor for o in op.operands if o.tensor is not None and len(o.info.axes) == 4]
        others += [t.name for t in op.results if len(t.axes) == 4]
        if op.op == kinds.PERMUTE:
            order = op.attrs.get("axes") or tuple(reversed(range(4)))
            if op.operands[0].tensor is not None:
                relations.append(Relation(op.name, op.operands[0].tensor, op.result.name, tuple(a % 4 for a in order)))
            continue
        relations += [Relation(op.name, others[0], other) for other in others[1:]]
    return relations, pins


def _named(graph: LayoutGraph, known: Mapping[str, str]) -> LayoutGraph:
    """The same graph with axis names, and with the operators frozen whose names conflict."""
    relations, pins = _relations(graph)
    pins = [Pin("", name, names) for name, names in known.items() if len(names) == 4] + pins
    tensors = [t.name for t in graph.tensors.values() if len(t.axes) == 4]
    transposes = frozenset(op.name for op in graph.ops if op.op == kinds.PERMUTE)
    naming = assign_names(tensors, relations, pins, transposes)

    def rename(info: TensorInfo) -> TensorInfo:
        return replace(info, axes=naming.names[info.name]) if info.name in naming.names else info

    ops = []
    for op in graph.ops:
        results = tuple(rename(t) for t in op.results)
        operands = [Operand(o.tensor, rename(o.info)) for o in op.operands]
        axes = required_axes(op.op, op.attrs)
        common = axes[0] if axes else (results[0].axes if results else "")
        for index, operand in enumerate(operands):
            if operand.tensor is None and len(operand.info.axes) == 4 and op.role is not Role.FROZEN:
                name = axes[1] if axes and index == 1 else common
                if op.op == kinds.EXTERN_CALL:
                    name = external_axes(op)[index] or common
                operands[index] = Operand(None, replace(operand.info, axes=name))
        frozen = op.name in naming.set_apart
        ops.append(
            replace(
                op,
                results=results,
                operands=tuple(operands),
                role=Role.FROZEN if frozen else op.role,
                why_frozen="its axes mean different things on its two sides" if frozen else op.why_frozen,
            )
        )
    outputs = tuple(Operand(o.tensor, rename(o.info)) for o in graph.outputs)
    return LayoutGraph(tuple(rename(t) for t in graph.inputs), tuple(ops), outputs)


def _without_views(graph: LayoutGraph) -> LayoutGraph:
    """Let the consumers of every transpose that only renames axes read the tensor behind it."""
    views: dict[str, Operand] = {}

    def behind(operand: Operand) -> Operand:
        if operand.tensor in views:
            return Operand(views[operand.tensor].tensor, operand.info)
        return operand

    ops = []
    for op in graph.ops:
        operands = tuple(behind(o) for o in op.operands)
        if op.op == kinds.PERMUTE and op.role is Role.FLEXIBLE and operands[0].tensor is not None:
            views[op.result.name] = Operand(operands[0].tensor, op.result)
        else:
            role, why = op.role, op.why_frozen
            if op.op == kinds.PERMUTE and role is Role.FLEXIBLE:
                role, why = Role.FROZEN, "its operand is a constant"
            ops.append(replace(op, operands=operands, role=role, why_frozen=why))
    return LayoutGraph(graph.inputs, tuple(ops), tuple(behind(o) for o in graph.outputs), views)
