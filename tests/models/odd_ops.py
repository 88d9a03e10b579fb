"""Small Relax networks around one operator that layouts stumble over: slices, reductions, types, broadcasts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tvm
from tvm import relax

from tests.models.nets import Net, build
from tests.models.odd_helpers import SHAPE, fields, one, params, tail

op = relax.op


def concat_rows() -> tvm.IRModule:
    """Concat along the height, by a negative axis."""
    return one(lambda n, y: n.emit(op.concat([y, n.conv(y, 16, 1)], axis=-2)))


def concat_odd() -> tvm.IRModule:
    """Concat of 16 and 10 channels: no block fits both."""
    return one(lambda n, y: n.emit(op.concat([y, n.conv(y, 10, 1)], axis=1)))


def concat_constant() -> tvm.IRModule:
    """Concat with a constant."""
    return one(lambda n, y: n.emit(op.concat([y, n.const((2, 8, 9, 12))], axis=1)))


def split_uneven() -> tvm.IRModule:
    """Parts of 4 and 12 channels, joined the other way round."""

    def body(n: Net, y: relax.Expr) -> relax.Expr:
        a, b = fields(n, op.split(y, [4], axis=1), 2)
        return n.emit(op.concat([b, a], axis=1))

    return one(body)


def split_three() -> tvm.IRModule:
    """Two cuts, of which one part is not read."""

    def body(n: Net, y: relax.Expr) -> relax.Expr:
        a, _, c = fields(n, op.split(y, [8, 12], axis=-3), 3)
        return n.emit(op.concat([c, a], axis=1))

    return one(body)


def split_columns() -> tvm.IRModule:
    """Split along the width."""

    def body(n: Net, y: relax.Expr) -> relax.Expr:
        a, b = fields(n, op.split(y, 2, axis=3), 2)
        return n.emit(op.subtract(a, b))

    return one(body)


def mean_planes() -> tvm.IRModule:
    """Mean over height and width by negative axes, kept, as squeeze and excite does."""

    def body(n: Net, y: relax.Expr) -> relax.Expr:
        squeezed = n.emit(op.mean(y, axis=[-1, -2], keepdims=True))
        return n.emit(op.multiply(y, n.emit(op.sigmoid(n.conv(n.conv_relu(squeezed, 8, 1), 16, 1)))))

    return one(body)


def mean_without_axes() -> tvm.IRModule:
    """Mean over height and width, not kept, then a dense layer."""
    return tail(lambda n, y: op.matmul(n.emit(op.mean(y, axis=[-2, -1])), n.const((16, 5))))


def sum_channels() -> tvm.IRModule:
    """Sum over the channels, not kept: a (N, H, W) result."""
    return tail(lambda n, y: op.sum(y, axis=-3))


def total() -> tvm.IRModule:
    """Sum over everything, kept and not."""

    def body(n: Net, x: relax.Expr) -> relax.Expr:
        y = n.conv_relu(x, 16)
        return relax.Tuple([n.emit(op.sum(y)), n.emit(op.max(y, keepdims=True))])

    return params((SHAPE, "float32"), body=body)


def softmax_channels() -> tvm.IRModule:
    """Softmax over the channels by a negative axis."""
    return one(lambda n, y: n.emit(op.nn.softmax(y, axis=-3)))


def softmax_columns() -> tvm.IRModule:
    """Softmax over the width."""
    return one(lambda n, y: n.emit(op.nn.softmax(y, axis=-1)))


def slice_channels() -> tvm.IRModule:
    """Every second of the channels 4 to 16."""
    return one(lambda n, y: n.emit(op.strided_slice(y, [1], [4], [16], [2])))


def slice_planes() -> tvm.IRModule:
    """Rows from the first, columns up to the last but one, by negative axes and ends."""
    return one(lambda n, y: n.emit(op.strided_slice(y, [-2, -1], [1, 0], [9, -1])))


def slice_backwards() -> tvm.IRModule:
    """A flipped width."""
    return one(lambda n, y: n.emit(op.strided_slice(y, [3], [-1], [-13], [-1])))


def pad_channels() -> tvm.IRModule:
    """Channels padded from 16 to 24, rows on one side."""
    return one(lambda n, y: n.emit(op.nn.pad(y, [0, 0, 4, 4, 0, 2, 0, 0], pad_value=0.5)))


def pad_planes() -> tvm.IRModule:
    """Asymmetric constant padding of rows and columns."""
    return one(lambda n, y: n.emit(op.nn.pad(y, [0, 0, 0, 0, 1, 2, 3, 0], pad_value=-0.5)))


def clipped() -> tvm.IRModule:
    """Bounds on both sides."""
    return one(lambda n, y: n.emit(op.clip(n.conv(y, 16, 1), -0.25, 0.5)))


def average_with_padding() -> tvm.IRModule:
    """avg_pool2d that counts the padding, and one that does not, with ceil_mode."""

    def body(n: Net, y: relax.Expr) -> relax.Expr:
        a = n.emit(op.nn.avg_pool2d(y, (3, 2), (2, 3), padding=(1, 1), count_include_pad=True))
        return n.emit(op.nn.avg_pool2d(a, 3, 2, padding=1, ceil_mode=True, count_include_pad=False))

    return one(body)


def compared() -> tvm.IRModule:
    """Bool tensors between a comparison and a selection."""

    def body(n: Net, y: relax.Expr) -> relax.Expr:
        z = n.conv(y, 16, 1)
        return n.emit(op.where(n.emit(op.greater(y, z)), y, n.emit(op.multiply(z, relax.const(0.5, "float32")))))

    return one(body)


def bool_output() -> tvm.IRModule:
    """A bool output."""
    return tail(lambda n, y: op.less(y, n.const((1, 16, 1, 1))))


def integers() -> tvm.IRModule:
    """Integer inputs, cast before the convolution."""

    def body(n: Net, x: relax.Expr, mask: relax.Expr) -> relax.Expr:
        whole = n.emit(op.add(x, relax.const(1, "int32")))
        y = n.conv_relu(n.emit(op.astype(whole, "float32")), 16)
        return n.conv(n.emit(op.multiply(y, n.emit(op.astype(mask, "float32")))), 8, 1)

    return params((SHAPE, "int32"), ((2, 16, 9, 12), "int8"), body=body)


def outer_product() -> tvm.IRModule:
    """(N, C, 1, 1) times (N, 1, H, W): the result is larger than either."""

    def body(n: Net, y: relax.Expr) -> relax.Expr:
        planes = n.emit(op.max(y, axis=[1], keepdims=True))
        channels = n.emit(op.nn.adaptive_avg_pool2d(y, (1, 1)))
        return n.emit(op.add(n.emit(op.multiply(channels, planes)), y))

    return one(body)


def scalars() -> tvm.IRModule:
    """Scalar constants on either side."""
    return one(lambda n, y: n.emit(op.subtract(relax.const(1.5, "float32"), n.emit(op.multiply(y, relax.const(2.0))))))


def row_vector() -> tvm.IRModule:
    """A (W,) constant added."""
    return one(lambda n, y: n.emit(op.add(y, n.const((12,)))))


def asymmetric() -> tvm.IRModule:
    """Padding of four different sides, strides (2, 1), dilation (1, 2)."""

    def body(n: Net, x: relax.Expr) -> relax.Expr:
        weight = n.const((16, 8, 3, 3), 0.1)
        return n.relu(n.emit(op.nn.conv2d(x, weight, strides=(2, 1), padding=(0, 1, 2, 3), dilation=(1, 2))))

    return build(SHAPE, body=body)


def depth_multiplier() -> tvm.IRModule:
    """Two filters for each input channel."""
    return build(SHAPE, body=lambda n, x: n.conv(n.conv(n.conv_relu(x, 16), 32, groups=16), 8, 1))


def depthwise_transposed() -> tvm.IRModule:
    """conv2d_transpose with a group for each channel, and with two groups."""

    def body(n: Net, x: relax.Expr) -> relax.Expr:
        y = n.emit(op.nn.conv2d_transpose(n.conv_relu(x, 16), n.const((16, 1, 3, 3)), strides=2, groups=16))
        return n.emit(op.nn.conv2d_transpose(y, n.const((16, 16, 2, 2), 0.1), strides=2, groups=2))

    return build(SHAPE, body=body)


def normalized() -> tvm.IRModule:
    """layer_norm over the last axes of a convolution's result."""

    def body(n: Net, y: relax.Expr) -> relax.Expr:
        return n.emit(op.nn.layer_norm(y, n.const((9, 12)), n.const((9, 12)), axes=[-2, -1]))

    return one(body)


def parametric() -> tvm.IRModule:
    """prelu: an operator with an axis that has no layout inference here."""
    return one(lambda n, y: n.emit(op.nn.prelu(y, n.const((16,)), axis=1)))


def gathered() -> tvm.IRModule:
    """take along the channels: an operator without layout inference, then one along no axis of an image."""
    return one(lambda n, y: n.emit(op.take(y, relax.const(np.array([3, 1, 7, 7, 0, 2, 4, 9], "int64")), axis=1)))


def broadcast_image() -> tvm.IRModule:
    """broadcast_to: an operator without layout inference whose operand has one channel."""

    def body(n: Net, y: relax.Expr) -> relax.Expr:
        plane = n.conv(y, 1, 1)
        return n.emit(op.multiply(n.emit(op.broadcast_to(plane, (2, 16, 9, 12))), y))

    return one(body)


def stacked() -> tvm.IRModule:
    """stack and a reduction of five dimensions, as ONNX Sum comes."""

    def body(n: Net, y: relax.Expr) -> relax.Expr:
        return n.emit(op.sum(n.emit(op.stack([y, n.conv(y, 16, 1)], axis=0)), axis=0))

    return one(body)


def half_precision() -> tvm.IRModule:
    """float16 convolutions."""

    def body(n: Net, x: relax.Expr) -> relax.Expr:
        weight = relax.const((n.rng.normal(size=(16, 8, 3, 3)) * 0.1).astype("float16"))
        return n.relu(n.emit(op.nn.conv2d(x, weight, padding=1)))

    return params((SHAPE, "float16"), body=body)


ALL: dict[str, Callable[[], tvm.IRModule]] = {
    f.__name__: f
    for f in (
        concat_rows,
        concat_odd,
        concat_constant,
        split_uneven,
        split_three,
        split_columns,
        mean_planes,
        mean_without_axes,
        sum_channels,
        total,
        softmax_channels,
        softmax_columns,
        slice_channels,
        slice_planes,
        slice_backwards,
        pad_channels,
        pad_planes,
        clipped,
        average_with_padding,
        compared,
        bool_output,
        integers,
        outer_product,
        scalars,
        row_vector,
        asymmetric,
        depth_multiplier,
        depthwise_transposed,
        normalized,
        parametric,
        gathered,
        broadcast_image,
        stacked,
    )
}
"""Those of float32 weights."""
