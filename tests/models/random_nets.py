"""A Hypothesis strategy for small networks of everything that takes part in the search."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm
from hypothesis import strategies as st
from tvm import relax

from tests.models.nets import Net, build

op = relax.op
CHANNELS = (4, 8, 12, 16)


def _planes(x: relax.Expr) -> tuple[int, int]:
    return int(x.ty.shape.values[2]), int(x.ty.shape.values[3])


def _conv(draw: st.DrawFn, n: Net, x: relax.Expr) -> relax.Expr:
    kernel, groups = draw(st.sampled_from([1, 3])), draw(st.sampled_from([1, 1, 2]))
    stride = draw(st.sampled_from([1, 1, 2])) if min(_planes(x)) > 3 else 1
    groups = groups if n.channels(x) % 2 == 0 else 1
    return n.conv(x, draw(st.sampled_from(CHANNELS)), kernel, stride, groups=groups)


def _depthwise(draw: st.DrawFn, n: Net, x: relax.Expr) -> relax.Expr:
    return n.depthwise(x)


def _transposed(draw: st.DrawFn, n: Net, x: relax.Expr) -> relax.Expr:
    if max(_planes(x)) > 8:
        return x
    weight = n.const((n.channels(x), draw(st.sampled_from(CHANNELS)), 3, 3), 0.1)
    return n.emit(op.nn.conv2d_transpose(x, weight, strides=2, padding=1, output_padding=1))


def _pool(draw: st.DrawFn, n: Net, x: relax.Expr) -> relax.Expr:
    pool = draw(st.sampled_from([op.nn.max_pool2d, op.nn.avg_pool2d]))
    return n.emit(pool(x, pool_size=3, strides=draw(st.sampled_from([1, 2])), padding=1))


def _elementwise(draw: st.DrawFn, n: Net, x: relax.Expr) -> relax.Expr:
    make = draw(
        st.sampled_from(
            [
                op.nn.relu,
                op.sigmoid,
                lambda y: op.clip(y, -0.5, 1.0),
                lambda y: op.multiply(y, relax.const(0.5, "float32")),
                lambda y: op.multiply(y, n.const((1, n.channels(x), 1, 1))),
                lambda y: op.add(y, n.const((1, 1, *_planes(x)), 0.1)),
            ]
        )
    )
    return n.emit(make(x))


def _hard_swish(draw: st.DrawFn, n: Net, x: relax.Expr) -> relax.Expr:
    gate = n.emit(op.clip(n.emit(op.add(x, relax.const(3.0, "float32"))), 0.0, 6.0))
    return n.emit(op.multiply(x, gate))


def _residual(draw: st.DrawFn, n: Net, x: relax.Expr) -> relax.Expr:
    return n.emit(op.add(n.conv(n.conv_relu(x, draw(st.sampled_from(CHANNELS)), 1), n.channels(x)), x))


def _concat(draw: st.DrawFn, n: Net, x: relax.Expr) -> relax.Expr:
    return n.emit(op.concat([n.conv(x, draw(st.sampled_from(CHANNELS)), 1), x], axis=1))


def _split(draw: st.DrawFn, n: Net, x: relax.Expr) -> relax.Expr:
    channels = n.channels(x)
    cut = draw(st.integers(1, channels - 1)) if channels > 1 else 0
    if not cut:
        return x
    parts = n.emit(op.split(x, [cut], axis=1))
    left, right = (n.emit(relax.TupleGetItem(parts, i)) for i in range(2))
    return n.emit(op.concat([n.relu(right), left], axis=1))


def _excite(draw: st.DrawFn, n: Net, x: relax.Expr) -> relax.Expr:
    squeezed = n.emit(op.mean(x, axis=[2, 3], keepdims=True))
    return n.emit(op.multiply(x, n.emit(op.sigmoid(n.conv(squeezed, n.channels(x), 1)))))


def _pad(draw: st.DrawFn, n: Net, x: relax.Expr) -> relax.Expr:
    widths = [draw(st.integers(0, 1)) for _ in range(4)]
    return n.emit(op.nn.pad(x, [0, 0, 0, 0, *widths], pad_value=0.25))


def _slice(draw: st.DrawFn, n: Net, x: relax.Expr) -> relax.Expr:
    axis = draw(st.sampled_from([-3, 2, 3]))
    extent = int(x.ty.shape.values[axis])
    return n.emit(op.strided_slice(x, [axis], [0], [extent], [2])) if extent > 2 else x


def _resize(draw: st.DrawFn, n: Net, x: relax.Expr) -> relax.Expr:
    height, width = _planes(x)
    size = (min(height + 1, 8), min(width + 2, 8))
    return n.emit(op.image.resize2d(x, size, layout="NCHW", method=draw(st.sampled_from(["linear", "cubic"]))))


def _softmax(draw: st.DrawFn, n: Net, x: relax.Expr) -> relax.Expr:
    return n.emit(op.nn.softmax(x, axis=draw(st.sampled_from([1, -1]))))


def _channels_last(draw: st.DrawFn, n: Net, x: relax.Expr) -> relax.Expr:
    last = n.relu(n.emit(op.permute_dims(x, [0, 2, 3, 1])))
    return n.emit(op.permute_dims(last, [0, 3, 1, 2]))


def _frozen(draw: st.DrawFn, n: Net, x: relax.Expr) -> relax.Expr:
    shape = [int(s) for s in x.ty.shape.values]
    flat = n.emit(op.reshape(x, (shape[0], -1)))
    return n.emit(op.reshape(n.emit(op.nn.relu(flat)), shape))


STEPS: Sequence[Callable[[st.DrawFn, Net, relax.Expr], relax.Expr]] = (
    *(_conv, _conv, _depthwise, _transposed, _pool, _elementwise, _hard_swish, _residual, _concat, _split),
    *(_excite, _pad, _slice, _resize, _softmax, _channels_last, _frozen),
)


@st.composite
def nets(draw: st.DrawFn) -> tvm.IRModule:
    """A convolution and two to five steps after it; sometimes an inner result is returned as well."""
    shape = (draw(st.sampled_from([1, 2])), draw(st.sampled_from([3, 8])), 5, 7)

    def body(n: Net, x: relax.Expr) -> relax.Expr:
        y = n.conv_relu(x, draw(st.sampled_from(CHANNELS)))
        first = y
        for _ in range(draw(st.integers(2, 5))):
            y = draw(st.sampled_from(STEPS))(draw, n, y)
        if draw(st.booleans()) and not first.same_as(y):
            return relax.Tuple([y, first])
        return y

    return build(shape, body=body, seed=draw(st.integers(0, 3)))
