"""External libraries in a search: which are asked for, and what their operators may be."""

from __future__ import annotations

from collections.abc import Sequence

from layoutsearch.errors import LayoutSearchError, SpaceError
from layoutsearch.layout.candidate import EXTERN
from layoutsearch.layout.space import SearchSpace, with_library
from layoutsearch.materialize.library import library


def check_externs(names: Sequence[str]) -> None:
    """Refuse libraries that there are none of, and those that are not installed.

    Raises:
        LayoutSearchError: the name is unknown.
        ToolchainError: the library is not installed.
    """
    for name in names:
        if name not in EXTERN:
            raise LayoutSearchError(f"--extern {name!r} is unknown; expected one of {', '.join(EXTERN)}")
        library(name).require()


def with_externs(space: SearchSpace, names: Sequence[str]) -> SearchSpace:
    """`space` with the candidates of the libraries.

    Raises:
        SpaceError: a rule names a library that was not asked for.
    """
    for rule in space.rules:
        for text in (*rule.layouts, *rule.pin):
            wanted = text.partition("@")[2] or text
            if wanted in EXTERN and wanted not in names:
                raise SpaceError(f"{space.source}: rule {rule.name!r} names {wanted}; give --extern {wanted} too")
    for name in names:
        space = with_library(space, name, library(name).PATTERNS)
    return space
