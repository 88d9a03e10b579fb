"""Small Relax networks whose wiring is odd: ranks, tuples, shared tensors and weights, transposes."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax

from tests.models.nets import Net, build
from tests.models.odd_helpers import SHAPE, fields, one, params, tail

op = relax.op


def three_dimensions() -> tvm.IRModule:
    """A run-time (C, 1, 1) operand beside four-dimensional ones."""

    def body(n: Net, x: relax.Expr, bias: relax.Expr) -> relax.Expr:
        return n.conv(n.emit(op.add(n.conv(x, 16), bias)), 8, 1)

    return params((SHAPE, "float32"), ((16, 1, 1), "float32"), body=body)


def shuffle() -> tvm.IRModule:
    """Channel shuffle: five dimensions in between."""

    def body(n: Net, y: relax.Expr) -> relax.Expr:
        five = n.emit(op.permute_dims(n.emit(op.reshape(y, (2, 2, 8, 9, 12))), [0, 2, 1, 3, 4]))
        return n.emit(op.reshape(five, (2, 16, 9, 12)))

    return one(body)


def five_dimensions_add() -> tvm.IRModule:
    """Broadcast of a five-dimensional tensor against a four-dimensional one."""

    def body(n: Net, y: relax.Expr) -> relax.Expr:
        return op.add(y, n.const((3, 1, 16, 1, 1)))

    return tail(body)


def several_outputs() -> tvm.IRModule:
    """Three outputs: one also read inside, one twice, and the model's input."""

    def body(n: Net, x: relax.Expr) -> relax.Expr:
        y = n.conv_relu(x, 16)
        z = n.conv_relu(y, 24, 1)
        return relax.Tuple([y, z, x, y])

    return params((SHAPE, "float32"), body=body)


def nested_outputs() -> tvm.IRModule:
    """A nested tuple with a constant."""

    def body(n: Net, x: relax.Expr) -> relax.Expr:
        y = n.conv_relu(x, 16)
        z = n.emit(op.nn.max_pool2d(y, pool_size=2, strides=2))
        return relax.Tuple([y, relax.Tuple([n.const((1, 8, 2, 2)), relax.Tuple([z])])])

    return params((SHAPE, "float32"), body=body)


def input_as_output() -> tvm.IRModule:
    """A model that returns its input beside what it computes."""
    return params((SHAPE, "float32"), body=lambda n, x: relax.Tuple([x, n.conv(x, 16)]))


def split_output() -> tvm.IRModule:
    """The tuple of a split is the output."""
    return params((SHAPE, "float32"), body=lambda n, x: n.emit(op.split(n.conv_relu(x, 24), [8, 16], axis=1)))


def twice_added() -> tvm.IRModule:
    """The same tensor on both sides of an addition."""
    return one(lambda n, y: n.emit(op.multiply(y, y)))


def twice_joined() -> tvm.IRModule:
    """The same tensor twice in a concat."""
    return one(lambda n, y: n.emit(op.concat([y, y, n.relu(y)], axis=1)))


def shared_weight() -> tvm.IRModule:
    """Two convolutions of different geometry with one kernel constant."""

    def body(n: Net, x: relax.Expr) -> relax.Expr:
        weight = n.const((8, 8, 3, 3), 0.1)
        y = n.emit(op.nn.conv2d(x, weight, padding=1))
        return n.emit(op.add(n.emit(op.nn.conv2d(y, weight, padding=2, dilation=2)), y))

    return build(SHAPE, body=body)


def weight_inputs() -> tvm.IRModule:
    """Kernels that are inputs of the model, one of them read by two convolutions."""

    def body(n: Net, x: relax.Expr, w: relax.Expr, v: relax.Expr) -> relax.Expr:
        y = n.relu(n.emit(op.nn.conv2d(x, w, padding=1)))
        z = n.emit(op.nn.conv2d(y, v))
        return n.emit(op.nn.conv2d(n.emit(op.nn.conv2d(z, w, padding=1)), v))

    return params((SHAPE, "float32"), ((16, 8, 3, 3), "float32"), ((8, 16, 1, 1), "float32"), body=body)


