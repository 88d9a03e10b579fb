"""What follows a convolution in its kernel, in oneDNN's words: a bias, sums, activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvm import relax
from tvm.ir import GenericConst

from layoutsearch.contrib.onednn.library import Unsupported
from layoutsearch.layout.layout import Layout

_ADD, _MULTIPLY, _CLIP, _SIGMOID = "relax.add", "relax.multiply", "relax.clip", "relax.sigmoid"
_CLOSE = 1e-6
_MAX_POST = 16


@dataclass(frozen=True)
class Post:
    """One step: a function of the result so far, or of it and an operand.

    Attributes:
        word: what it is to the runtime.
        numbers: its parameters.
        operand: the other operand, None where there is none.
        shape: `f` for an operand of the result's shape, `c` for one value a channel, `s` for a single one.
    """

    word: str
    numbers: tuple[float, ...] = ()
    operand: relax.Expr | None = None
    shape: str = ""

    @property
    def text(self) -> str:
        """For the runtime."""
        if self.shape:
            return f"{self.word}:{self.shape}"
        return ":".join([self.word, *(f"{n:.9g}" for n in self.numbers)])


@dataclass(frozen=True)
class Epilogue:
    """A bias (one value a channel), if there is one, and the steps behind it."""

    bias: relax.Expr | None
    posts: tuple[Post, ...]

    @property
    def operands(self) -> tuple[relax.Expr, ...]:
        """The operands in the order in which the runtime takes them."""
        rest = [p.operand for p in self.posts if p.operand is not None]
        return (*([self.bias] if self.bias is not None else []), *rest)


def read_epilogue(bindings: Sequence[relax.Binding], layout: str, out: tuple[int, int, int, int]) -> Epilogue:
    """The epilogue of a kernel.

    Args:
        bindings: of the kernel, the convolution first.
        layout: in which it makes its result.
        out: logical (N, C, H, W) of that.

    Raises:
        Unsupported: oneDNN does not have it.
    """
    return _Reader(bindings, layout, out).read()


class _Reader:
    def __init__(self, bindings: Sequence[relax.Binding], layout: str, out: tuple[int, int, int, int]) -> None:
        self.bindings, self.layout, self.out = list(bindings), Layout(layout), out
        self.inside = {b.var for b in bindings}

    def read(self) -> Epilogue:
        posts: list[Post] = []
        bias: relax.Expr | None = None
        last, rest = self.bindings[0].var, self.bindings[1:]
        while rest:
            taken, steps = self._next(last, rest)
            if bias is None and not posts and steps[0].word == "add" and steps[0].shape == "c":
                bias = steps[0].operand
            else:
                posts += steps
            last, rest = rest[taken - 1].var, rest[taken:]
        posts = _merged(posts)
        if len(posts) > _MAX_POST:
            raise Unsupported(f"{len(posts)} steps behind a convolution")
        return Epilogue(bias, tuple(posts))

    def _next(self, last: relax.Var, rest: Sequence[relax.Binding]) -> tuple[int, list[Post]]:
        """How many bindings the next steps are, and what they are."""
        found = self._hard_swish(last, rest) or self._swish(last, rest)
        return found if found is not None else (1, self._step(last, rest[0].value))

    def _step(self, last: relax.Var, call: relax.Call) -> list[Post]:
        name = call.op.name
        operands = [a for a in call.args if isinstance(getattr(a, "ty", None), relax.TensorType)]
        if sum(a.same_as(last) for a in operands) != 1 or any(
            a in self.inside for a in operands if isinstance(a, relax.Var) and not a.same_as(last)
        ):
            raise Unsupported(f"{name} of more than one result")
        if len(operands) == 1:
            make = _UNARY.get(name)
            if make is None:
                raise Unsupported(name)
            return make(call)
        first = operands[0].same_as(last)
        other = operands[1] if first else operands[0]
        value = _scalar(other)
        if value is not None:
            return _by_scalar(name, value, first)
        word = _BINARY.get(name)
        if word is None or not (first or name in _COMMUTES):
            raise Unsupported(name)
        return [Post(word, (), other, self._shape(other))]

    def _shape(self, operand: relax.Expr) -> str:
        if str(operand.ty.dtype) != "float32" or len(operand.ty.shape.values) != self.layout.ndim:
            raise Unsupported(f"an operand of type {operand.ty}")
        logical = self.layout.logical_shape([int(s) for s in operand.ty.shape.values], "NCHW")
        if tuple(logical) == self.out and self.out != (1, 1, 1, 1):
            return "c" if self.out[0] == self.out[2] == self.out[3] == 1 else "f"
        if tuple(logical) == (1, self.out[1], 1, 1):
            return "c"
        if tuple(logical) == (1, 1, 1, 1):
            return "s"
        raise Unsupported(f"an operand of shape {tuple(logical)} beside {self.out}")

    def _hard_swish(self, last: relax.Var, rest: Sequence[relax.Binding]) -> tuple[int, list[Post]] | None:
        """x * clip(x + b, 0, h): oneDNN's x * clip(x / h + b / h, 0, 1), times h."""
        if len(rest) < 3:
            return None
        (add, clip, times), (t, u) = (b.value for b in rest[:3]), (b.var for b in rest[:2])
        shift = _scalar(_other(add, last)) if add.op.name == _ADD else None
        if shift is None or clip.op.name != _CLIP or not clip.args[0].same_as(t):
            return None
        low, high = (float(a.value) for a in clip.args[1:])
        if low != 0 or high <= 0 or times.op.name != _MULTIPLY or not _are(times.args, last, u):
            return None
        return 3, [Post("hardswish", (1 / high, shift / high)), Post("linear", (high, 0.0))]

    def _swish(self, last: relax.Var, rest: Sequence[relax.Binding]) -> tuple[int, list[Post]] | None:
        if len(rest) < 2:
            return None
        gate, times = rest[0].value, rest[1].value
        if gate.op.name != _SIGMOID or times.op.name != _MULTIPLY or not gate.args[0].same_as(last):
            return None
        return (2, [Post("swish", (1.0, 0.0))]) if _are(times.args, last, rest[0].var) else None


