"""What an external function declares about layouts: one choice, or several to choose from.

A declaration is JSON, `{"sources": [...], "weights": [...], "destination": "..."}` or a list of such. `sources` are
layouts of the function's first parameters, `weights` of those after them; null, and parameters beyond, stay as they
are. Of activations the axes are N, C, H, W, of weights O, I, H, W, in this order in the function as it was written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layoutsearch.errors import ModelError
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.layout import Layout

ATTRIBUTE = "layoutsearch.layouts"
"""Attribute of a function with its declaration."""
CHOSEN = "layoutsearch.chosen"
"""Attribute of a function that was brought into the layouts of one choice, with that choice."""
_KEYS = ("sources", "weights", "destination")
_ORDERS = ("NCHW", "OIHW")


@dataclass(frozen=True)
class Declared:
    """One choice.

    Attributes:
        sources, weights: layouts of parameters, in order; None for one that stays as it is.
        destination: layout of the result; None where it stays as it is.
    """

    sources: tuple[Layout | None, ...]
    weights: tuple[Layout | None, ...]
    destination: Layout | None

    @property
    def params(self) -> tuple[Layout | None, ...]:
        """Layouts of the first parameters; those beyond stay as they are."""
        return self.sources + self.weights

    def param(self, index: int) -> Layout | None:
        """Layout of a parameter; None where it stays as it is."""
        return self.params[index] if index < len(self.params) else None

    @property
    def candidate(self) -> Candidate:
        """What the choice is called in a search: the first layout of each kind."""
        data = next((s for s in self.sources if s is not None), None)
        out = self.destination or Layout("NCHW")
        return Candidate(data or Layout("NCHW"), next((w for w in self.weights if w is not None), None), out)

    def to_json(self) -> dict[str, Any]:
        """Plain data, as a declaration has it."""

        def names(layouts: Sequence[Layout | None]) -> list[str | None]:
            return [str(lay) if lay is not None else None for lay in layouts]

        return {
            "sources": names(self.sources),
            "weights": names(self.weights),
            "destination": names([self.destination])[0],
        }


def natural_axes(layout: Layout) -> str:
    """Axis names, in their original order, of a tensor that may be in `layout`."""
    return next(order for order in _ORDERS if set(order) == set(layout.primal))


def parse_declaration(
    value: Any, function: str, params: Sequence[tuple[int, ...] | None], result: tuple[int, ...] | None
) -> tuple[Declared, ...]:
    """The choices of external function `function`.

    Args:
        value: JSON as text or as plain data.
        function: its name, for messages.
        params: shapes of its parameters, None where one is no tensor of a known shape.
        result: shape of what it returns.

    Raises:
        ModelError: not a declaration, a layout that is none, or one that does not fit its tensor.
    """
    about = f"external function {function}: attribute {ATTRIBUTE}"
    try:
        data = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ModelError(f"{about} is not JSON ({error}); expected an object with {', '.join(_KEYS)}") from None
    entries = list(data) if isinstance(data, Sequence) else [data]
    if not entries:
        raise ModelError(f"{about} is an empty list; expected at least one object with {', '.join(_KEYS)}")
    found = tuple(_choice(entry, about, params, result) for entry in entries)
    names = [str(choice.candidate) for choice in found]
    for name in names:
        if names.count(name) > 1:
            raise ModelError(f"{about} has {name} twice; choices have to differ in their first layouts")
    return found


def _choice(
    entry: Any, about: str, params: Sequence[tuple[int, ...] | None], result: tuple[int, ...] | None
) -> Declared:
    if not isinstance(entry, Mapping) or set(entry) - set(_KEYS):
        raise ModelError(f"{about}: {entry!r} is not an object with {', '.join(_KEYS)} and nothing else")
    lists = []
    for key in ("sources", "weights"):
        given = entry.get(key, [])
        lists.append([given] if isinstance(given, str) else list(given or []))
    sources, weights = lists
    if len(sources) + len(weights) > len(params):
        raise ModelError(f"{about} is about {len(sources) + len(weights)} parameters, the function has {len(params)}")
    layouts = [_layout(v, about) for v in (*sources, *weights)]
    destination = _layout(entry.get("destination"), about)
    whats = [f"parameter {i}" for i in range(len(layouts))] + ["the result"]
    for what, layout, shape in zip(whats, [*layouts, destination], [*params[: len(layouts)], result], strict=True):
        _check(what, layout, shape, about)
    return Declared(tuple(layouts[: len(sources)]), tuple(layouts[len(sources) :]), destination)


def _layout(value: Any, about: str) -> Layout | None:
    if value is None:
        return None
    try:
        layout = Layout(str(value))
    except ValueError as error:
        raise ModelError(f"{about}: {error}") from None
    if not any(set(order) == set(layout.primal) for order in _ORDERS):
        raise ModelError(f"{about}: {layout} is no layout over N, C, H, W or O, I, H, W")
    return layout


def _check(what: str, layout: Layout | None, shape: tuple[int, ...] | None, about: str) -> None:
    if layout is None:
        return
    if shape is None or len(shape) != len(natural_axes(layout)):
        raise ModelError(f"{about}: {layout} is for tensors of four dimensions, {what} has shape {shape}")
    if not layout.divides(shape, natural_axes(layout)):
        raise ModelError(f"{about}: the block of {layout} does not divide {what} of shape {shape}")