def permuted_weight() -> tvm.IRModule:
    """A kernel that arrives as HWIO and is transposed to OIHW in the model."""

    def body(n: Net, x: relax.Expr, w: relax.Expr) -> relax.Expr:
        return n.emit(op.nn.conv2d(x, n.emit(op.permute_dims(w, [3, 2, 0, 1])), padding=1))

    return params((SHAPE, "float32"), ((3, 3, 8, 16), "float32"), body=body)


def scaled_weight() -> tvm.IRModule:
    """A kernel input that is computed on before use."""

    def body(n: Net, x: relax.Expr, w: relax.Expr) -> relax.Expr:
        return n.emit(op.nn.conv2d(x, n.emit(op.multiply(w, relax.const(0.5, "float32"))), padding=1))

    return params((SHAPE, "float32"), ((16, 8, 3, 3), "float32"), body=body)


def data_as_kernel() -> tvm.IRModule:
    """A tensor that one convolution makes and another takes for its kernel."""

    def body(n: Net, x: relax.Expr, y: relax.Expr) -> relax.Expr:
        kernel = n.conv_relu(y, 8, 1)
        return n.emit(op.nn.conv2d(n.conv_relu(x, 8), kernel))

    return params((SHAPE, "float32"), ((16, 8, 3, 3), "float32"), body=body)


def channels_last() -> tvm.IRModule:
    """Convolutions, pool and resize whose attributes are NHWC from the start."""

    def body(n: Net, x: relax.Expr) -> relax.Expr:
        last = {"data_layout": "NHWC", "kernel_layout": "HWIO"}
        y = n.relu(n.emit(op.nn.conv2d(x, n.const((3, 3, 8, 16), 0.1), padding=1, **last)))
        y = n.emit(op.nn.max_pool2d(y, 2, 2, layout="NHWC"))
        y = n.emit(op.image.resize2d(y, (9, 11), layout="NHWC", method="linear"))
        y = n.emit(op.concat([y, n.emit(op.mean(y, axis=[3], keepdims=True))], axis=3))
        return n.emit(op.nn.conv2d(y, n.const((1, 1, 17, 8), 0.2), **last))

    return build((2, 9, 12, 8), body=body)


def misnamed_pool() -> tvm.IRModule:
    """A pool that takes the (N, C, H, W) of a convolution for NHWC."""
    return one(lambda n, y: n.emit(op.nn.max_pool2d(y, (3, 1), layout="NHWC")), (2, 8, 9, 16))


def transpose_as_data() -> tvm.IRModule:
    """A transpose whose result is added to its operand: the names conflict."""

    def body(n: Net, y: relax.Expr) -> relax.Expr:
        return n.emit(op.add(y, n.emit(op.permute_dims(y, [0, 1, 3, 2]))))

    return one(body, (2, 8, 9, 9))


def transposed_output() -> tvm.IRModule:
    """The output is a transpose of what a convolution made, returned with the tensor itself."""

    def body(n: Net, x: relax.Expr) -> relax.Expr:
        y = n.conv_relu(x, 16)
        return relax.Tuple([n.emit(op.permute_dims(y, [0, 2, 3, 1])), y])

    return params((SHAPE, "float32"), body=body)


def transposed_input_output() -> tvm.IRModule:
    """The output is a transpose of the model's input."""

    def body(n: Net, x: relax.Expr) -> relax.Expr:
        return relax.Tuple([n.emit(op.permute_dims(x, [0, 2, 3, 1])), n.conv(x, 16)])

    return params((SHAPE, "float32"), body=body)


def transposed_split() -> tvm.IRModule:
    """A field of a split is transposed, computed on, and transposed back."""

    def body(n: Net, y: relax.Expr) -> relax.Expr:
        a, b = fields(n, op.split(y, 2, axis=1), 2)
        last = n.relu(n.emit(op.permute_dims(a, [0, 2, 3, 1])))
        return n.emit(op.concat([n.emit(op.permute_dims(last, [0, 3, 1, 2])), b], axis=1))

    return one(body)


