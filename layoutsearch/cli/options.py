"""Parsing of options that several commands share."""

from __future__ import annotations

import json
from typing import Any

from layoutsearch.errors import LayoutSearchError


def parse_target(text: str | None) -> Any:
    """`--target`: JSON, or TVM's older text such as `llvm -mcpu=skylake-avx512`, or a tag.

    Raises:
        LayoutSearchError: JSON that does not parse, or an option without a value.
    """
    if text is None:
        return None
    stripped = text.strip()
    if stripped.startswith("{"):
        try:
            return json.loads(stripped)
        except json.JSONDecodeError as error:
            raise LayoutSearchError(f"--target is not valid JSON: {error}") from None
    words = stripped.split()
    if len(words) == 1 and not words[0].startswith("llvm"):
        return stripped
    found: dict[str, Any] = {"kind": words[0] if words else ""}
    for word in words[1:]:
        key, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-") or not equals or not value:
            raise LayoutSearchError(f"--target {text!r}: {word!r} is not -key=value")
        if key == "mattr":
            found[key] = value.split(",")
        else:
            found[key] = int(value) if value.isdigit() else value
    return found
