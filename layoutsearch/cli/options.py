"""Parsing of options that several commands share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from layoutsearch.errors import LayoutSearchError

if TYPE_CHECKING:
    from layoutsearch.bench.metaschedule import MetaScheduleOptions


def metaschedule_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The two options of benches that may have MetaSchedule as a peer."""
    budget = click.option(
        "--metaschedule-budget", metavar="120s|8h", help="Time MetaSchedule tunes each model for, as a peer."
    )
    database = click.option(
        "--metaschedule-db",
        type=click.Path(file_okay=False),
        help="Folder of its database: used as it is without a budget, else tuned further.",
    )
    return budget(database(command))


extern_option = click.option(
    "--extern",
    "externs",
    type=click.Choice(["onednn"]),
    multiple=True,
    help="Library that may compute convolutions beside our kernels.",
)
"""`--extern`, with the libraries in `externs`."""

desired_layout_option = click.option(
    "--desired-layout",
    "desired_layouts",
    multiple=True,
    metavar="OP=DATA[:KERNEL[:OUT]]",
    help="Layouts an op must have, as nn.conv2d=NHWC:HWIO; also nn.conv2d_depthwise, nn.conv2d_pointwise, default, an "
    "op's id or name; alternatives by comma; may be repeated, the more specific wins.",
)


def parse_metaschedule(budget: str | None, database: str | None) -> MetaScheduleOptions:
    """What `metaschedule_options` give.

    Raises:
        LayoutSearchError: the budget is no duration.
    """
    from layoutsearch.bench.metaschedule import MetaScheduleOptions
    from layoutsearch.search.budget import parse_duration

    seconds = None if budget is None else parse_duration(budget, "--metaschedule-budget")
    return MetaScheduleOptions(seconds, Path(database).resolve() if database else None)


def io_layout_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Layouts of the compiled module's inputs and outputs."""
    return click.option(
        "--io-layout",
        multiple=True,
        metavar="keep|free|NAME=NHWC",
        help="Layout of an input or output of the compiled module; free: the fastest of every one. Repeatable.",
    )(command)


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