def flattened() -> tvm.IRModule:
    """Flattened in NHWC order, as a model converted from TensorFlow does it."""

    def body(n: Net, y: relax.Expr) -> relax.Expr:
        last = n.emit(op.permute_dims(y, [0, 2, 3, 1]))
        return op.matmul(n.emit(op.reshape(last, (2, 9 * 12 * 16))), n.const((9 * 12 * 16, 4), 0.02))

    return tail(body)


def attention() -> tvm.IRModule:
    """Matmuls of four-dimensional tensors between convolutions: axes without a meaning of their own."""

    def body(n: Net, y: relax.Expr) -> relax.Expr:
        scores = n.emit(op.nn.softmax(n.emit(op.matmul(y, n.emit(op.permute_dims(y, [0, 1, 3, 2])))), axis=-1))
        return n.emit(op.matmul(scores, y))

    return one(body)


def conv_of_constant() -> tvm.IRModule:
    """A convolution of a constant image with a kernel input."""

    def body(n: Net, w: relax.Expr) -> relax.Expr:
        return n.relu(n.emit(op.nn.conv2d(n.const(SHAPE), w, padding=1)))

    return params(((16, 8, 3, 3), "float32"), body=body)


def single_pixel() -> tvm.IRModule:
    """1x1 images and one channel: most extents are 1."""
    return build((1, 1, 1, 1), body=lambda n, x: n.conv(n.conv_relu(n.conv(x, 8, 1), 8, 1), 1, 1))


def squeezed() -> tvm.IRModule:
    """Squeeze after (2, 2, 1, 1) by (1, 2, 3, 3), stride 2, padding 3, where the image does show in the output."""
    return build(
        (2, 2, 1, 1), body=lambda n, x: n.emit(op.squeeze(n.conv(x, 1, 3, stride=2, pad=3, bias=False), axis=[1]))
    )


def symbolic_batch() -> tvm.IRModule:
    """A batch size that is only known at run time."""
    batch = tvm.tirx.Var("n", "int64")
    return params(((batch, 8, 9, 12), "float32"), body=lambda n, x: n.conv(n.conv_relu(x, 16), 8, 1))


def joined_parts() -> tvm.IRModule:
    """A concat that takes the whole tuple of a split, and one part of it once more."""

    def body(n: Net, y: relax.Expr) -> relax.Expr:
        parts = n.emit(op.split(y, 2, axis=1))
        first, again = n.emit(relax.TupleGetItem(parts, 0)), n.emit(relax.TupleGetItem(parts, 0))
        joined = n.emit(op.concat(parts, axis=1))
        return n.emit(op.concat([n.conv(first, 8, 1), joined, n.conv(again, 8)], axis=1))

    return one(body)


def tuple_input() -> tvm.IRModule:
    """An input that is a (nested) tuple of tensors."""
    image = relax.TensorType(SHAPE, "float32")
    net = Net()
    x = relax.Var("x", relax.TupleType([image, relax.TupleType([relax.TensorType((), "float32"), image])]))
    with net.builder.function("main", [x]):
        with net.builder.dataflow():
            a, rest = net.emit(relax.TupleGetItem(x, 0)), net.emit(relax.TupleGetItem(x, 1))
            scale, b = net.emit(relax.TupleGetItem(rest, 0)), net.emit(relax.TupleGetItem(rest, 1))
            y = net.emit(op.multiply(net.emit(op.add(net.conv(a, 16), net.conv(b, 16))), scale))
            output = net.builder.emit_output(relax.Tuple([net.conv(y, 8, 1), rest]))
        net.builder.emit_func_output(output)
    return net.builder.get()


ALL: dict[str, Callable[[], tvm.IRModule]] = {
    f.__name__: f
    for f in (
        three_dimensions,
        shuffle,
        five_dimensions_add,
        several_outputs,
        nested_outputs,
        input_as_output,
        split_output,
        twice_added,
        twice_joined,
        shared_weight,
        weight_inputs,
        permuted_weight,
        scaled_weight,
        data_as_kernel,
        channels_last,
        misnamed_pool,
        transpose_as_data,
        transposed_output,
        transposed_input_output,
        transposed_split,
        flattened,
        attention,
        conv_of_constant,
        single_pixel,
        squeezed,
        joined_parts,
    )
}
"""Those with static shapes whose inputs are tensors."""
