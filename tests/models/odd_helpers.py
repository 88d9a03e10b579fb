"""What the odd networks are built with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm
from tvm import relax

from tests.models.nets import Net, build

op = relax.op
SHAPE = (2, 8, 9, 12)


def params(*specs: tuple[Sequence[int | tvm.tirx.Var], str], body: Callable[..., relax.Expr]) -> tvm.IRModule:
    """A module whose inputs have given types; what `body` returns may be a tuple."""
    net = Net()
    inputs = [relax.Var(f"x{i}" if i else "x", relax.TensorType(list(s), d)) for i, (s, d) in enumerate(specs)]
    with net.builder.function("main", inputs):
        with net.builder.dataflow():
            output = net.builder.emit_output(net.builder.normalize(body(net, *inputs)))
        net.builder.emit_func_output(output)
    return net.builder.get()


def one(body: Callable[[Net, relax.Expr], relax.Expr], shape: Sequence[int] = SHAPE) -> tvm.IRModule:
    """A body between two convolutions."""
    return build(shape, body=lambda n, x: n.conv(body(n, n.conv_relu(x, 16)), 8, 1))


def tail(body: Callable[[Net, relax.Expr], relax.Expr], shape: Sequence[int] = SHAPE) -> tvm.IRModule:
    """A body after a convolution."""
    return build(shape, body=lambda n, x: n.emit(body(n, n.conv_relu(x, 16))))


def fields(n: Net, expr: relax.Expr, count: int) -> list[relax.Var]:
    whole = n.emit(expr)
    return [n.emit(relax.TupleGetItem(whole, i)) for i in range(count)]
