"""JSON Schema of plan.json, and the digests that show an edited file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

SCHEMA_ID = "layoutsearch.plan/1"
SECTIONS = ("tool", "target", "device", "model", "ops", "transforms", "objective", "validation")
OPTIONAL_SECTIONS = ("fusions",)
"""Left out where they are empty, as in plans of before they were there."""

_NUMBER = {"type": ["number", "null"]}
_TEXT = {"type": "string"}
_LAYOUT = {"type": ["string", "null"]}


def _object(required: Mapping[str, Any], optional: Mapping[str, Any] | None = None, *, closed: bool = True) -> dict:
    return {
        "type": "object",
        "required": list(required),
        "properties": {**required, **(optional or {})},
        "additionalProperties": not closed,
    }


_SCHEDULE = {
    "anyOf": [
        {"type": "null"},
        _object({"template": _TEXT, "version": {"type": "integer"}, "params": {"type": "object"}}),
    ]
}
_SUMMARY = _object({"median": {"type": "number"}, "spread": {"type": "number"}, "rounds": {"type": "integer"}})

# `shape` is the model's own, along `axes`; `layout` is how the compiled module has it.
_TENSOR = _object(
    {"name": _TEXT, "shape": {"type": "array", "items": {"type": "integer"}}, "dtype": _TEXT},
    {"axes": _TEXT, "layout": _TEXT},
)

PLAN_SCHEMA: dict[str, Any] = _object(
    {
        "schema": {"const": SCHEMA_ID},
        "tool": _object({"layoutsearch": _TEXT, "tvm": _TEXT, "created": _TEXT}),
        "target": {"type": "object", "required": ["kind"], "properties": {"kind": _TEXT}},
        "device": _object(
            {
                "key": _TEXT,
                "cpu": _TEXT,
                "features": {"type": "array", "items": _TEXT},
                "threads": {"type": "integer", "minimum": 1},
            }
        ),
        "model": _object(
            {
                "name": _TEXT,
                "fingerprint": _TEXT,
                "inputs": {
                    "type": "array",
                    "items": _TENSOR,
                },
            },
            {"outputs": {"type": "array", "items": _TENSOR}},
        ),
        "ops": {
            "type": "array",
            "items": _object(
                {
                    "id": _TEXT,
                    "kind": _TEXT,
                    "workload": _TEXT,
                    "data_layout": _LAYOUT,
                    "kernel_layout": _LAYOUT,
                    "out_layout": _LAYOUT,
                    "scope": _TEXT,
                    "algorithm": _TEXT,
                    "schedule": _SCHEDULE,
                    "fused_into": {"type": ["string", "null"]},
                    "predicted_us": _NUMBER,
                    "measured_us": _NUMBER,
                    "uniform_us": _NUMBER,
                    "why": _TEXT,
                },
                {"rel_error": _NUMBER, "weight_scope": _TEXT},
            ),
        },
        "transforms": {
            "type": "array",
            "items": _object(
                {
                    "tensor": _TEXT,
                    "from": _TEXT,
                    "to": _TEXT,
                    "bytes": {"type": "integer"},
                    "us": _NUMBER,
                    "why": _TEXT,
                }
            ),
        },
        "objective": _object(
            {"predicted_us": _NUMBER, "lower_bound_us": _NUMBER, "gap": _NUMBER},
            {"strict_bound_us": _NUMBER, "confidence": _NUMBER, "measured": {"type": "boolean"}},
        ),
        "validation": _object(
            {
                "baseline": _TEXT,
                "baseline_us": {"anyOf": [{"type": "null"}, _SUMMARY]},
                "plan_us": {"anyOf": [{"type": "null"}, _SUMMARY]},
                "speedup": _NUMBER,
                "speedup_ci": {"type": ["array", "null"], "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
                "max_rel_error": _NUMBER,
                "accepted": {"type": "boolean"},
            }
        ),
        "digests": {"type": "object"},
    },
    {
        "fusions": {
            "type": "array",
            "minItems": 1,
            "items": _object(
                {
                    "first": _TEXT,
                    "second": _TEXT,
                    "schedule": _SCHEDULE["anyOf"][1],
                    "measured_us": _NUMBER,
                    "apart_us": _NUMBER,
                }
            ),
        }
    },
)


def digests(data: Mapping[str, Any]) -> dict[str, str]:
    """Digest of every section of a plan, over canonical JSON."""
    return {
        section: hashlib.sha256(
            json.dumps(data[section], sort_keys=True, separators=(",", ":")).encode("utf-8")
        ).hexdigest()[:16]
        for section in (*SECTIONS, *OPTIONAL_SECTIONS)
        if section in data
    }
