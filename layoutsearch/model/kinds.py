"""What an operation is, for rules, plans and people: the most specific name of its kind."""

from __future__ import annotations

from tvm import relax
from tvm.ir import GlobalVar, Op

from layoutsearch.layout.layout import Layout

_RENAMED = {"call_dps_packed": "extern", "call_pure_packed": "extern"}


def _conv2d_kind(call: relax.Call) -> str:
    attrs = call.attrs
    layout = Layout(str(attrs.kernel_layout))
    physical = [int(getattr(e, "value", -1)) for e in call.args[1].ty.shape.values]
    kernel = dict(zip("OIHW", layout.logical_shape(physical, "OIHW"), strict=True))
    groups = int(attrs.groups)
    if groups == 1:
        return "conv2d_pointwise" if (kernel["H"], kernel["W"]) == (1, 1) else "conv2d"
    return "conv2d_depthwise" if kernel["I"] == 1 else "conv2d_grouped"


def kind_of(call: relax.Call) -> str:
    """Kind of a call.

    A convolution of one group with a 1x1 kernel is `conv2d_pointwise`; one with a group for each input channel is
    `conv2d_depthwise`; with other groups `conv2d_grouped`; else `conv2d`. A call of another function or of an external
    one is `extern`. Everything else has the last component of its op's name: `conv2d_transpose`, `max_pool2d`, `add`.
    """
    if isinstance(call.op, GlobalVar | relax.ExternFunc) or not isinstance(call.op, Op):
        return "extern"
    name = call.op.name.rsplit(".", 1)[-1]
    if call.op.name == "relax.nn.conv2d" and isinstance(call.args[1].ty.shape, relax.ShapeExpr):
        return _conv2d_kind(call)
    return _RENAMED.get(name, name)
