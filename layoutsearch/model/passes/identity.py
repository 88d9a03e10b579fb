"""Calls that only rename their operand, and views of views."""

from __future__ import annotations

from tvm import relax

from layoutsearch.model.passes.rewriter import Expr, Scope, dtype_of, op_name, static_shape

VIEWS = ("relax.reshape", "relax.squeeze", "relax.expand_dims", "relax.flatten", "relax.nn.batch_flatten")


def same_shape(call: relax.Call, scope: Scope) -> Expr | None:
    """A view, a broadcast or a cast to what the operand already is, is the operand."""
    before, after = static_shape(call.args[0]), static_shape(call)
    if before is None or before != after or dtype_of(call.args[0]) != dtype_of(call):
        return None
    return call.args[0]


def view_of_view(call: relax.Call, scope: Scope) -> Expr | None:
    """A view of a view is one reshape."""
    inner, shape = scope.definition(call.args[0]), static_shape(call)
    if op_name(inner) not in VIEWS or shape is None or static_shape(inner.args[0]) is None:
        return None
    return relax.op.reshape(inner.args[0], shape)


def _order(call: relax.Call) -> list[int]:
    rank = len(static_shape(call) or ())
    axes = call.attrs.axes
    return list(reversed(range(rank))) if axes is None else [int(a) % rank for a in axes]


def compose_transposes(call: relax.Call, scope: Scope) -> Expr | None:
    """A transpose that moves nothing is dropped; a transpose of a transpose is one."""
    if static_shape(call) is None:
        return None
    order = _order(call)
    if order == sorted(order):
        return call.args[0]
    inner = scope.definition(call.args[0])
    if op_name(inner) != "relax.permute_dims" or static_shape(inner) is None:
        return None
    first = _order(inner)
    return relax.op.permute_dims(inner.args[0], [first[axis] for axis in order])


def concat_of_one(call: relax.Call, scope: Scope) -> Expr | None:
    """A concatenation of one tensor is that tensor."""
    fields = call.args[0].fields if isinstance(call.args[0], relax.Tuple) else []
    return fields[0] if len(fields) == 1 else None


RULES = {
    **{name: [same_shape, view_of_view] for name in VIEWS},
    "relax.broadcast_to": [same_shape],
    "relax.astype": [same_shape],
    "relax.permute_dims": [compose_transposes],
    "relax.concat": [concat_of_one],
}
