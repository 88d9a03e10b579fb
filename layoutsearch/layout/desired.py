"""Layouts that are wanted beside a search space, in the words of TVM's ConvertLayout: `nn.conv2d=NHWC:HWIO`.

A key says which operators are meant, from the most specific to the least: an operator's id or name; a pattern of them
(`conv2d_depthwise:*`); a kind of convolution (`nn.conv2d_depthwise`, `_pointwise`, `_grouped`, `_dense`); an operator
of TVM (`nn.avg_pool2d`); `default`, everything that is layout-sensitive. More specific wins, in whatever order.

A value is `DATA`, `DATA:KERNEL` or `DATA:KERNEL:OUT`, or a pattern as in search-space files; several alternatives are
separated by commas. Without a kernel, the search may take any kernel layout and algorithm between these layouts.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from layoutsearch.errors import SpaceError
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.matching import named
from layoutsearch.layout.patterns import admits, as_pattern, check_value, sides

OPTION = "--desired-layout"
DEFAULT = "default"
_KINDS = {
    "conv2d_depthwise": "conv2d_depthwise",
    "conv2d_pointwise": "conv2d_pointwise",
    "conv2d_grouped": "conv2d_grouped",
    "conv2d_dense": "conv2d",
}

DesiredLayouts: TypeAlias = Mapping[str, str | Sequence[str]] | Iterable[str]


class Operator(Protocol):
    """What a key may say of an operator; `layout.graph.OpNode` is one."""

    @property
    def id(self) -> str:
        """Stable id."""

    @property
    def name(self) -> str:
        """Bound variable of the canonical module."""

    @property
    def op(self) -> str:
        """TVM's name, with `relax.`."""

    @property
    def kind(self) -> str:
        """Most specific kind."""

    @property
    def role(self) -> Role:
        """What it is to the search."""


@dataclass(frozen=True)
class Desired:
    """What is wanted of some operators.

    Attributes:
        key: which operators, without `relax.`, and without `nn.` where it is a kind.
        values: alternatives, as they were given.
        option: that said so, for messages.
    """

    key: str
    values: tuple[str, ...]
    option: str = OPTION

    def __str__(self) -> str:
        key = f"nn.{self.key}" if self.key in _KINDS else self.key
        return f"{self.option} {key}={','.join(self.values)}"

    @property
    def patterns(self) -> tuple[str, ...]:
        """The alternatives as patterns of a search space."""
        return tuple(as_pattern(value) for value in self.values)

    @property
    def sides(self) -> list[tuple[str, str]]:
        """Data and out layout of each alternative."""
        return [sides(pattern) for pattern in self.patterns]

    def admits(self, candidate: Candidate) -> bool:
        """Whether a candidate is as one of the alternatives says; what that leaves open may be anything."""
        return any(admits(pattern, candidate) for pattern in self.patterns)

    def rank(self, op: Operator) -> int:
        """How specific the key is about `op`: 5 for its id or name, 1 for `default`, 0 where it is not meant."""
        if self.key in (op.id, op.name):
            return 5
        if is_pattern(self.key):
            return 4 if named(self.key, op.id, op.name) else 0
        if self.key in _KINDS:
            return 3 if op.kind == _KINDS[self.key] else 0
        if op.op == f"relax.{self.key}":
            return 2
        return 1 if self.key == DEFAULT and op.role is Role.ANCHOR else 0


def is_pattern(key: str) -> bool:
    """Whether a key is a pattern of ids or names."""
    return bool(set("*?") & set(key))


def parse_desired(given: DesiredLayouts | None, option: str = OPTION) -> tuple[Desired, ...]:
    """Read `KEY=VALUE` texts, or a mapping as ConvertLayout takes it: `{"nn.conv2d": ["NHWC", "HWIO"]}`.

    Raises:
        SpaceError: no key or value, a value that is no layout, or a key that has two different values.
    """
    if given is None:
        return ()
    if isinstance(given, str):
        raise SpaceError(f"{option} {given!r}: expected a list of KEY=LAYOUT, or a mapping")
    pairs = given.items() if isinstance(given, Mapping) else (_split(text, option) for text in given)
    found: dict[str, Desired] = {}
    for key, value in pairs:
        text = value if isinstance(value, str) else ":".join(value)
        desired = Desired(_key(key), tuple(part.strip() for part in text.split(",")), option)
        for part in desired.values:
            try:
                check_value(part)
            except ValueError as error:
                raise SpaceError(f"{desired}: {error}") from None
        other = found.setdefault(desired.key, desired)
        if set(other.values) != set(desired.values):
            raise SpaceError(f"{other} and {desired} contradict each other; leave one away")
    return tuple(found[key] for key in sorted(found))


def most_specific(op: Operator, wanted: Sequence[Desired]) -> Desired | None:
    """What counts for `op`, None if nothing is wanted of it.

    Raises:
        SpaceError: two that are equally specific want different layouts.
    """
    ranked = [(d.rank(op), d) for d in wanted]
    top = max((rank for rank, _ in ranked), default=0)
    if top == 0:
        return None
    best = [d for rank, d in ranked if rank == top]
    for other in best[1:]:
        if set(other.values) != set(best[0].values):
            raise SpaceError(
                f"{best[0]} and {other} contradict each other for {op.id} ({op.name}); give {op.name}=... for it"
            )
    return best[0]


def unmatched_desired(wanted: Sequence[Desired], ops: Sequence[Operator], known: Iterable[str]) -> list[str]:
    """A line for each that says nothing about the model, with the nearest operator it has.

    Args:
        wanted: all of it.
        ops: the model's.
        known: operators of TVM, without `relax.`.

    Raises:
        SpaceError: a key is neither an operator of TVM nor of the model.
    """
    operators = set(known)
    lines = []
    for desired in wanted:
        if any(desired.rank(op) for op in ops):
            continue
        near = nearest_key(desired.key, ops)
        hint = f"; the nearest op of the model is {near}" if near else ""
        if desired.key not in operators | {DEFAULT} | set(_KINDS) and not is_pattern(desired.key):
            raise SpaceError(
                f"{desired}: unknown op {desired.key!r}{hint}; expected an op of TVM such as nn.conv2d, "
                f"{', '.join(f'nn.{kind}' for kind in _KINDS)}, {DEFAULT}, or an op's id or name"
            )
        lines.append(f"{desired} matches no op of the model{hint}")
    return lines


def nearest_key(key: str, ops: Iterable[Operator]) -> str:
    """The key nearest to `key` that the model has operators for; empty if it has none."""
    free = [op for op in ops if op.role is not Role.FROZEN]
    words = [op.op.removeprefix("relax.") for op in free]
    words += [f"nn.{kind_key}" for op in free for kind_key, kind in _KINDS.items() if kind == op.kind]
    if ":" in key or key[-1:].isdigit():
        # That is how ids and names look.
        words = [name for op in free for name in (op.id, op.name)] + words
    return nearest_word(f"nn.{key}" if key in _KINDS else key, words)


def nearest_word(word: str, words: Iterable[str]) -> str:
    """The one of `words` that is most like `word`; empty if there is none."""
    return next(iter(difflib.get_close_matches(word, sorted(set(words)), n=1, cutoff=0.0)), "")


def _split(text: str, option: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise SpaceError(f"{option} {text!r}: expected KEY=LAYOUT, such as nn.conv2d=NHWC:HWIO")
    return key, value


def _key(text: str) -> str:
    key = text.strip().removeprefix("relax.")
    bare = key.removeprefix("nn.")
    return bare if bare in _KINDS else key
