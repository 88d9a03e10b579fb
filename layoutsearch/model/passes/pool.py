"""Global average pooling in one spelling: `nn.adaptive_avg_pool2d` to 1x1."""

from __future__ import annotations

from tvm import relax

from layoutsearch.model.passes.rewriter import Expr, Scope, is_float, static_shape


def mean_to_pool(call: relax.Call, scope: Scope) -> Expr | None:
    """A mean over the two last axes of a rank-4 tensor is a global pool, and a squeeze without keepdims."""
    shape, axes = static_shape(call.args[0]), call.attrs.axis
    if shape is None or len(shape) != 4 or axes is None or not is_float(call):
        return None
    if sorted(int(a) % 4 for a in axes) != [2, 3]:
        return None
    pool = relax.op.nn.adaptive_avg_pool2d(call.args[0], output_size=(1, 1), layout="NCHW")
    return pool if call.attrs.keepdims else relax.op.squeeze(scope.emit(pool), axis=[2, 3])


def whole_window_to_global(call: relax.Call, scope: Scope) -> Expr | None:
    """An average over a window that is the whole image, without padding, is a global pool."""
    shape, attrs = static_shape(call.args[0]), call.attrs
    layout = str(attrs.layout)
    if shape is None or len(shape) != 4 or len(layout) != 4 or layout != str(attrs.out_layout):
        return None
    image = [shape[layout.index("H")], shape[layout.index("W")]]
    dense = all(int(d) == 1 for d in attrs.dilation) and not any(int(p) for p in attrs.padding)
    if [int(k) for k in attrs.pool_size] != image or not dense:
        return None
    return relax.op.nn.adaptive_avg_pool2d(call.args[0], output_size=(1, 1), layout=layout)


RULES = {"relax.mean": [mean_to_pool], "relax.nn.avg_pool2d": [whole_window_to_global]}
