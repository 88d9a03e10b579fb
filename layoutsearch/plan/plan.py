"""The layout plan: an assignment with its schedules and where it came from. An immutable value, saved as JSON."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema

from layoutsearch.errors import PlanError
from layoutsearch.layout.candidate import DIRECT, Candidate
from layoutsearch.layout.scopes import GLOBAL
from layoutsearch.plan.schema import OPTIONAL_SECTIONS, PLAN_SCHEMA, SCHEMA_ID, SECTIONS, digests
from layoutsearch.schedule.value import Schedule


@dataclass(frozen=True)
class PlanOp:
    """One operator.

    Attributes:
        id: stable id in the canonical module.
        kind: most specific kind, such as `conv2d_depthwise`.
        workload: key of the fused kernel it is in.
        choice: its layouts, algorithm and memory scopes; None for a frozen operator (listed because its kernel has a
            tuned schedule).
        schedule: of the kernel, on the kernel's root; None means the default of this version.
        fused_into: id of the root of its kernel, None for the root itself.
        predicted_us: kernel time in the additive model, on the root.
        measured_us: the measured median of the kernel, on the root.
        uniform_us: what the kernel would take in the best uniform layout.
        rel_error: of an algorithm that is not the direct one, over the range of the exact result; on random inputs.
        why: one line for people.
    """

    id: str
    kind: str
    workload: str
    choice: Candidate | None
    schedule: Schedule | None = None
    fused_into: str | None = None
    predicted_us: float | None = None
    measured_us: float | None = None
    uniform_us: float | None = None
    rel_error: float | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        choice = self.choice
        return {
            "id": self.id,
            "kind": self.kind,
            "workload": self.workload,
            "data_layout": str(choice.data) if choice else None,
            "kernel_layout": str(choice.kernel) if choice and choice.kernel else None,
            "out_layout": str(choice.out) if choice else None,
            "scope": choice.scope if choice else GLOBAL,
            **({"weight_scope": choice.weight_scope} if choice and choice.weight_scope != GLOBAL else {}),
            "algorithm": choice.algorithm if choice else DIRECT,
            "schedule": self.schedule.to_json() if self.schedule else None,
            "fused_into": self.fused_into,
            "predicted_us": self.predicted_us,
            "measured_us": self.measured_us,
            "uniform_us": self.uniform_us,
            **({"rel_error": self.rel_error} if self.rel_error is not None else {}),
            "why": self.why,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlanOp:
        """Inverse of `to_json`; raises PlanError for a layout or schedule that cannot be."""
        choice = None
        if data["data_layout"] is not None:
            try:
                choice = Candidate.of(
                    data["data_layout"],
                    data["kernel_layout"],
                    data["out_layout"],
                    data["algorithm"],
                    data["scope"],
                    data.get("weight_scope", GLOBAL),
                )
            except (ValueError, TypeError) as error:
                raise PlanError(f"op {data['id']}: {error}") from None
        rest = {k: data[k] for k in ("fused_into", "predicted_us", "measured_us", "uniform_us")}
        schedule = Schedule.from_json(data["schedule"]) if data["schedule"] is not None else None
        rest |= {"why": data["why"], "rel_error": data.get("rel_error")}
        return cls(data["id"], data["kind"], data["workload"], choice, schedule, **rest)


@dataclass(frozen=True)
class PlanTransform:
    """One layout transform that the plan pays for."""

    tensor: str
    source: str
    target: str
    bytes: int
    us: float | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "tensor": self.tensor,
            "from": self.source,
            "to": self.target,
            "bytes": self.bytes,
            "us": self.us,
            "why": self.why,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlanTransform:
        """Inverse of `to_json`."""
        return cls(data["tensor"], data["from"], data["to"], data["bytes"], data["us"], data["why"])


@dataclass(frozen=True)
class PlanFusion:
    """Two kernels that become one: a depthwise and a pointwise convolution, the second alone reading the first.

    Attributes:
        first, second: ids of the roots of the two kernels.
        schedule: of the one.
        measured_us: what the one took.
        apart_us: what the two took together in the same minutes.
    """

    first: str
    second: str
    schedule: Schedule
    measured_us: float | None = None
    apart_us: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "first": self.first,
            "second": self.second,
            "schedule": self.schedule.to_json(),
            "measured_us": self.measured_us,
            "apart_us": self.apart_us,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlanFusion:
        """Inverse of `to_json`; raises PlanError for a schedule that cannot be."""
        schedule = Schedule.from_json(data["schedule"])
        return cls(data["first"], data["second"], schedule, data["measured_us"], data["apart_us"])


@dataclass(frozen=True)
class LayoutPlan:
    """A whole plan. The mappings are as in plan.json; see `layoutsearch.plan.schema`."""

    tool: Mapping[str, Any] = field(hash=False)
    target: Mapping[str, Any] = field(hash=False)
    device: Mapping[str, Any] = field(hash=False)
    model: Mapping[str, Any] = field(hash=False)
    ops: tuple[PlanOp, ...]
    transforms: tuple[PlanTransform, ...]
    objective: Mapping[str, Any] = field(hash=False)
    validation: Mapping[str, Any] = field(hash=False)
    fusions: tuple[PlanFusion, ...] = ()

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the canonical module the plan is for."""
        return str(self.model["fingerprint"])

    @property
    def threads(self) -> int:
        """Threads the plan was measured with."""
        return int(self.device["threads"])

    @property
    def is_measured(self) -> bool:
        """Whether its choices were measured on a device, not only listed first."""
        return bool(self.objective.get("measured", True))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Input shapes by name, to load the model with."""
        return {i["name"]: tuple(i["shape"]) for i in self.model["inputs"]}

    @property
    def io_layouts(self) -> dict[str, str]:
        """Layouts of inputs and outputs that are not the model's own, by `input NAME` and `output NAME`."""
        return {
            f"{kind} {entry['name']}": entry["layout"]
            for kind in ("input", "output")
            for entry in self.model.get(f"{kind}s", ())
            if entry.get("layout", entry.get("axes")) != entry.get("axes")
        }

    def to_json(self) -> dict[str, Any]:
        """Plain data, digests included."""
        data: dict[str, Any] = {
            "schema": SCHEMA_ID,
            "tool": dict(self.tool),
            "target": dict(self.target),
            "device": dict(self.device),
            "model": dict(self.model),
            "ops": [op.to_json() for op in self.ops],
            "transforms": [t.to_json() for t in self.transforms],
            "objective": dict(self.objective),
            "validation": dict(self.validation),
            **({"fusions": [f.to_json() for f in self.fusions]} if self.fusions else {}),
        }
        # Through JSON once, so that tuples and floats hash as they will be read.
        data = json.loads(json.dumps(data))
        return {**data, "digests": digests(data)}

    @classmethod
    def from_json(cls, data: Any, source: str = "plan") -> LayoutPlan:
        """Check and read plain data.

        Raises:
            PlanError: another schema, a missing or wrong field, an edited section, an impossible layout or schedule.
        """
        if not isinstance(data, dict) or "schema" not in data:
            raise PlanError(f"{source} is not a layout plan; expected a JSON object with schema {SCHEMA_ID!r}")
        if data["schema"] != SCHEMA_ID:
            raise PlanError(f"{source} has schema {data['schema']!r}, this version reads {SCHEMA_ID!r}; tune again")
        error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(PLAN_SCHEMA).iter_errors(data))
        if error is not None:
            where = "/".join(str(p) for p in error.absolute_path) or "top level"
            raise PlanError(f"{source}, {where}: {error.message[:200]}; tune again")
        actual = digests(data)
        edited = [s for s in (*SECTIONS, *OPTIONAL_SECTIONS) if data["digests"].get(s) != actual.get(s)]
        if edited:
            raise PlanError(
                f"{source}: section {edited[0]!r} was edited after the plan was written (its digest does not match); "
                "restore the file or tune again"
            )
        return cls(
            tool=data["tool"],
            target=data["target"],
            device=data["device"],
            model=data["model"],
            ops=tuple(PlanOp.from_json(op) for op in data["ops"]),
            transforms=tuple(PlanTransform.from_json(t) for t in data["transforms"]),
            objective=data["objective"],
            validation=data["validation"],
            fusions=tuple(PlanFusion.from_json(f) for f in data.get("fusions", ())),
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LayoutPlan:
        """Read plan.json; see `from_json`.

        Raises:
            PlanError: the file is missing, truncated, not JSON, or not a valid plan.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"cannot read plan {path}: {error.strerror}; `layoutsearch tune` writes one") from None
        except UnicodeDecodeError:
            raise PlanError(f"{path} is not a layout plan: it is not text") from None
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(
                f"{path} is not complete JSON (line {error.lineno}: {error.msg}); restore the file or tune again"
            ) from None
        return cls.from_json(data, str(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write plan.json, replacing an older one atomically.

        Raises:
            PlanError: the file cannot be written; an older one is as it was.
        """
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        except OSError as error:
            raise PlanError(f"cannot write plan {target}: {error.strerror}; name another folder") from None
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(self.to_json(), file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        except BaseException as error:
            Path(temporary).unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise PlanError(f"cannot write plan {target}: {error.strerror}") from None
            raise