def _are(args: Sequence[relax.Expr], one: relax.Expr, other: relax.Expr) -> bool:
    a, b = args
    return (a.same_as(one) and b.same_as(other)) or (a.same_as(other) and b.same_as(one))


def _other(call: relax.Call, one: relax.Expr) -> relax.Expr | None:
    a, b = call.args
    return b if a.same_as(one) else a if b.same_as(one) else None


def _scalar(expr: relax.Expr | None) -> float | None:
    if isinstance(expr, GenericConst) and isinstance(expr.ty, relax.TensorType) and expr.ty.ndim == 0:
        return float(expr.value.numpy())
    return None


def _by_scalar(name: str, value: float, first: bool) -> list[Post]:
    linear = {
        _ADD: (1.0, value),
        _MULTIPLY: (value, 0.0),
        "relax.subtract": (1.0, -value) if first else (-1.0, value),
    }
    if name in linear:
        return [Post("linear", linear[name])]
    if name == "relax.divide" and first:
        return [Post("linear", (1 / value, 0.0))]
    if name == "relax.maximum":
        return [Post("clip", (value, float("inf")))]
    if name == "relax.minimum":
        return [Post("clip", (float("-inf"), value))]
    raise Unsupported(f"{name} with a number")


def _merged(posts: Sequence[Post]) -> list[Post]:
    """Neighbouring linear functions as one, and none where that changes nothing."""
    found: list[Post] = []
    for post in posts:
        if post.word == "linear" and found and found[-1].word == "linear":
            (a, b), (c, d) = found.pop().numbers, post.numbers
            post = Post("linear", (a * c, b * c + d))
        found.append(post)
    return [p for p in found if p.word != "linear" or abs(p.numbers[0] - 1) > _CLOSE or abs(p.numbers[1]) > _CLOSE]


_BINARY = {
    _ADD: "add",
    _MULTIPLY: "mul",
    "relax.subtract": "sub",
    "relax.divide": "div",
    "relax.maximum": "max",
    "relax.minimum": "min",
}
_COMMUTES = frozenset({_ADD, _MULTIPLY, "relax.maximum", "relax.minimum"})

_UNARY: Mapping[str, Callable[[relax.Call], list[Post]]] = {
    "relax.nn.relu": lambda _: [Post("relu", (0.0, 0.0))],
    "relax.nn.leakyrelu": lambda call: [Post("relu", (float(call.attrs.alpha), 0.0))],
    _CLIP: lambda call: [Post("clip", (float(call.args[1].value), float(call.args[2].value)))],
    _SIGMOID: lambda _: [Post("logistic", (0.0, 0.0))],
    "relax.nn.silu": lambda _: [Post("swish", (1.0, 0.0))],
    "relax.tanh": lambda _: [Post("tanh", (0.0, 0.0))],
    "relax.exp": lambda _: [Post("exp", (0.0, 0.0))],
    "relax.abs": lambda _: [Post("abs", (0.0, 0.0))],
    "relax.sqrt": lambda _: [Post("sqrt", (0.0, 0.0))],
}
