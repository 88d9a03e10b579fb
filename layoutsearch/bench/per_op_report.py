"""Times of kernels within their model as JSON, as a table and as lines about the whole."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from layoutsearch.bench.compare import spread
from layoutsearch.bench.per_op import KernelTime, PerOp
from layoutsearch.layout.candidate import DIRECT

WIDTH = 200
"""Columns in which nothing of the table is folded."""
_KIB = 1024


def as_json(found: PerOp) -> dict[str, Any]:
    """Everything, kernels by time, longest first. Times in microseconds, shares from 0."""
    whole, parts = found.whole_us, found.times.sum_us
    return {
        "model": found.model,
        "threads": found.threads,
        "whole_us": round(whole, 3),
        "whole_spread": round(spread(found.times.whole_us), 4),
        "sum_us": round(parts, 3),
        "sum_over_whole": round(parts / whole, 4),
        "mark_us": round(found.times.mark_us, 4),
        "reached_gflops": _rounded(found.reached_gflops, 2),
        "runs": len(found.times.steps_us[0]) if found.times.steps_us else 0,
        "profile": found.profile.to_json() if found.profile is not None else None,
        "notes": list(found.notes),
        "kernels": [_kernel(one) for one in by_time(found)],
    }


def by_time(found: PerOp) -> list[KernelTime]:
    """The kernels, longest first."""
    return sorted(found.kernels, key=lambda one: -one.us)


def _kernel(one: KernelTime) -> dict[str, Any]:
    return {
        "step": one.step,
        "function": one.function,
        "ops": list(one.ops),
        "kind": one.kind,
        "group": one.group,
        "layouts": one.layouts,
        "algorithm": one.algorithm,
        "flops": one.flops,
        "weight_bytes": int(one.weight_bytes),
        "activation_bytes": int(one.activation_bytes),
        "flops_per_byte": round(one.intensity, 3),
        "us": round(one.us, 3),
        "spread": round(one.spread, 4),
        "measured_us": one.alone_us,
        "gflops": _rounded(one.gflops, 2),
        "share_of_peak": _rounded(one.share_of_peak, 4),
        "share_of_reached": _rounded(one.share_of_reached, 4),
        "bound_us": _rounded(one.roof.us if one.roof is not None else None, 3),
        "bound": one.roof.name if one.roof is not None else None,
        "share_of_bound": _rounded(one.share_of_roof, 4),
        "in_place_us": _rounded(one.in_place.us if one.in_place is not None else None, 3),
        "in_place": one.in_place.name if one.in_place is not None else None,
        "share_in_place": _rounded(one.share_in_place, 4),
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def per_op_table(found: PerOp) -> Table:
    """One row a kernel, longest first."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("op", "layouts"):
        table.add_column(heading, overflow="fold")
    numbers = (
        "MFLOP",
        "weights KiB",
        "activ. KiB",
        "us",
        "spread",
        "alone us",
        "GFLOP/s",
        "of peak",
        "of reached",
        "of bound",
    )
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("bound", no_wrap=True)
    for one in by_time(found):
        name = one.ops[0] if one.ops else one.function
        table.add_row(
            name + (f" +{len(one.ops) - 1}" if len(one.ops) > 1 else ""),
            _short(one.layouts),
            f"{one.flops / 1e6:.2f}",
            f"{one.weight_bytes / _KIB:.0f}",
            f"{one.activation_bytes / _KIB:.0f}",
            f"{one.us:.2f}",
            f"{one.spread:.0%}",
            "" if one.alone_us is None else f"{one.alone_us:.2f}",
            "" if one.gflops is None else f"{one.gflops:.1f}",
            _percent(one.share_of_peak),
            _percent(one.share_of_reached),
            _percent(one.share_of_roof),
            one.roof.name if one.roof is not None else "",
        )
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _short(layouts: str) -> str:
    """A candidate without the layout of its result where that is the layout it reads."""
    parts = layouts.split(",")
    if len(parts) > 1 and parts[0] == parts[-1]:
        parts.pop()
    elif len(parts) > 2 and parts[0] == parts[2]:
        del parts[2]
    return ",".join(parts)


def summary(found: PerOp) -> list[str]:
    """Lines about the whole, and how to read the table."""
    whole, parts, profile = found.whole_us, found.times.sum_us, found.profile
    lines = [
        f"{found.model}, {found.threads} threads: {len(found.kernels)} kernels add up to {parts:.1f} us, the whole "
        f"takes {whole:.1f} us (spread {spread(found.times.whole_us):.0%}), so they are {parts / whole:.1%} of it; "
        f"{found.times.mark_us:.2f} us for a mark are taken off each"
    ]
    if found.reached_gflops is not None:
        lines.append(
            f"multiply-adds in registers, timed between the runs, reached {found.reached_gflops:.0f} GFLOP/s (float32, "
            f"spread {spread(found.times.peak_gflops):.0%}): `of reached` is of that, whatever clock the device had"
        )
    if profile is not None:
        peak = ", ".join(f"{name} {rate:.0f} GFLOP/s" for name, rate in profile.peak_gflops.items())
        rates = ", ".join(f"{level.name} {level.gb_s:.0f} GB/s" for level in profile.levels)
        lines.append(
            f"shares are of the profile of device {profile.key!r} ({profile.cpu}, {profile.threads} threads, "
            f"{profile.created}): {peak}; {rates}"
        )
    if any(one.algorithm != DIRECT for one in found.kernels):
        lines.append(
            "Winograd's GFLOP/s and share of the peak count the operations of the direct convolution, so they may "
            "exceed the peak; its bound counts its own products"
        )
    return lines
