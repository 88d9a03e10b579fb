"""Inference forms of layers that only do something in training: batch normalisation and dropout."""

from __future__ import annotations

import numpy as np
from tvm import relax

from layoutsearch.model.passes.rewriter import Expr, Scope, dtype_of, static_shape


def expand_batch_norm(item: relax.TupleGetItem, call: relax.Call, scope: Scope) -> Expr | None:
    """The output of `nn.batch_norm` becomes a product and a sum with one factor and one offset a channel.

    Constant statistics are folded afterwards, and into the convolution in front where there is one.
    """
    data, gamma, beta, mean, variance = call.args
    attrs, shape = call.attrs, static_shape(data)
    if attrs.training or shape is None:
        return None
    if item.index > 0:
        return (mean, variance)[item.index - 1]
    dtype = dtype_of(data)
    axis = int(attrs.axis) % len(shape)
    epsilon = relax.const(np.asarray(float(attrs.epsilon), dtype))
    scale: Expr = scope.emit(relax.op.rsqrt(scope.emit(relax.op.add(variance, epsilon))))
    if attrs.scale:
        scale = scope.emit(relax.op.multiply(scale, gamma))
    offset: Expr = scope.emit(relax.op.negative(scope.emit(relax.op.multiply(scale, mean))))
    if attrs.center:
        offset = scope.emit(relax.op.add(offset, beta))
    wide = [1] * len(shape)
    wide[axis] = shape[axis]
    scaled = scope.emit(relax.op.multiply(data, scope.emit(relax.op.reshape(scale, wide))))
    return relax.op.add(scaled, scope.emit(relax.op.reshape(offset, wide)))


def drop_dropout(item: relax.TupleGetItem, call: relax.Call, scope: Scope) -> Expr | None:
    """Dropout passes its input on at inference."""
    return call.args[0] if item.index == 0 else None


ITEM_RULES = {"relax.nn.batch_norm": [expand_batch_norm], "relax.nn.dropout": [drop_dropout]}
