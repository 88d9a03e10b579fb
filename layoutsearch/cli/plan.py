"""`layoutsearch plan`: a plan for a target whose device is not at hand."""

from __future__ import annotations

import click

from layoutsearch.cli.options import desired_layout_option, io_layout_option


@click.command(name="plan")
@click.argument("model", type=click.Path())
@click.option("--shape", "shapes", multiple=True, metavar="NAME=1,3,320,320", help="Shape of a dynamic input.")
@click.option("--target", metavar="TARGET", help="TVM target, a tag, JSON or 'llvm -mcpu=...'; this CPU by default.")
@click.option("--threads", type=click.IntRange(1), help="Threads of a kernel; all cores by default.")
@click.option("--space", type=click.Path(), help="Search-space file; the one shipped for the target by default.")
@desired_layout_option
@io_layout_option
@click.option("-o", "--output", type=click.Path(dir_okay=False), required=True, help="Where to write plan.json.")
def plan_command(
    model: str,
    shapes: tuple[str, ...],
    target: str | None,
    threads: int | None,
    space: str | None,
    desired_layouts: tuple[str, ...],
    io_layout: tuple[str, ...],
    output: str,
) -> None:
    """Write a plan for MODEL without a device and without measuring.

    Operators that depend on layout take the first candidates of the search space's rules, the rest what moves the least
    bytes. The plan says that nothing was measured; tune finds better ones where there is a device.
    """
    from layoutsearch.cli.options import parse_target
    from layoutsearch.model.shapes import parse_shapes
    from layoutsearch.search.first import first_plan

    plan = first_plan(
        model,
        shapes=parse_shapes(shapes) or None,
        target=parse_target(target),
        threads=threads,
        space=space,
        desired_layouts=desired_layouts,
        io_layout=io_layout,
    )
    plan.save(output)
    choices = [op.choice for op in plan.ops if op.choice is not None]
    textures = sum(c.has_textures for c in choices)
    click.echo(
        f"wrote {output}: {len(choices)} ops, {textures} of them with textures, {len(plan.transforms)} transforms; "
        "nothing was measured"
    )
