"""`layoutsearch explain --pin`: what other layouts would cost."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import click

from layoutsearch.layout.desired import parse_desired
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.search.costs_file import costs_path, load_costs
from layoutsearch.search.plan_costs import EARLY, PREDICTED, Cost
from layoutsearch.search.what_if import OPTION, TransformChange, WhatIf, what_if

# Part by which two sums of the same times may differ.
_ROUNDING = 1e-3


def show_what_if(plan_path: str, pins: Sequence[str], costs: str | None, as_json: bool) -> None:
    """Print what the pins would cost.

    Raises:
        LayoutSearchError: the plan or its costs cannot be read, or a pin cannot be.
    """
    wanted = parse_desired(pins, OPTION)
    plan = LayoutPlan.load(plan_path)
    found = what_if(plan, load_costs(costs or costs_path(plan_path)), wanted)
    if as_json:
        click.echo(json.dumps(found.to_json()))
        return
    for line in _lines(found):
        click.echo(line)
    if plan.fusions:
        click.echo(f"{len(plan.fusions)} pairs of kernels that the plan runs as one each are counted as two")
    said = plan.objective["predicted_us"]
    if said is not None and abs(said - found.before_us) > _ROUNDING * found.before_us:
        click.echo(f"plan.json predicts {said:.1f} us for the plan: what was not measured yet counts least there")


def _lines(found: WhatIf) -> Iterator[str]:
    yield from found.pins
    yield f"kernels that change: {len(found.kernels)}"
    for kernel in found.kernels:
        yield f"  {kernel.id}: {kernel.before} to {kernel.after}, {_us(kernel.before_cost)} to {_us(kernel.after_cost)}"
    yield from _transforms("added", found.added)
    yield from _transforms("removed", found.removed)
    delta = found.after_us - found.before_us
    before, after = found.transforms
    yield (
        f"predicted: {found.before_us:.1f} us and {before} transforms now, {found.after_us:.1f} us and {after} "
        f"transforms then: {delta:+.1f} us ({delta / found.before_us:+.1%})"
    )
    if found.best_us < found.before_us - 0.05:
        yield f"without a pin the least predicted is {found.best_us:.1f} us; the plan is what won whole"
    if found.count(EARLY):
        yield f"{found.count(EARLY)} of these times may still get lower: not all schedules of theirs were tried"
    if found.count(PREDICTED):
        yield f"{found.count(PREDICTED)} of these times are predicted, not measured: {found.predicted_by}"


def _transforms(what: str, transforms: Sequence[TransformChange]) -> Iterator[str]:
    yield f"transforms {what}: {len(transforms)}"
    for t in transforms:
        yield f"  {t.tensor}: {t.source} to {t.target}, {_us(t.cost)}"


def _us(cost: Cost) -> str:
    if cost.basis == PREDICTED and cost.between:
        return f"{cost.us:.1f} us (predicted, {cost.between[0]:.1f} to {cost.between[1]:.1f})"
    return f"{cost.us:.1f} us"
