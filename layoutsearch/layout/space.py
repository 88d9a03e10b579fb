"""Search-space files: rules in TOML that say which layouts an operator may have."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema

from layoutsearch.errors import SpaceError
from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.layout.matching import MATCH_SCHEMA, matching
from layoutsearch.layout.scopes import SCOPES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_LAYOUTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_BLOCKS = {"type": "array", "items": {"type": "integer", "minimum": 2}, "minItems": 1}
_SCOPES = {"anyOf": [{"enum": list(SCOPES)}, {"type": "array", "items": {"enum": list(SCOPES)}, "minItems": 1}]}
_SCHEMA = {
    "type": "object",
    "required": ["target", "rule"],
    "additionalProperties": False,
    "properties": {
        "target": {
            "type": "object",
            "required": ["match", "blocks"],
            "additionalProperties": False,
            "properties": {
                "match": {
                    "type": "object",
                    "required": ["kind"],
                    "additionalProperties": False,
                    "properties": {"kind": {"type": "string"}, "feature": {"type": "string"}},
                },
                "blocks": _BLOCKS,
            },
        },
        "rule": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["name", "match"],
                "additionalProperties": False,
                "properties": {
                    "name": {"type": "string"},
                    "match": MATCH_SCHEMA,
                    "layouts": _LAYOUTS,
                    "pin": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 4},
                    "forbid": _LAYOUTS,
                    "blocks": _BLOCKS,
                    "scope": _SCOPES,
                    "weight_scope": _SCOPES,
                },
            },
        },
    },
}


@dataclass(frozen=True)
class Rule:
    """One rule.

    `layouts` and `forbid` are patterns such as `NCHW{i}c->NCHW{o}c` or `NHWC:HWOI16o@winograd4`, `pin` is one exact
    candidate. Each comes in every `scope` of the result and `weight_scope` of the weights that are named and can be; in
    buffers where none is named.
    """

    name: str
    match: Mapping[str, Any] = field(hash=False)
    layouts: tuple[str, ...] = ()
    pin: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    blocks: tuple[int, ...] | None = None
    scope: tuple[str, ...] = ()
    weight_scope: tuple[str, ...] = ()

    def matches(self, graph: LayoutGraph) -> frozenset[str]:
        """Bound variables of the operators that the rule is about."""
        return matching(graph, self.match)

    def __str__(self) -> str:
        return f"rule {self.name!r}"


@dataclass(frozen=True)
class SearchSpace:
    """A parsed search-space file."""

    source: str
    blocks: tuple[int, ...]
    rules: tuple[Rule, ...]
    kind: str
    feature: str | None = None

    def rules_for(self, graph: LayoutGraph) -> dict[str, tuple[Rule, ...]]:
        """The rules that match each operator, by bound variable; the first one decides."""
        matched = [(rule, rule.matches(graph)) for rule in self.rules]
        return {op.name: tuple(rule for rule, names in matched if op.name in names) for op in graph.ops}


def with_library(space: SearchSpace, name: str, patterns: Sequence[str]) -> SearchSpace:
    """`space` with the layouts in which external library `name` computes operators, wherever nothing is pinned."""
    more = tuple(f"{pattern}@{name}" for pattern in patterns)
    rules = tuple(r if r.pin else replace(r, layouts=tuple(dict.fromkeys((*r.layouts, *more)))) for r in space.rules)
    return replace(space, rules=rules)


def load_space(path: str | Path) -> SearchSpace:
    """Read a search-space file.

    Raises:
        SpaceError: it cannot be read, is not TOML, or has an unknown or wrong key; the message names file and line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpaceError(f"cannot read search space {path}: {error}") from None
    return parse_space(text, str(path))


def parse_space(text: str, source: str) -> SearchSpace:
    """Parse the text of a search-space file; see `load_space`."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpaceError(f"{source} is not valid TOML: {error}") from None
    wrong = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(_SCHEMA).iter_errors(data))
    if wrong is not None:
        raise SpaceError(f"{source}, line {_line_of(text, wrong)}: {wrong.message}")
    rules = []
    for number, entry in enumerate(data["rule"], 1):
        if bool(entry.get("layouts")) == bool(entry.get("pin")):
            line = _line(text, r"^\s*\[\[\s*rule\s*\]\]", count=number)
            raise SpaceError(f"{source}, line {line}: rule {entry['name']!r} needs either layouts or pin")
        rules.append(
            Rule(
                name=entry["name"],
                match=entry["match"],
                layouts=tuple(entry.get("layouts", ())),
                pin=tuple(entry.get("pin", ())),
                forbid=tuple(entry.get("forbid", ())),
                blocks=tuple(entry["blocks"]) if "blocks" in entry else None,
                scope=_scopes(entry, "scope"),
                weight_scope=_scopes(entry, "weight_scope"),
            )
        )
    target = data["target"]
    return SearchSpace(
        source, tuple(target["blocks"]), tuple(rules), target["match"]["kind"], target["match"].get("feature")
    )


def _scopes(entry: Mapping[str, Any], key: str) -> tuple[str, ...]:
    given = entry.get(key, ())
    return (given,) if isinstance(given, str) else tuple(given)


def builtin_space(kind: str, has_feature: Callable[[str], bool]) -> SearchSpace:
    """The shipped search space for a target kind and CPU features; the first whose feature the target has.

    Raises:
        SpaceError: none is shipped for this kind of target.
    """
    spaces = sorted(_shipped(), key=lambda s: (s.feature is None, _PREFERENCE.get(s.feature or "", 0)))
    for space in spaces:
        if space.kind == kind and (space.feature is None or has_feature(space.feature)):
            return space
    raise SpaceError(f"no search space is shipped for target kind {kind!r}; give one with --space FILE")


_PREFERENCE = {"avx512f": 0, "avx2": 1, "neon": 2}


@cache
def _shipped() -> tuple[SearchSpace, ...]:
    folder = resources.files("layoutsearch") / "_search_spaces"
    if not folder.is_dir():
        # A checkout: the files lie beside the package and are put into it when the wheel is built.
        folder = Path(__file__).resolve().parents[2] / "search_spaces"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return tuple(parse_space(f.read_text(encoding="utf-8"), f.name) for f in files)


def _line_of(text: str, error: jsonschema.ValidationError) -> int:
    """Line of the key that `error` is about, searched from the start of its rule or table."""
    path = list(error.absolute_path)
    start = 1
    if path[:1] == ["rule"] and len(path) > 1:
        start = _line(text, r"^\s*\[\[\s*rule\s*\]\]", count=int(path[1]) + 1)
    elif path:
        start = _line(text, rf"^\s*\[\s*{re.escape(str(path[0]))}\s*\]")
    keys = [k for k in path if isinstance(k, str)]
    if error.validator == "additionalProperties":
        known = error.schema.get("properties", {})
        keys = [str(next(k for k in error.instance if k not in known))]
    elif error.validator == "required":
        return start
    return _line(text, rf"\b{re.escape(keys[-1])}\b", start) if keys else start


def _line(text: str, pattern: str, start: int = 1, count: int = 1) -> int:
    """Number of the `count`-th line from `start` on with `pattern` outside a comment; `start` if there is none."""
    for number, line in enumerate(text.splitlines(), 1):
        if number >= start and re.search(pattern, line.split("#", 1)[0]):
            count -= 1
            if count == 0:
                return number
    return start
