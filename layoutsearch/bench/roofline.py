"""The roofline plot: what each kernel reaches against what its bytes and operations allow on the calibrated device."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from layoutsearch.bench.per_op import DEPTHWISE, GROUPS, OTHER, PAIR, POINTWISE, TRANSPOSED, KernelTime, PerOp
from layoutsearch.errors import LayoutSearchError
from layoutsearch.layout.candidate import ALGORITHMS
from layoutsearch.measure.profile import DeviceProfile

FORMATS = (".png", ".svg")
_COLOURS = {
    POINTWISE: "tab:blue",
    DEPTHWISE: "tab:orange",
    PAIR: "tab:red",
    TRANSPOSED: "tab:purple",
    OTHER: "0.45",
}
_DENSE_COLOUR = "tab:green"
_MARKERS = ("o", "s", "^")
_STYLES = (":", "--", "-")  # the last one is of memory
_LARGEST, _SMALLEST = 400.0, 6.0  # areas of dots, in square points
_INNERMOST = "l1"
_DTYPE = "float32"


def check_output(path: str | os.PathLike[str]) -> Path:
    """The path of a plot that can be written.

    Raises:
        LayoutSearchError: another format than PNG or SVG, or a folder that is not there.
    """
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise LayoutSearchError(f"--roofline {path}: expected a file that ends in {' or '.join(FORMATS)}")
    if not target.parent.is_dir():
        raise LayoutSearchError(f"--roofline {path}: there is no folder {target.parent}; make it first")
    return target


def plot_roofline(found: PerOp, path: str | os.PathLike[str]) -> None:
    """Draw the kernels that compute, their area by time, their colour by kind, their marker by algorithm.

    Raises:
        LayoutSearchError: the device is not calibrated, or the file cannot be written.
    """
    if found.profile is None:
        raise LayoutSearchError(f"a roofline needs a calibrated device: {' '.join(found.notes)}")
    # Chosen before pyplot is imported: there may be no display.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [one for one in found.kernels if one.flops and one.gflops]
    figure, axes = pyplot.subplots(figsize=(10, 6.5))
    _roofs(axes, found.profile, shown)
    _dots(axes, shown)
    _legends(axes, shown)
    left_out = [one for one in found.kernels if one not in shown]
    title = f"{found.model}, {found.threads} threads, {found.whole_us:.0f} us; {found.profile.cpu}"
    if left_out:
        title += f"\nnot shown: {sum(k.us for k in left_out):.1f} us of kernels that only move data"
    axes.set_title(title, fontsize=10)
    axes.set(xscale="log", yscale="log", xlabel="operational intensity, FLOP/byte", ylabel="GFLOP/s within the model")
    axes.grid(True, which="major", color="0.92", zorder=0)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise LayoutSearchError(f"cannot write {path}: {error.strerror}; name another file") from None
    finally:
        pyplot.close(figure)


def _roofs(axes: Any, profile: DeviceProfile, shown: list[KernelTime]) -> None:
    """The peak, and a slope for every level that kernels share data through."""
    peak = profile.peak_gflops.get(_DTYPE) or max(profile.peak_gflops.values())
    levels = [level for level in profile.levels if level.name != _INNERMOST]
    found = [one.intensity for one in shown]
    low = min([*found, peak / max(level.gb_s for level in levels)]) / 2
    high = max([*found, peak / min(level.gb_s for level in levels)]) * 2
    axes.plot([low, high], [peak, peak], color="black", linewidth=1.2, zorder=1)
    axes.annotate(f"peak {peak:.0f} GFLOP/s", (high, peak), ha="right", va="bottom", fontsize=8)
    for index, level in enumerate(levels):
        ridge = peak / level.gb_s
        axes.plot(
            [low, ridge],
            [low * level.gb_s, peak],
            color="0.3",
            linewidth=1,
            linestyle=_STYLES[(index - len(levels)) % 3],
            zorder=1,
        )
        name = level.name if level.name == "memory" else level.name.upper()
        at = (1.1 * low, 1.1 * low * level.gb_s)
        axes.text(
            *at,
            f"{name} {level.gb_s:.0f} GB/s",
            rotation=math.degrees(math.atan2(at[1], at[0])),
            rotation_mode="anchor",
            transform_rotates_text=True,
            va="bottom",
            fontsize=8,
            color="0.3",
        )
    axes.set_xlim(low, high)


def _dots(axes: Any, shown: list[KernelTime]) -> None:
    longest = max((one.us for one in shown), default=1.0)
    for one in sorted(shown, key=lambda k: -k.us):
        axes.scatter(
            one.intensity,
            one.gflops,
            s=max(_SMALLEST, _LARGEST * one.us / longest),
            color=_colour(one.group),
            marker=_marker(one.algorithm),
            alpha=0.65,
            edgecolors="white",
            linewidths=0.4,
            zorder=2,
        )


def _legends(axes: Any, shown: list[KernelTime]) -> None:
    from matplotlib.lines import Line2D

    def handle(label: str, color: str, marker: str) -> Any:
        return Line2D([], [], color=color, marker=marker, linestyle="", label=label)

    groups = [g for g in GROUPS if any(one.group == g for one in shown)]
    times = {g: sum(one.us for one in shown if one.group == g) for g in groups}
    first = axes.legend(
        handles=[handle(f"{g}, {times[g]:.0f} us", _colour(g), "o") for g in groups],
        loc="lower right",
        fontsize=8,
        title="area: time",
        title_fontsize=8,
    )
    used = [a for a in ALGORITHMS if any(one.algorithm == a for one in shown)]
    if len(used) > 1:
        axes.add_artist(first)
        title = "GFLOP/s of the direct algorithm"
        handles = [handle(a, "0.3", _marker(a)) for a in used]
        axes.legend(handles=handles, loc="lower center", fontsize=8, title=title, title_fontsize=8)


def _colour(group: str) -> str:
    return _COLOURS.get(group, _DENSE_COLOUR)


def _marker(algorithm: str) -> str:
    return _MARKERS[ALGORITHMS.index(algorithm) % len(_MARKERS)]
