"""A table: every legal candidate of a model measured with its schedule tries, every transform, and whole assignments.

Compressed JSON lines in a stable order; `replay.lines` has the fields. A table is read without TVM's compiler and
without the model.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import statistics
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.transform import TransformKey
from layoutsearch.measure.profile import DeviceProfile, ProfileError
from layoutsearch.replay import lines
from layoutsearch.replay.values import RecordedTry, RecordedWhole, TableError, TableHeader
from layoutsearch.search.known import WHOLE, Known
from layoutsearch.search.problem import LayoutProblem
from layoutsearch.search.skeleton import Skeleton, SkeletonTensor
from layoutsearch.search.workloads import KernelNode, Workload

__all__ = ["RecordedTry", "RecordedWhole", "Table", "TableError", "TableHeader"]


@dataclass(frozen=True)
class Table:
    """Recorded measurements of a model. An immutable value.

    Attributes:
        header: what was recorded, and where.
        skeleton: the layout problem without its costs; its workloads carry no module.
        kernels: tries in the order in which they were made.
        transforms: likewise, one try each.
        wholes: assignments that were timed whole.
        source: where it was read from, for messages.
    """

    header: TableHeader
    skeleton: Skeleton
    kernels: tuple[RecordedTry, ...]
    transforms: tuple[RecordedTry, ...]
    wholes: tuple[RecordedWhole, ...]
    source: str = field(default="table", compare=False)

    @cached_property
    def tries(self) -> Mapping[tuple[str, str], tuple[RecordedTry, ...]]:
        """(workload, candidate) -> its tries in recorded order; transforms included."""
        found: dict[tuple[str, str], list[RecordedTry]] = {}
        for attempt in (*self.kernels, *self.transforms):
            found.setdefault((attempt.workload, attempt.candidate), []).append(attempt)
        return {key: tuple(attempts) for key, attempts in found.items()}

    @cached_property
    def candidates(self) -> tuple[tuple[Workload, Candidate | None], ...]:
        """Every distinct candidate of every workload, in order: what a search may measure."""
        found: dict[tuple[str, Candidate | None], Workload] = {}
        for node in self.skeleton.nodes:
            for choice in node.choices:
                found.setdefault((node.workload.key, choice), node.workload)
        return tuple((workload, choice) for (_, choice), workload in found.items())

    @cached_property
    def profile(self) -> DeviceProfile | None:
        """Limits of the device that was recorded; None if it was not calibrated.

        Raises:
            TableError: they make no sense.
        """
        try:
            return DeviceProfile.from_json(self.header.profile) if self.header.profile is not None else None
        except ProfileError as error:
            raise TableError(f"{self.source}: {error}; {self.record_again}") from None

    @cached_property
    def id(self) -> str:
        """Digest of the content."""
        digest = hashlib.sha256()
        for line in self._lines():
            digest.update(line)
        return digest.hexdigest()[:16]

    def of(self, workload: Workload, choice: Candidate | None) -> Known:
        """All that is recorded of a candidate.

        Raises:
            TableError: nothing is.
        """
        return self._known(workload.key, str(choice) if choice is not None else "", workload.summary)

    def transform(self, key: TransformKey) -> Known:
        """All that is recorded of a transform.

        Raises:
            TableError: nothing is.
        """
        return self._known(key.workload, key.candidate, key.workload)

    def attempts(self, workload: str, candidate: str, summary: str = "") -> tuple[RecordedTry, ...]:
        """The tries of a candidate, or of a transform.

        Raises:
            TableError: none was recorded.
        """
        if (workload, candidate) not in self.tries:
            raise TableError(
                f"{self.source} has no measurement of {summary or workload} as {candidate or 'it is'}; "
                f"{self.record_again}"
            )
        return self.tries[workload, candidate]

    @property
    def record_again(self) -> str:
        """What to do about a table that does not fit, for messages."""
        return f"record it again: layoutsearch bench record MODEL --out {self.source}"

    @cached_property
    def problem(self) -> LayoutProblem:
        """The exact program under everything that is recorded: what a search that measured it all would solve.

        Raises:
            TableError: a candidate or a transform was not recorded.
        """
        return self.skeleton.problem(lambda w, c: self.of(w, c).best_us, lambda key: self.transform(key).best_us)

    def additive_us(self, solution: Sequence[int]) -> float:
        """Time of an assignment in the additive model, under the fastest recorded schedules."""
        return self.problem.evaluate(solution).total

    @cached_property
    def scales(self) -> Mapping[int, float]:
        """By group, what brings its times to those of the others: all groups time one assignment that they share.

        A group is slow or fast as a whole with what else the machine did at the time.
        """
        medians: dict[tuple[object, ...], dict[int, float]] = {}
        for whole in self.wholes:
            medians.setdefault((whole.solution, whole.schedules), {})[whole.group] = whole.median_us
        shared = max(medians.values(), key=len, default={})
        typical = statistics.median(shared.values()) if shared else 0.0
        return {group: typical / us for group, us in shared.items()}

    def leveled_us(self, whole: RecordedWhole) -> float:
        """Median time of an assignment timed whole, its group brought to the scale of the others."""
        return whole.median_us * self.scales.get(whole.group, 1.0)

    @cached_property
    def whole_us(self) -> Mapping[tuple[int, ...], float]:
        """`leveled_us` of each assignment that was timed whole, the median over its groups and schedules."""
        found: dict[tuple[int, ...], list[float]] = {}
        for whole in self.wholes:
            found.setdefault(whole.solution, []).append(self.leveled_us(whole))
        return {solution: statistics.median(times) for solution, times in found.items()}

    def _known(self, workload: str, candidate: str, summary: str) -> Known:
        known = Known(closed=True)
        for attempt in self.attempts(workload, candidate, summary):
            if attempt.schedule == WHOLE:
                known.reason = attempt.measurement.error
            else:
                known.tries[attempt.schedule] = attempt.last
        return known

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all; equal tables give equal bytes."""
        target = Path(path)
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(part, "wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
                for line in self._lines():
                    file.write(line)
            os.replace(part, target)
        except OSError as error:
            raise TableError(f"cannot write table {target}: {error.strerror}; name another path") from None
        finally:
            part.unlink(missing_ok=True)

    def _lines(self) -> Iterator[bytes]:
        objects = [
            *(lines.workload_line(node.workload) for node, _ in self.skeleton.workloads.values()),
            *(lines.node_line(node) for node in self.skeleton.nodes),
            *(lines.tensor_line(tensor) for tensor in self.skeleton.tensors),
            *(lines.try_line("kernel", attempt) for attempt in self.kernels),
            *(lines.try_line("transform", attempt) for attempt in self.transforms),
            *(lines.whole_line(whole) for whole in self.wholes),
        ]
        counts = Counter(line["is"] for line in objects)
        for line in [lines.header_line(self.header, counts), *objects]:
            yield json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Table:
        """Read a file that `save` wrote.

        Raises:
            TableError: one line with the file and the line's number.
        """
        reader = _Reader(str(path))
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                for number, text in enumerate(file, 1):
                    reader.line(number, text)
        except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
            raise TableError(f"{path}:{reader.number}: damaged or no table ({error}); record it again") from None
        except OSError as error:
            raise TableError(f"cannot read table {path}: {error.strerror}; name a .jsonl.gz of bench record") from None
        return reader.table()


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")


class _Reader:
    """Takes the lines of a file one by one."""

    def __init__(self, source: str) -> None:
        self.source, self.number = source, 0
        self._header: TableHeader | None = None
        self._counts: Mapping[str, int] = {}
        self._seen: Counter[str] = Counter()
        self._workloads: dict[str, Workload] = {}
        self._nodes: list[KernelNode] = []
        self._tensors: list[SkeletonTensor] = []
        self._tries: dict[str, list[RecordedTry]] = {"kernel": [], "transform": []}
        self._wholes: list[RecordedWhole] = []
        candidates = lines.CandidateReader()
        self._take: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "workload": self._workload,
            "node": lambda data: self._nodes.append(lines.read_node(data, self._workloads, candidates)),
            "tensor": lambda data: self._tensors.append(lines.read_tensor(data)),
            "kernel": lambda data: self._tries["kernel"].append(lines.read_try(data)),
            "transform": lambda data: self._tries["transform"].append(lines.read_try(data)),
            "whole": lambda data: self._wholes.append(self._checked_whole(lines.read_whole(data))),
        }

    def line(self, number: int, text: str) -> None:
        self.number = number
        try:
            data = json.loads(text, parse_constant=_no_constant)
            if not isinstance(data, dict):
                raise ValueError("not a JSON object")
            if self._header is None:
                self._header_line(data)
                return
            kind = data.get("is")
            if kind not in self._take:
                raise ValueError(f"a line of kind {kind!r}; known are {', '.join(self._take)}")
            self._seen[kind] += 1
            self._take[kind](data)
        except KeyError as error:
            raise TableError(f"{self.source}:{number}: field {error} is missing; record it again") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise TableError(f"{self.source}:{number}: {error}; record it again") from None

    def table(self) -> Table:
        if self._header is None:
            raise TableError(f"{self.source} is empty; name a .jsonl.gz of bench record")
        if dict(self._seen) != dict(self._counts):
            raise TableError(
                f"{self.source}:{self.number}: the file ends early or has lines too many: it has {dict(self._seen)}, "
                f"its header says {dict(self._counts)}; record it again"
            )
        skeleton = Skeleton(tuple(self._nodes), tuple(self._tensors))
        try:
            skeleton.problem(lambda w, c: 0.0, lambda key: 0.0)
        except (ValueError, LookupError) as error:
            raise TableError(
                f"{self.source}: its nodes and tensors do not belong together ({error}); record it again"
            ) from None
        kernels, transforms = tuple(self._tries["kernel"]), tuple(self._tries["transform"])
        return Table(self._header, skeleton, kernels, transforms, tuple(self._wholes), self.source)

    def _header_line(self, data: Mapping[str, Any]) -> None:
        if data.get("is") != "header" or data.get("schema") != lines.SCHEMA:
            raise ValueError(f"schema {data.get('schema')!r}, expected {lines.SCHEMA!r}")
        self._header = lines.read_header(data)
        self._counts = {str(kind): int(count) for kind, count in data["counts"].items()}

    def _workload(self, data: Mapping[str, Any]) -> None:
        workload = lines.read_workload(data)
        self._workloads[workload.key] = workload

    def _checked_whole(self, whole: RecordedWhole) -> RecordedWhole:
        sizes = [len(node.choices) for node in self._nodes]
        if len(whole.solution) != len(sizes) or not all(
            0 <= index < size for index, size in zip(whole.solution, sizes, strict=True)
        ):
            raise ValueError("the solution does not name a candidate of every node")
        return whole
