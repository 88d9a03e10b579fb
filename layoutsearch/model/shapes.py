"""Input shapes as users write them (`--shape name=1,3,320,320`) and the errors when they do not fit the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from layoutsearch.errors import ModelError

Dims = tuple[int | str | None, ...]
"""Declared extents of an input: a number, the name of a dynamic extent, or None where there is no name."""


def parse_shapes(items: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Parse `["x=1,3,320,320", ...]`; the name may contain `=`, the shape of a scalar is empty (`x=`).

    Raises:
        ModelError: an item has no `=`, an extent is not a positive number, or a name comes twice.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for item in items:
        name, equals, text = item.rpartition("=")
        try:
            shape = tuple(int(part) for part in text.split(",")) if text.strip() else ()
        except ValueError:
            shape = (0,)
        if not equals or not name or any(extent < 1 for extent in shape):
            raise ModelError(
                f"--shape {item!r} is not NAME=EXTENT,EXTENT,... with positive numbers, e.g. x=1,3,320,320"
            )
        if name in shapes:
            raise ModelError(f"--shape gives {name!r} twice; keep one of the two")
        shapes[name] = shape
    return shapes


def _describe(name: str, dims: Dims | None) -> str:
    extents = "unknown rank" if dims is None else ",".join("?" if d is None else str(d) for d in dims)
    return f"{name} ({extents})"


def _example(dims: Dims | None) -> str:
    """A shape to put into the advice: what is declared, and a usual value for what is not."""
    if dims is None:
        return "1,3,224,224"
    guess = {0: 1} if len(dims) < 3 else {0: 1, 1: 3}
    return ",".join(str(d) if isinstance(d, int) else str(guess.get(i, 224)) for i, d in enumerate(dims))


def resolve_shapes(
    declared: Mapping[str, Dims | None], given: Mapping[str, Sequence[int]] | None
) -> dict[str, tuple[int, ...]]:
    """Fix the shape of every input.

    Args:
        declared: extents of each input as the model states them; None where not even the rank is known.
        given: the user's shapes by input name; they win over declared extents.

    Returns:
        A shape of numbers for every input, in the order of `declared`.

    Raises:
        ModelError: a name that is no input, a shape of another rank, or a dynamic input without a shape.
    """
    given = dict(given or {})
    inputs = ", ".join(_describe(name, dims) for name, dims in declared.items()) or "none"
    unknown = [name for name in given if name not in declared]
    if unknown:
        raise ModelError(f"--shape names {unknown[0]!r}, which is no input of the model; its inputs are: {inputs}")
    shapes: dict[str, tuple[int, ...]] = {}
    missing: list[str] = []
    for name, dims in declared.items():
        if name in given:
            shape = tuple(int(extent) for extent in given[name])
            if dims is not None and len(shape) != len(dims):
                raise ModelError(
                    f"--shape gives input {name!r} {len(shape)} dimensions {shape}, the model declares {len(dims)}: "
                    f"{_describe(name, dims)}"
                )
            if any(extent < 1 for extent in shape):
                raise ModelError(f"--shape gives input {name!r} an extent below 1: {shape}")
            shapes[name] = shape
        elif dims is None or not all(isinstance(d, int) and d > 0 for d in dims):
            missing.append(name)
        else:
            shapes[name] = tuple(d for d in dims if isinstance(d, int))
    if missing:
        flags = " ".join(f"--shape {name}={_example(declared[name])}" for name in missing)
        raise ModelError(f"the model has inputs without a fixed shape; inputs: {inputs}; add for example: {flags}")
    return shapes
