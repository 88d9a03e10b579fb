"""Axis names for the tensors of a graph, from the layouts that its anchors declare.

Every convolution, pool and resize names the axes of what it reads and makes; flexible operators carry names along,
transposes permute them. Names reach a tensor from any side, so a model that transposes its NHWC images first has inputs
named `NHWC`. Where two sources disagree the operators in between are set apart (their layouts cannot mean the same on
both sides): first transposes, then flexible operators, then the anchor itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DEFAULT = "NCHW"


@dataclass(frozen=True)
class Relation:
    """names(b)[i] == names(a)[permutation[i]], as long as operator `owner` takes part."""

    owner: str
    a: str
    b: str
    permutation: tuple[int, ...] = (0, 1, 2, 3)


@dataclass(frozen=True)
class Pin:
    """An anchor's own names for a tensor."""

    owner: str
    tensor: str
    names: str


@dataclass(frozen=True)
class Naming:
    """Names of every four-dimensional tensor, and the operators that had to be set apart."""

    names: Mapping[str, str]
    set_apart: frozenset[str]


def assign_names(
    tensors: Sequence[str], relations: Sequence[Relation], pins: Sequence[Pin], transposes: frozenset[str]
) -> Naming:
    """Propagate the pins through the relations; resolve conflicts by setting operators apart."""
    apart: set[str] = set()
    while True:
        links = [r for r in relations if r.owner not in apart]
        names, clash = _propagate(links, [p for p in pins if p.owner not in apart])
        if clash is None:
            break
        component, culprit = clash
        inside = {r.owner for r in links if r.a in component}
        apart |= (inside & transposes) or inside or {culprit}
    for tensor in tensors:
        if tensor not in names:
            _spread(tensor, DEFAULT, _neighbours([r for r in relations if r.owner not in apart]), names)
    return Naming(names, frozenset(apart))


def _neighbours(links: Sequence[Relation]) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    near: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for r in links:
        inverse = tuple(r.permutation.index(i) for i in range(len(r.permutation)))
        near.setdefault(r.a, []).append((r.b, r.permutation))
        near.setdefault(r.b, []).append((r.a, inverse))
    return near


def _propagate(links: Sequence[Relation], pins: Sequence[Pin]) -> tuple[dict[str, str], tuple[set[str], str] | None]:
    near = _neighbours(links)
    names: dict[str, str] = {}
    for pin in pins:
        if pin.tensor in names:
            if names[pin.tensor] != pin.names:
                return names, (_component(pin.tensor, near), pin.owner)
            continue
        bad = _spread(pin.tensor, pin.names, near, names)
        if bad is not None:
            return names, (_component(bad, near), pin.owner)
    return names, None


def _spread(
    start: str, value: str, near: Mapping[str, list[tuple[str, tuple[int, ...]]]], names: dict[str, str]
) -> str | None:
    """Name `start` and all that is linked to it; returns a tensor with two different names, if there is one."""
    names[start], todo = value, [start]
    while todo:
        tensor = todo.pop()
        for other, permutation in near.get(tensor, ()):
            wanted = "".join(names[tensor][i] for i in permutation)
            if other not in names:
                names[other] = wanted
                todo.append(other)
            elif names[other] != wanted:
                return other
    return None


def _component(start: str, near: Mapping[str, list[tuple[str, tuple[int, ...]]]]) -> set[str]:
    seen, todo = {start}, [start]
    while todo:
        for other, _ in near.get(todo.pop(), ()):
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return seen
