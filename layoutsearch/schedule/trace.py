"""A MetaSchedule trace as plain data: what a plan may carry of it, checked without TVM.

A trace is `[[[instruction, inputs, attributes, outputs], ...], [[index, decision], ...]]`, as TVM writes it. It names
blocks and loops of the kernel it was made for, so it says by itself whether it fits another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from layoutsearch.errors import PlanError

INSTRUCTIONS = frozenset(
    {
        "AddUnitLoop", "Annotate", "ComputeAt", "ComputeInline", "DecomposeReduction", "EnterPostproc", "Fuse",
        "GetChildBlocks", "GetConsumers", "GetLoops", "GetProducers", "GetSBlock", "CacheRead", "CacheWrite",
        "MergeLoops", "PadEinsum", "Parallel", "RFactor", "Reorder", "ReverseComputeAt", "ReverseComputeInline",
        "SampleCategorical", "SampleComputeLocation", "SamplePerfectTile", "SetScope", "Split", "StorageAlign",
        "TransformLayout", "Unannotate", "Unroll", "Vectorize",
    }
)  # fmt: skip
"""What MetaSchedule's rules for CPUs use, and no more: other instructions can put foreign code into a kernel."""

_ANNOTATIONS = ("meta_schedule.", "pragma_auto_unroll_max_step", "pragma_unroll_explicit")
_WORDS = 1 << 20


def trace_text(data: Any) -> str:
    """Canonical JSON of a trace.

    Raises:
        PlanError: it is none, an instruction is not allowed, or a decision is left open.
    """
    if not _is_list(data, 2) or not all(_is_list(part) for part in data):
        raise PlanError("schedule template metaschedule: trace is not a list of instructions and a list of decisions")
    instructions, decisions = data
    decided = {d[0] for d in decisions if _is_list(d, 2) and d[1] is not None and not _is_list(d[0])}
    for number, instruction in enumerate(instructions):
        if not _is_list(instruction, 4) or not isinstance(instruction[0], str):
            raise PlanError(f"schedule template metaschedule: instruction {number} of the trace is not one")
        name, _, attributes, _ = instruction
        if name not in INSTRUCTIONS:
            raise PlanError(f"schedule template metaschedule: instruction {name!r} of the trace is not allowed")
        if name == "Annotate" and not (
            _is_list(attributes) and attributes and str(attributes[0]).startswith(_ANNOTATIONS)
        ):
            raise PlanError(f"schedule template metaschedule: annotation {attributes!r} of the trace is not allowed")
        if name.startswith("Sample") and number not in decided:
            raise PlanError(f"schedule template metaschedule: the trace leaves open what {name} {number} decides")
    try:
        return json.dumps(data, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise PlanError(f"schedule template metaschedule: the trace is not plain JSON: {error}") from None


def _is_list(value: Any, size: int | None = None) -> bool:
    return isinstance(value, list | tuple) and (size is None or len(value) == size)


def plain(value: Any) -> Any:
    """Lists, numbers and text of what TVM gives out as a trace."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    return value.value
