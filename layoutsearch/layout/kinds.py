"""Which Relax operators take part in the layout search, and how.

* *anchor*: the kernel depends on the layout; the operator carries its layouts as attributes.
* *flexible*: runs in any layout at about the same cost and passes it on.
* *frozen*: everything else; operands and results stay in their original layout.
"""

from __future__ import annotations

from enum import Enum


class Role(str, Enum):
    """What an operator is to the search."""

    ANCHOR = "anchor"
    FLEXIBLE = "flexible"
    FROZEN = "frozen"


CONV = "relax.nn.conv2d"
CONV_TRANSPOSE = "relax.nn.conv2d_transpose"
CONVOLUTIONS = frozenset({CONV, CONV_TRANSPOSE})
CONV_WINOGRAD = "layoutsearch.conv2d_winograd"
"""`CONV` by Winograd's algorithm, in converted modules only: its weights are transformed."""
CONV_EXTERN = "layoutsearch.conv2d_onednn"
"""`CONV` by an external library, in converted modules only: its weights are packed."""
EXTERN_CALL = "layoutsearch.extern"
"""A call of a function that a code generator of the user's makes."""
POOLS = frozenset({"relax.nn.max_pool2d", "relax.nn.avg_pool2d", "relax.nn.adaptive_avg_pool2d"})
RESIZE = "relax.image.resize2d"
ANCHORS = CONVOLUTIONS | POOLS | {RESIZE, EXTERN_CALL}

CONCAT = "relax.concat"
SPLIT = "relax.split"
PAD = "relax.nn.pad"
SLICE = "relax.strided_slice"
PERMUTE = "relax.permute_dims"
TRANSFORM = "relax.layout_transform"
SOFTMAX = frozenset({"relax.nn.softmax", "relax.nn.log_softmax"})
REDUCTIONS = frozenset({f"relax.{n}" for n in ("mean", "sum", "max", "min", "prod", "variance", "std")})

UNARY = frozenset(
    {
        f"relax.{n}"
        for n in (
            *("abs", "acos", "acosh", "asin", "asinh", "astype", "atan", "atanh", "bitwise_not", "ceil", "clip"),
            *("cos", "cosh", "erf", "exp", "floor", "isfinite", "isinf", "isnan", "log", "logical_not", "negative"),
            *("round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "trunc"),
            *("nn.gelu", "nn.gelu_tanh", "nn.leakyrelu", "nn.relu", "nn.selu", "nn.silu", "nn.softplus"),
        )
    }
)
BROADCAST = frozenset(
    {
        f"relax.{n}"
        for n in (
            *("add", "subtract", "multiply", "divide", "floor_divide", "power", "mod", "floor_mod", "atan2"),
            *("maximum", "minimum", "log_add_exp", "equal", "not_equal", "less", "less_equal", "greater"),
            *("greater_equal", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or"),
            *("bitwise_xor", "left_shift", "right_shift", "where", "ewise_fma"),
        )
    }
)
ELEMENTWISE = UNARY | BROADCAST
FLEXIBLE = ELEMENTWISE | REDUCTIONS | SOFTMAX | {CONCAT, SPLIT, PAD, SLICE, PERMUTE}

# What may start a fused kernel and be followed by elementwise operators (see groups.py).
MATMULS = frozenset({"relax.matmul"})
INJECTIVE = ELEMENTWISE | {CONCAT, PAD, SLICE, RESIZE}


def role_of(op: str) -> Role:
    """Role of a Relax operator by its full name; the operands may still make it frozen."""
    if op in ANCHORS:
        return Role.ANCHOR
    return Role.FLEXIBLE if op in FLEXIBLE else Role.FROZEN
