"""One line of a table file: each kind of object as JSON, both ways.

Every line has a field `is`, the kind of the object:

- header: schema, model, fingerprint, target, device, profile, threads, tvm, templates, created, layouts, anchors,
  counts by kind of line
- workload: key, summary, axes, cold, members, facts
- node: members, workload, choices (null where it is frozen)
- tensor: name, shape, dtype, axes, layouts, producer, made, uses (pairs of consumer and wanted)
- kernel, transform: `w` workload, `c` candidate, `s` schedule, `u` samples in us (or `st` status and `e` error where it
  failed), `m` seconds of the measurement, `b` seconds of the build, `r` samples of the refinement, `rm` its seconds
- whole: `g` group, `n` process starts, `l` label, `a` solution, `u` samples by round, `b` seconds of the build, `s`
  schedules by node
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.facts import KernelFacts
from layoutsearch.layout.graph import TensorInfo
from layoutsearch.layout.layout import Layout
from layoutsearch.measure.records import canonical_json
from layoutsearch.measure.results import Measurement, Status
from layoutsearch.replay.values import RecordedTry, RecordedWhole, TableHeader
from layoutsearch.search.known import WHOLE
from layoutsearch.search.problem import Use
from layoutsearch.search.skeleton import SkeletonTensor
from layoutsearch.search.workloads import KernelNode, Workload

SCHEMA = "layoutsearch.table/1"


def rounded(samples: Sequence[float]) -> tuple[float, ...]:
    """Samples as a table keeps them: to 0.01 us."""
    return tuple(round(value, 2) for value in samples)


def header_line(header: TableHeader, counts: Mapping[str, int]) -> dict[str, Any]:
    """The first line."""
    return {
        "is": "header",
        "schema": SCHEMA,
        "model": header.model,
        "fingerprint": header.fingerprint,
        "target": dict(header.target),
        "device": dict(header.device),
        "profile": dict(header.profile) if header.profile is not None else None,
        "threads": header.threads,
        "tvm": header.tvm,
        "templates": header.templates,
        "created": header.created,
        "layouts": [str(layout) for layout in header.layouts],
        "anchors": list(header.anchors),
        "counts": dict(counts),
    }


def read_header(data: Mapping[str, Any]) -> TableHeader:
    """Inverse of `header_line`, counts left out."""
    return TableHeader(
        model=_typed(data, "model", str),
        fingerprint=_typed(data, "fingerprint", str),
        target=_typed(data, "target", dict),
        device=_device(_typed(data, "device", dict)),
        profile=data["profile"] if data["profile"] is None else _typed(data, "profile", dict),
        threads=_typed(data, "threads", int),
        tvm=_typed(data, "tvm", str),
        templates=_typed(data, "templates", str),
        created=_typed(data, "created", str),
        layouts=tuple(Layout(text) for text in data["layouts"]),
        anchors=tuple(data["anchors"]),
    )


def workload_line(workload: Workload) -> dict[str, Any]:
    """A workload without its module."""
    return {
        "is": "workload",
        "key": workload.key,
        "summary": workload.summary,
        "axes": [list(pair) for pair in workload.axes],
        "cold": list(workload.cold),
        "members": workload.members,
        "facts": workload.facts.to_json(),
    }


def read_workload(data: Mapping[str, Any]) -> Workload:
    """Inverse of `workload_line`; `module_json` is empty."""
    return Workload(
        key=_typed(data, "key", str),
        summary=_typed(data, "summary", str),
        module_json="",
        axes=tuple((name, axes) for name, axes in data["axes"]),
        cold=tuple(data["cold"]),
        members=_typed(data, "members", int),
        facts=KernelFacts.from_json(data["facts"]),
    )


def node_line(node: KernelNode) -> dict[str, Any]:
    """A kernel of the model."""
    return {
        "is": "node",
        "members": list(node.members),
        "workload": node.workload.key,
        "choices": [str(choice) if choice is not None else None for choice in node.choices],
    }


def read_node(data: Mapping[str, Any], workloads: Mapping[str, Workload], parse: Callable[[str], Any]) -> KernelNode:
    """Inverse of `node_line`."""
    if data["workload"] not in workloads:
        raise ValueError(f"there is no workload {data['workload']!r} above")
    choices = tuple(parse(text) if text is not None else None for text in data["choices"])
    if not choices:
        raise ValueError("a node has at least one choice")
    return KernelNode(_tuple(data, "members", str, least=1), workloads[data["workload"]], choices)


def tensor_line(tensor: SkeletonTensor) -> dict[str, Any]:
    """A tensor between kernels."""
    info = tensor.info
    return {
        "is": "tensor",
        "name": info.name,
        "shape": list(info.shape) if info.shape is not None else None,
        "dtype": info.dtype,
        "axes": info.axes,
        "layouts": [str(layout) for layout in tensor.layouts],
        "producer": tensor.producer,
        "made": list(tensor.made),
        "uses": [[use.node, list(use.wanted)] for use in tensor.uses],
    }


def read_tensor(data: Mapping[str, Any]) -> SkeletonTensor:
    """Inverse of `tensor_line`."""
    shape = _tuple(data, "shape", int) if data["shape"] is not None else None
    info = TensorInfo(_typed(data, "name", str), shape, _typed(data, "dtype", str), _typed(data, "axes", str))
    return SkeletonTensor(
        info=info,
        layouts=tuple(Layout(text) for text in data["layouts"]),
        producer=_node(data["producer"]),
        made=_tuple(data, "made", int),
        uses=tuple(Use(_node(node), _tuple({"wanted": wanted}, "wanted", int)) for node, wanted in data["uses"]),
    )


def try_line(kind: str, attempt: RecordedTry) -> dict[str, Any]:
    """A try of a kernel or a transform."""
    line: dict[str, Any] = {"is": kind, "w": attempt.workload, "c": attempt.candidate}
    line["s"] = attempt.schedule if attempt.schedule == WHOLE else json.loads(attempt.schedule)
    first = attempt.measurement
    if first.ok:
        line["u"] = list(rounded(first.samples_us))
    else:
        line["st"], line["e"] = first.status.value, first.error
    line["m"], line["b"] = round(first.wall_s, 3), round(attempt.build_s, 3)
    if attempt.refined is not None:
        line["r"], line["rm"] = list(rounded(attempt.refined.samples_us)), round(attempt.refined.wall_s, 3)
    return line


def read_try(data: Mapping[str, Any]) -> RecordedTry:
    """Inverse of `try_line`."""
    schedule = data["s"] if data["s"] == WHOLE else canonical_json(data["s"])
    if "u" in data:
        first = Measurement(Status.OK, _samples(data["u"]), "", _number(data["m"]))
    else:
        first = Measurement(Status(data["st"]), (), _typed(data, "e", str), _number(data["m"]))
    refined = Measurement(Status.OK, _samples(data["r"]), "", _number(data["rm"])) if "r" in data else None
    workload, candidate = _typed(data, "w", str), _typed(data, "c", str)
    return RecordedTry(workload, candidate, schedule, first, _number(data["b"]), refined)


def whole_line(whole: RecordedWhole) -> dict[str, Any]:
    """An assignment that was timed whole."""
    line: dict[str, Any] = {
        "is": "whole",
        "g": whole.group,
        "n": whole.starts,
        "l": whole.label,
        "a": list(whole.solution),
        "u": list(rounded(whole.samples_us)),
        "b": round(whole.build_s, 3),
    }
    if whole.schedules:
        line["s"] = {str(node): json.loads(text) for node, text in whole.schedules}
    return line


def read_whole(data: Mapping[str, Any]) -> RecordedWhole:
    """Inverse of `whole_line`."""
    schedules = tuple((int(node), canonical_json(value)) for node, value in data.get("s", {}).items())
    solution = _tuple(data, "a", int)
    return RecordedWhole(
        group=_typed(data, "g", int),
        starts=_typed(data, "n", int),
        label=_typed(data, "l", str),
        solution=solution,
        samples_us=_samples(data["u"]),
        build_s=_number(data["b"]),
        schedules=schedules,
    )


class CandidateReader:
    """Parses candidates, each text once: a table names the same few in every line."""

    def __init__(self) -> None:
        self._seen: dict[str, Candidate] = {}

    def __call__(self, text: str) -> Candidate:
        """The candidate of a text."""
        if text not in self._seen:
            self._seen[text] = Candidate.parse(text)
        return self._seen[text]


def _typed(data: Mapping[str, Any], name: str, kind: type) -> Any:
    value = data[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, expected {kind.__name__}")
    return value


def _tuple(data: Mapping[str, Any], name: str, kind: type, least: int = 0) -> tuple[Any, ...]:
    values = _typed(data, name, list)
    if len(values) < least or not all(isinstance(v, kind) and not isinstance(v, bool) for v in values):
        raise ValueError(f"{name} is {values!r}, expected a list of {kind.__name__}")
    return tuple(values)


def _node(index: Any) -> int | None:
    return None if index is None else int(_typed({"node": index}, "node", int))


def _device(data: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, kind in {"key": str, "cpu": str, "features": list, "cores": int, "threads": int}.items():
        _typed(data, name, kind)
    return data


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is not a number")
    if not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is no time")
    return float(value)


def _samples(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list) or not values:
        raise ValueError("samples are a list with at least one number")
    return tuple(map(_number, values))
