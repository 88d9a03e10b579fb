"""Kernels and layout changes as tables of named numbers.

A column is what a person would look at: logarithms of sizes, how a layout lies in memory, how full the vectors are,
which tile the templates will take. Layouts are encoded here and nowhere else, so a layout never seen before still has
features with a meaning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from layoutsearch.cost.base import KernelBase, kernel_base, transform_base
from layoutsearch.cost.machine import Machine
from layoutsearch.cost.walk import TransformWalk, run_length, transform_walk
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.facts import KernelFacts, OperandFacts
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.transform import TransformKey

SCHEMA_VERSION = 4
"""Of the columns and of what they mean; a model of another version is fitted again."""

# Root kinds that get a column of their own; what is not named shares `kind_other`.
KINDS = (
    *("conv2d", "conv2d_pointwise", "conv2d_depthwise", "conv2d_grouped", "conv2d_transpose", "matmul"),
    *("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "resize2d", "concat", "softmax", "permute_dims", "reshape"),
)
# Epilogue operators by what they cost: an addition of a constant or a tensor, a comparison, a function of many steps.
EPILOGUES = {
    "add": ("add", "subtract"),
    "multiply": ("multiply", "divide"),
    "clamp": ("relu", "clip", "maximum", "minimum", "leakyrelu", "abs", "negative"),
    "function": ("sigmoid", "exp", "tanh", "gelu", "silu", "erf", "softplus", "log", "sqrt", "rsqrt", "power"),
}

Kernel = tuple[KernelFacts, "Candidate | None"]


def kernel_features(kernels: Sequence[Kernel], machine: Machine) -> pd.DataFrame:
    """One row a kernel and candidate, float64; missing where a column does not apply (no convolution, no layout)."""
    return pd.DataFrame([_kernel(facts, choice, machine) for facts, choice in kernels], columns=KERNEL_FEATURES)


def transform_features(keys: Sequence[TransformKey], machine: Machine) -> pd.DataFrame:
    """One row a layout change, float64."""
    return pd.DataFrame([_transform(key, machine) for key in keys], columns=TRANSFORM_FEATURES)


def _log(value: float) -> float:
    return math.log2(max(value, 0.0) + 1.0)


def _kernel(facts: KernelFacts, choice: Candidate | None, machine: Machine) -> dict[str, float]:
    base = kernel_base(facts, choice, machine)
    row = {
        "log_flops": _log(facts.flops),
        "log_read": _log(facts.read_bytes),
        "log_written": _log(facts.written_bytes),
        "log_weights": _log(facts.weight_bytes),
        "log_intensity": _log(facts.flops / max(1, facts.read_bytes + facts.written_bytes + facts.weight_bytes)),
        "operands": float(sum(not o.weight for o in facts.operands)),
        "element_bytes": float(_element_bytes(facts)),
        "threads": float(machine.threads),
        "machine_lanes": float(machine.lanes),
        **_base_columns(base),
        **_kind_columns(facts),
        **_geometry(facts),
        **_layout_columns(facts, choice, machine),
        **_fits(facts, machine),
    }
    tile = base.tile
    if tile is not None:
        row |= {
            "tile_vectors": float(tile.vectors),
            "tile_rows": float(tile.rows),
            "tile_lanes": tile.lanes / machine.lanes,
            "tile_flat": float(tile.flat),
            "log_tasks": _log(tile.tasks),
            "imbalance": tile.imbalance,
            "efficiency": min(2.0, base.peak_us / max(1e-9, base.compute_us)),
        }
    if base.loops is not None:
        row |= {
            "log_run": _log(base.loops.run),
            "pieces": float(base.loops.pieces),
            "gathers": float(base.loops.gathers),
        }
    return row


def _element_bytes(facts: KernelFacts) -> int:
    tensor = (*facts.results, *facts.operands)[0] if facts.results or facts.operands else None
    return tensor.bytes // max(1, math.prod(tensor.shape)) if tensor else 4


def _base_columns(base: KernelBase) -> dict[str, float]:
    """How the base is made up: what bounds the kernel."""
    return {
        "log_base": math.log2(base.us),
        "share_compute": base.compute_us / base.us,
        "share_weights": base.weights_us / base.us,
        "share_activations": base.activations_us / base.us,
        "share_call": base.call_us / base.us,
    }


def _kind_columns(facts: KernelFacts) -> dict[str, float]:
    row = {f"kind_{kind}": float(facts.kind == kind) for kind in KINDS}
    row["kind_other"] = float(facts.kind not in KINDS)
    for name, members in EPILOGUES.items():
        row[f"epilogue_{name}"] = float(sum(op in members for op in facts.epilogue))
    known = {op for members in EPILOGUES.values() for op in members}
    row["epilogue_other"] = float(sum(op not in known for op in facts.epilogue))
    # A second tensor as large as the result (a residual sum) is read along with it.
    made = facts.written_bytes
    row["residuals"] = float(sum(not o.weight and o.bytes == made for o in facts.operands[1:]))
    return row


def _extents(tensor: OperandFacts) -> dict[str, int]:
    return dict(zip(tensor.axes, tensor.shape, strict=True))


def _geometry(facts: KernelFacts) -> dict[str, float]:
    row: dict[str, float] = {"taps": float(math.prod(facts.window))}
    if facts.results:
        out = _extents(facts.results[0])
        row |= {"log_out_channels": _log(out.get("C", 0)), "log_out_pixels": _log(out.get("H", 0) * out.get("W", 0))}
        row["width"] = float(out.get("W", 0))
    data = next((o for o in facts.operands if not o.weight), None)
    if data is not None:
        given = _extents(data)
        row |= {
            "log_in_channels": _log(given.get("C", 0)),
            "log_in_pixels": _log(given.get("H", 0) * given.get("W", 0)),
        }
    conv = facts.conv
    if conv is not None:
        row |= {
            "taps": float(conv.kernel[0] * conv.kernel[1]),
            "stride": float(conv.strides[0] * conv.strides[1]),
            "dilation": float(conv.dilation[0]),
            "log_groups": _log(conv.groups),
            "log_depth": _log(conv.in_channels // conv.groups * conv.kernel[0] * conv.kernel[1]),
        }
    return row


def _layout_columns(facts: KernelFacts, choice: Candidate | None, machine: Machine) -> dict[str, float]:
    row = {"frozen": float(choice is None)}
    if choice is None:
        return row
    sides = [("in", choice.data, next((o for o in facts.operands if not o.weight), None))]
    sides.append(("out", choice.out, facts.results[0] if facts.results else None))
    for name, layout, tensor in sides:
        row[f"{name}_channels_last"] = float(layout.axes[-1].letter == "C")
        row[f"{name}_block"] = float(layout.block("C"))
        if tensor is None or set(layout.primal) != set(tensor.axes):
            continue
        channels = _extents(tensor).get("C", 1)
        run = run_length(layout, tensor.shape, tensor.axes)
        row[f"log_{name}_run"] = _log(run)
        last = layout.axes[-1].letter.upper()
        inner = channels if last == "C" and not layout.is_blocked else layout.block("C") if last == "C" else run
        row[f"{name}_lanes"] = _full(inner, machine.lanes)
        row[f"{name}_channel_lanes"] = _full(channels, machine.lanes)
    # External libraries have neither our tiles nor our loops.
    row["winograd"] = -1.0 if choice.extern else float(choice.winograd)
    row["changes_layout"] = float(choice.data != choice.out)
    if choice.kernel is not None:
        row["kernel_block_in"] = float(choice.kernel.block("I"))
        row["kernel_block_out"] = float(choice.kernel.block("O"))
    return row


def _full(extent: int, lanes: int) -> float:
    """Share of the lanes in use where `extent` elements are cut into vectors."""
    return extent / (-(-extent // lanes) * lanes)


def _fits(facts: KernelFacts, machine: Machine) -> dict[str, float]:
    """Working sets against the caches, as log2 of the ratio: negative where they fit."""

    def ratio(size: float, cache: int) -> float:
        return math.log2(max(1.0, size) / cache)

    total = facts.read_bytes + facts.written_bytes + facts.weight_bytes
    return {
        "read_over_l2": ratio(facts.read_bytes, machine.l2_bytes),
        "weights_over_l2": ratio(facts.weight_bytes, machine.l2_bytes),
        "total_over_l2": ratio(total / machine.threads, machine.l2_bytes),
        "total_over_l3": ratio(total, machine.l3_bytes),
    }


def _transform(key: TransformKey, machine: Machine) -> dict[str, float]:
    walk, base = transform_walk(key, machine.lanes), transform_base(key, machine)
    extents = dict(zip(key.axes, key.shape, strict=True))
    return {
        "log_base": math.log2(base),
        "log_bytes": _log(key.bytes),
        "element_bytes": key.bytes / max(1, math.prod(key.shape)),
        "threads": float(machine.threads),
        "machine_lanes": float(machine.lanes),
        "log_channels": _log(extents.get("C", 0)),
        "log_pixels": _log(extents.get("H", 0) * extents.get("W", 0)),
        "width": float(extents.get("W", 0)),
        **_transform_layout("from", key.source),
        **_transform_layout("to", key.target),
        **_walk_columns(walk),
        "over_l2": math.log2(max(1, 2 * key.bytes) / machine.threads / machine.l2_bytes),
        "over_l3": math.log2(max(1, 2 * key.bytes) / machine.l3_bytes),
    }


def _transform_layout(name: str, layout: Layout) -> dict[str, float]:
    return {
        f"{name}_channels_last": float(layout.axes[-1].letter == "C"),
        f"{name}_block": float(layout.block("C")),
    }


def _walk_columns(walk: TransformWalk) -> dict[str, float]:
    return {
        "moves": float(walk.moves),
        "log_shared_run": _log(walk.shared_run),
        "turns": float(walk.turns),
        "tile": float(walk.tile),
        "log_rows": _log(walk.rows),
        "log_columns": _log(walk.columns),
        "rows_full": walk.rows_full,
        "columns_full": walk.columns_full,
        "log_read_stride": _log(walk.read_stride),
        "log_write_stride": _log(walk.write_stride),
        "read_alias": walk.read_alias,
        "write_alias": walk.write_alias,
        "parallel": float(walk.parallel),
    }


KERNEL_FEATURES: tuple[str, ...] = (
    *("log_flops", "log_read", "log_written", "log_weights", "log_intensity", "operands", "element_bytes", "threads"),
    *("machine_lanes", "log_base", "share_compute", "share_weights", "share_activations", "share_call"),
    *(f"kind_{kind}" for kind in KINDS),
    "kind_other",
    *(f"epilogue_{name}" for name in EPILOGUES),
    *("epilogue_other", "residuals", "taps", "log_out_channels", "log_out_pixels", "width", "log_in_channels"),
    *("log_in_pixels", "stride", "dilation", "log_groups", "log_depth", "frozen"),
    *("in_channels_last", "in_block", "log_in_run", "in_lanes", "in_channel_lanes"),
    *("out_channels_last", "out_block", "log_out_run", "out_lanes", "out_channel_lanes"),
    *("winograd", "changes_layout", "kernel_block_in", "kernel_block_out"),
    *("read_over_l2", "weights_over_l2", "total_over_l2", "total_over_l3"),
    *("tile_vectors", "tile_rows", "tile_lanes", "tile_flat", "log_tasks", "imbalance", "efficiency"),
    *("log_run", "pieces", "gathers"),
)
TRANSFORM_FEATURES: tuple[str, ...] = (
    *("log_base", "log_bytes", "element_bytes", "threads", "machine_lanes", "log_channels", "log_pixels", "width"),
    *("from_channels_last", "from_block", "to_channels_last", "to_block"),
    *("moves", "log_shared_run", "turns", "tile", "log_rows", "log_columns", "rows_full", "columns_full"),
    *("log_read_stride", "log_write_stride", "read_alias", "write_alias", "parallel", "over_l2", "over_l3"),
)
