"""Small Relax networks with seeded weights: every shape of graph that layouts have to get through.

Unless said otherwise channels in and out differ and so do height and width, so that a mixed-up axis shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tvm
from tvm import relax

Build = Callable[["Net"], relax.Expr]


class Net:
    """Builds `main` of one module; weights are He-scaled and depend on the seed and their order alone."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.builder = relax.BlockBuilder()
        self.inputs: list[relax.Var] = []

    def emit(self, expr: relax.Expr) -> relax.Var:
        return self.builder.emit(expr)

    def const(self, shape: Sequence[int], scale: float = 1.0) -> relax.Expr:
        return relax.const((self.rng.normal(size=tuple(shape)) * scale).astype("float32"))

    def channels(self, x: relax.Expr) -> int:
        return int(x.ty.shape.values[1])

    def conv(
        self,
        x: relax.Expr,
        out: int,
        kernel: int | tuple[int, int] = 3,
        stride: int = 1,
        pad: int | None = None,
        groups: int = 1,
        bias: bool = True,
    ) -> relax.Var:
        """Convolution with `same` padding unless given, and a bias of (1, C, 1, 1)."""
        kh, kw = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = [kh // 2, kw // 2] if pad is None else [pad, pad]
        inner = self.channels(x) // groups
        weight = self.const((out, inner, kh, kw), np.sqrt(2 / (inner * kh * kw)))
        y = self.emit(relax.op.nn.conv2d(x, weight, strides=stride, padding=padding, groups=groups))
        return self.emit(relax.op.add(y, self.const((1, out, 1, 1), 0.1))) if bias else y

    def relu(self, x: relax.Expr) -> relax.Var:
        return self.emit(relax.op.nn.relu(x))

    def conv_relu(self, x: relax.Expr, out: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> relax.Var:
        return self.relu(self.conv(x, out, kernel, stride, groups=groups))

    def depthwise(self, x: relax.Expr, kernel: int = 3, stride: int = 1) -> relax.Var:
        return self.conv(x, self.channels(x), kernel, stride, groups=self.channels(x))


def build(
    *shapes: Sequence[int], body: Callable[..., relax.Expr], seed: int = 0, dataflow: bool = True
) -> tvm.IRModule:
    """A module whose `main` takes float32 tensors of `shapes` and returns `body(net, *inputs)`."""
    net = Net(seed)
    params = [relax.Var(f"x{i}" if i else "x", relax.TensorType(tuple(s), "float32")) for i, s in enumerate(shapes)]
    with net.builder.function("main", params):
        if dataflow:
            with net.builder.dataflow():
                output = net.builder.emit_output(body(net, *params))
        else:
            output = body(net, *params)
        net.builder.emit_func_output(output)
    return net.builder.get()


def stem(shape: Sequence[int] = (1, 3, 20, 28)) -> tvm.IRModule:
    """C=3 to 16 to 24, 3x3, stride 2."""
    return build(shape, body=lambda n, x: n.conv_relu(n.conv_relu(x, 16, stride=2), 24, stride=2))


def residual(shape: Sequence[int] = (1, 16, 10, 14), blocks: int = 2) -> tvm.IRModule:
    """Bottleneck blocks with a projection first and identity shortcuts after it."""

    def body(n: Net, x: relax.Expr) -> relax.Expr:
        for i in range(blocks):
            shortcut = x if i else n.conv(x, 32, 1)
            branch = n.conv(n.conv_relu(n.conv_relu(x, 16, 1), 16, 3), 32, 1)
            x = n.relu(n.emit(relax.op.add(branch, shortcut)))
        return x

    return build(shape, body=body)


def depthwise_separable(shape: Sequence[int] = (1, 8, 11, 13)) -> tvm.IRModule:
    """Pointwise, depthwise 3x3, pointwise."""
    return build(shape, body=lambda n, x: n.conv(n.relu(n.depthwise(n.conv_relu(x, 24, 1))), 16, 1))


def inverted_residuals(shape: Sequence[int] = (1, 8, 22, 18)) -> tvm.IRModule:
    """A stem and three inverted residual blocks, two of them alike, the last with stride 2, as in MobileNetV2."""

    def body(n: Net, x: relax.Expr) -> relax.Expr:
        x = n.conv_relu(x, 24, stride=2)
        for out, stride in ((24, 1), (24, 1), (40, 2)):
            y = n.conv(n.relu(n.depthwise(n.conv_relu(x, 48, 1), stride=stride)), out, 1)
            x = n.emit(relax.op.add(y, x)) if stride == 1 else y
        return x

    return build(shape, body=body)


def conv_pool_conv(shape: Sequence[int] = (1, 8, 12, 16)) -> tvm.IRModule:
    """Convolution, max pool, convolution."""

    def body(n: Net, x: relax.Expr) -> relax.Expr:
        pooled = n.emit(relax.op.nn.max_pool2d(n.conv_relu(x, 16), pool_size=3, strides=2, padding=1))
        return n.conv_relu(pooled, 24)

    return build(shape, body=body)


def concat_branches(shape: Sequence[int] = (1, 8, 9, 12)) -> tvm.IRModule:
    """A concat whose producers may want different blocks, then a pointwise convolution."""

    def body(n: Net, x: relax.Expr) -> relax.Expr:
        joined = n.emit(relax.op.concat([n.conv_relu(x, 16, 1), n.conv_relu(x, 24, 3)], axis=1))
        return n.conv(joined, 8, 1)

    return build(shape, body=body)


def grouped(shape: Sequence[int] = (1, 16, 9, 11)) -> tvm.IRModule:
    """groups=2 between dense convolutions."""
    return build(shape, body=lambda n, x: n.conv(n.relu(n.conv(n.conv_relu(x, 32), 48, groups=2)), 8, 1))


def argmax_tail(shape: Sequence[int] = (1, 8, 9, 11)) -> tvm.IRModule:
    """Convolution, argmax over the channels."""
    return build(shape, body=lambda n, x: n.emit(relax.op.argmax(n.conv(x, 16), axis=1)))


def channel_mean(shape: Sequence[int] = (1, 8, 9, 11)) -> tvm.IRModule:
    """Convolution, mean over the channels with keepdims, multiplied back."""

    def body(n: Net, x: relax.Expr) -> relax.Expr:
        y = n.conv(x, 16)
        return n.emit(relax.op.multiply(y, n.emit(relax.op.mean(y, axis=1, keepdims=True))))

    return build(shape, body=body)


def add_plane(shape: Sequence[int] = (1, 8, 9, 11)) -> tvm.IRModule:
    """Addition of a (1, 1, H, W) constant."""
    return build(shape, body=lambda n, x: n.conv(n.emit(relax.op.add(n.conv(x, 16), n.const((1, 1, 9, 11)))), 24, 1))


def transposed(shape: Sequence[int] = (1, 16, 7, 9), groups: int = 1, out: int = 32) -> tvm.IRModule:
    """conv2d_transpose of stride 2 with output_padding 1."""

    def body(n: Net, x: relax.Expr) -> relax.Expr:
        weight = n.const((n.channels(x), out // groups, 3, 3), 0.1)
        y = relax.op.nn.conv2d_transpose(x, weight, strides=2, padding=1, output_padding=1, groups=groups)
        return n.relu(n.emit(relax.op.add(n.emit(y), n.const((1, out, 1, 1), 0.1))))

    return build(shape, body=body)


def squeeze_after_conv() -> tvm.IRModule:
    """(2, 2, 1, 1) by (1, 2, 3, 1), stride 2, padding 3, then squeeze."""
    return build(
        (2, 2, 1, 1),
        body=lambda n, x: n.emit(relax.op.squeeze(n.conv(x, 1, (3, 1), stride=2, pad=3, bias=False), axis=[1])),
    )


def transposed_oihw() -> tvm.IRModule:
    """conv2d_transpose of (6, 3, 1, 1) with a kernel (1, 3, 1, 1) in OIHW order."""
    return build(
        (6, 3, 1, 1),
        body=lambda n, x: n.emit(relax.op.nn.conv2d_transpose(x, n.const((1, 3, 1, 1)), kernel_layout="OIHW")),
    )


def wrapped_in_transposes(shape: Sequence[int] = (1, 9, 11, 8)) -> tvm.IRModule:
    """Three convolutions, each wrapped in NHWC transposes, and an addition."""

    def wrapped(n: Net, x: relax.Expr, out: int) -> relax.Expr:
        y = n.conv(n.emit(relax.op.permute_dims(x, [0, 3, 1, 2])), out)
        return n.emit(relax.op.permute_dims(y, [0, 2, 3, 1]))

    def body(n: Net, x: relax.Expr) -> relax.Expr:
        a, b = wrapped(n, x, 16), wrapped(n, x, 16)
        return wrapped(n, n.emit(relax.op.add(a, b)), 24)

    return build(shape, body=body)


def diamond(shape: Sequence[int] = (1, 8, 9, 12)) -> tvm.IRModule:
    """Two branches of a shared ancestor, joined, with the ancestor read once more at the end."""

    def body(n: Net, x: relax.Expr) -> relax.Expr:
        top = n.conv_relu(x, 16)
        joined = n.emit(relax.op.add(n.conv_relu(top, 32, 1), n.conv_relu(top, 32, 3)))
        return n.emit(relax.op.concat([n.conv(joined, 16, 1), top], axis=1))

    return build(shape, body=body)


def classifier(shape: Sequence[int] = (2, 3, 16, 20)) -> tvm.IRModule:
    """Convolutions, global pooling and dense layers."""

    def body(n: Net, x: relax.Expr) -> relax.Expr:
        pooled = n.emit(relax.op.nn.adaptive_avg_pool2d(n.conv_relu(n.conv_relu(x, 16, stride=2), 32), (1, 1)))
        y = n.emit(relax.op.reshape(pooled, (shape[0], 32)))
        hidden = n.relu(n.emit(relax.op.add(n.emit(relax.op.matmul(y, n.const((32, 20), 0.2))), n.const((20,)))))
        return n.emit(relax.op.matmul(hidden, n.const((20, 10), 0.2)))

    return build(shape, body=body)


def without_dataflow(shape: Sequence[int] = (1, 8, 9, 11)) -> tvm.IRModule:
    """A function whose bindings are in no dataflow block."""
    return build(shape, body=lambda n, x: n.conv(n.conv_relu(x, 16), 24, 1), dataflow=False)


def without_convolution(shape: Sequence[int] = (4, 12)) -> tvm.IRModule:
    """Dense layers alone."""
    return build(shape, body=lambda n, x: n.emit(relax.op.matmul(n.relu(x), n.const((12, 5)))))


def mixed(shape: Sequence[int] = (2, 16, 12, 20)) -> tvm.IRModule:
    """Depthwise, concat, split, pooling, padding, clip and resize around a residual sum; batch 2."""

    def body(n: Net, x: relax.Expr) -> relax.Expr:
        y = n.emit(relax.op.clip(n.conv(x, 32), 0.0, 6.0))
        y = n.relu(n.emit(relax.op.add(n.depthwise(y), y)))
        halves = n.emit(relax.op.split(y, 2, axis=1))
        left, right = (n.emit(relax.TupleGetItem(halves, i)) for i in range(2))
        left = n.emit(relax.op.nn.avg_pool2d(left, pool_size=2, strides=2))
        padded = n.emit(relax.op.nn.pad(right, [0, 0, 0, 0, 1, 1, 1, 1], pad_value=-1.0))
        right = n.emit(relax.op.nn.max_pool2d(padded, pool_size=4, strides=2))
        joined = n.conv(n.emit(relax.op.concat([left, right], axis=1)), 48, 1)
        return n.emit(relax.op.image.resize2d(joined, (shape[2], shape[3]), layout="NCHW", method="nearest_neighbor"))

    return build(shape, body=body)


ALL: dict[str, Callable[[], tvm.IRModule]] = {
    build_net.__name__: build_net
    for build_net in (
        stem,
        residual,
        depthwise_separable,
        conv_pool_conv,
        concat_branches,
        grouped,
        argmax_tail,
        channel_mean,
        add_plane,
        transposed,
        squeeze_after_conv,
        transposed_oihw,
        wrapped_in_transposes,
        diamond,
        classifier,
        without_dataflow,
        without_convolution,
        mixed,
    )
}
