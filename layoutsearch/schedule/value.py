"""Schedule decisions as plain values, and the error of a schedule that does not fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from layoutsearch.errors import LayoutSearchError, PlanError
from layoutsearch.schedule.trace import trace_text

Param = int | str


class ScheduleError(LayoutSearchError):
    """A schedule does not fit the kernel it was asked to schedule."""


@dataclass(frozen=True)
class TemplateSpec:
    """What a plan may say about one template.

    Attributes:
        version: Raised whenever the same parameters come to mean another kernel, one that plans did not ask for.
        params: Name -> allowed strings, (lowest, highest) integer, or `TRACE`.
        revision: Raised whenever the same kernel is emitted better: plans stand, measurements do not.
    """

    version: int
    params: Mapping[str, tuple[str, ...] | tuple[int, int] | tuple[()]]
    revision: int = 0


TRACE: tuple[()] = ()
"""What a parameter may be that is a trace of MetaSchedule: as text in the value, as lists in JSON."""

TEMPLATES: dict[str, TemplateSpec] = {
    "channels": TemplateSpec(
        1,
        {
            "tile": (1, 64),
            "vectors": (1, 128),
            "reduce": ("taps_outer", "taps_inner"),
            "outer": ("channels", "rows", "panels"),
        },
        revision=1,
    ),
    "flat": TemplateSpec(1, {"channels": (1, 32), "vectors": (1, 8), "rows": (1, 1 << 16)}, revision=3),
    "winograd": TemplateSpec(
        1, {"tile": (1, 64), "vectors": (1, 16), "strips": (1, 1 << 16), "outer": ("channels", "tiles")}
    ),
    "loops": TemplateSpec(1, {}, revision=3),
    "reshape": TemplateSpec(1, {}),
    "stack": TemplateSpec(1, {}),
    "depthwise_pointwise": TemplateSpec(
        1, {"rows": (1, 1 << 16), "tile": (1, 64), "vectors": (1, 128), "dw_tile": (1, 64), "dw_vectors": (1, 128)}
    ),
    "pointwise_depthwise": TemplateSpec(
        1, {"rows": (1, 1 << 16), "tile": (1, 64), "vectors": (1, 128), "dw_tile": (1, 64)}
    ),
    "metaschedule": TemplateSpec(1, {"trace": TRACE}),
    "workitems": TemplateSpec(1, {"threads": (1, 1024)}),
    "extern": TemplateSpec(1, {}),
}


@dataclass(frozen=True)
class Schedule:
    """The decisions that turn a fused kernel into a fast one.

    Attributes:
        template: Name of the template.
        version: The template's version the decisions were made for.
        params: (name, small integer, word or trace) pairs, sorted by name.
    """

    template: str
    version: int
    params: tuple[tuple[str, Param], ...] = ()

    @classmethod
    def make(cls, template: str, **params: Param) -> Schedule:
        """A schedule of the template's present version.

        Raises:
            PlanError: no such template or parameter, or a value that is not allowed.
        """
        return cls.from_json({"template": template, "version": TEMPLATES[template].version, "params": params})

    def __getitem__(self, name: str) -> Param:
        """One decision."""
        return dict(self.params)[name]

    def number(self, name: str) -> int:
        """One integer decision."""
        return int(self[name])

    def to_json(self) -> dict[str, Any]:
        """Plain data for the plan."""
        allowed = TEMPLATES[self.template].params
        params = {k: json.loads(str(v)) if allowed[k] == TRACE else v for k, v in self.params}
        return {"template": self.template, "version": self.version, "params": params}

    @classmethod
    def from_json(cls, data: Any) -> Schedule:
        """Reads and checks what `to_json` wrote.

        Raises:
            PlanError: names the unknown template, version, parameter or value.
        """
        if not isinstance(data, Mapping) or not {"template", "version", "params"} >= set(data) >= {
            "template",
            "version",
        }:
            raise PlanError(f"schedule {data!r} is not an object of template, version and params; tune again")
        name, version, params = data["template"], data["version"], data["params"]
        spec = TEMPLATES.get(name) if isinstance(name, str) else None
        if spec is None:
            raise PlanError(f"unknown schedule template {name!r}; known are {', '.join(TEMPLATES)}; tune again")
        if version != spec.version or isinstance(version, bool):
            raise PlanError(f"schedule template {name} is version {spec.version}, the plan has {version!r}; tune again")
        if not isinstance(params, Mapping):
            raise PlanError(f"params of schedule template {name} are {params!r}, expected an object")
        unknown, missing = sorted(set(params) - set(spec.params)), sorted(set(spec.params) - set(params))
        if unknown or missing:
            what = f"unknown parameter {unknown[0]!r}" if unknown else f"missing parameter {missing[0]!r}"
            raise PlanError(f"schedule template {name}: {what}; it takes {', '.join(spec.params) or 'none'}")
        found = {key: _checked(name, key, value, spec.params[key]) for key, value in params.items()}
        return cls(name, version, tuple(sorted(found.items())))


def _checked(template: str, key: str, value: Any, allowed: tuple[Any, ...]) -> Param:
    if allowed == TRACE:
        return trace_text(value)
    if isinstance(allowed[0], str):
        if value not in allowed:
            raise PlanError(f"schedule template {template}: {key}={value!r}, expected one of {', '.join(allowed)}")
    elif isinstance(value, bool) or not isinstance(value, int) or not allowed[0] <= value <= allowed[1]:
        raise PlanError(f"schedule template {template}: {key}={value!r}, expected {allowed[0]}..{allowed[1]}")
    return value
