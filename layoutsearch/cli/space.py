"""`layoutsearch space`: what a search space makes of a model."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from layoutsearch.cli.options import desired_layout_option, extern_option, io_layout_option

if TYPE_CHECKING:
    from layoutsearch.search.space_report import OpReport

_WIDTH = 100
# What is out for one reason is named so often.
_NAMED = 4


@click.group()
def space() -> None:
    """Look at the rules that say which layouts an operator may have."""


@space.command()
@click.argument("model", type=click.Path())
@click.option("--shape", "shapes", multiple=True, metavar="NAME=1,3,320,320", help="Shape of a dynamic input.")
@click.option("--target", metavar="TARGET", help="TVM target, JSON or 'llvm -mcpu=...'; this CPU by default.")
@click.option("--space", "space_path", type=click.Path(), help="Search-space file; the shipped one by default.")
@desired_layout_option
@extern_option
@io_layout_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def show(
    model: str,
    shapes: tuple[str, ...],
    target: str | None,
    space_path: str | None,
    desired_layouts: tuple[str, ...],
    externs: tuple[str, ...],
    io_layout: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show for each op of MODEL its rule, its candidates, and why others are out. No device is needed."""
    from layoutsearch.cli.options import parse_target
    from layoutsearch.layout.desired import parse_desired
    from layoutsearch.layout.io_layouts import IoLayouts
    from layoutsearch.model.shapes import parse_shapes
    from layoutsearch.search.space_report import space_report

    desired = parse_desired(desired_layouts)
    io = IoLayouts.parse(io_layout)
    report = space_report(model, parse_shapes(shapes) or None, parse_target(target), space_path, desired, externs, io)
    for note in report.notes:
        click.echo(f"warning: {note}", err=True)
    if as_json:
        click.echo(json.dumps(report.to_json()))
        return
    click.echo(f"{report.source} for {json.dumps(report.target)}")
    followers: dict[str, list[str]] = {}
    for op in report.ops:
        if op.follows:
            followers.setdefault(op.follows, []).append(op.op.id)
    for op in report.ops:
        if not op.follows:
            for line in _lines(op, followers.get(op.op.id, [])):
                click.echo(line)
    for one in report.border:
        if one.layouts and io.words:
            click.echo(f"{one.what}  {'any of ' if one.free else ''}{'  '.join(one.layouts)}")


def _lines(report: OpReport, followers: list[str]) -> Iterator[str]:
    op = report.op
    head = f"{op.id}  {op.name}  {op.kind}"
    if not report.rule:
        yield f"{head}  frozen: {op.why_frozen or 'it has no layout to choose'}"
        return
    yield f"{head}  rule {report.rule}"
    if report.pinned:
        yield from _wrapped("pinned by ", report.pinned)
    yield from _wrapped("candidates: ", "  ".join(report.candidates))
    by_reason: dict[str, list[str]] = {}
    for text, reason in report.out.items():
        by_reason.setdefault(reason, []).append(text)
    for reason, texts in by_reason.items():
        more = f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
        yield from _wrapped("out: ", f"{'  '.join(texts[:_NAMED])}{more}: {reason}")
    if followers:
        yield from _wrapped("in its kernel: ", "  ".join(followers))


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=f"    {label}", subsequent_indent=" " * 8, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip
