"""The table of `layoutsearch explain`; it is readable in 100 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.scopes import GLOBAL
from layoutsearch.plan.explain import ExplainRow


def explanation_table(rows: Sequence[ExplainRow]) -> Table:
    """One row a kernel: its root, layouts, time, what the uniform layout would take, transforms after it, and why."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("op", no_wrap=True)
    table.add_column("layouts", no_wrap=True)
    table.add_column("us", justify="right", no_wrap=True)
    table.add_column("uniform us", justify="right")
    table.add_column("transforms after it", min_width=16)
    table.add_column("why", min_width=20)
    for row in rows:
        op = row.op
        name = op.id + (f" +{row.fused}" if row.fused else "")
        transforms = "\n".join(row.transforms)
        why = "\n".join(filter(None, (op.why, row.joined)))
        table.add_row(name, _layouts(op.choice), _us(op.predicted_us), _us(op.uniform_us), transforms, why)
    return table


def _layouts(choice: Candidate | None) -> str:
    if choice is None:
        return ""
    data = str(choice.data) if choice.data == choice.out else f"{choice.data} > {choice.out}"
    lines = [_placed(data, choice.scope)]
    if choice.kernel is not None:
        lines.append(_placed(str(choice.kernel), choice.weight_scope))
    return "\n".join(lines)


def _placed(layout: str, scope: str) -> str:
    """A layout, and on a line of its own the texture it is in."""
    return layout if scope == GLOBAL else f"{layout}\n  {scope.removeprefix(f'{GLOBAL}.')}"


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
