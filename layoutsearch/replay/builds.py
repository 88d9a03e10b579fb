"""How long builds take: the part of a measurement's cost that the record store does not keep."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import Lock
from typing import Any

from layoutsearch.layout.layout import Layout
from layoutsearch.layout.transform import TransformKey
from layoutsearch.measure.builder import Builder, BuildResult
from layoutsearch.search.jobs import PLAN, KernelJob, TransformJob
from layoutsearch.search.skeleton import Skeleton

_PLAN = (PLAN, "")


class BuildTimes:
    """Seconds of builds by what was built, in a JSON-lines file that survives a kill. Safe to use from threads."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, Lock()
        self._total: dict[tuple[str, str], float] = defaultdict(float)
        self._count: dict[tuple[str, str], int] = defaultdict(int)
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
            try:
                workload, candidate, count, seconds = json.loads(line)
            except ValueError:
                continue  # the last line of a run that was killed
            self._take(workload, candidate, count, seconds)

    def add(self, workload: str, candidate: str, count: int, seconds: float) -> None:
        """A library of `count` kernels took `seconds`."""
        seconds = round(seconds, 4)
        with self._lock:
            # On a line of its own even where the line before was torn.
            with open(self._path, "a", encoding="utf-8") as file:
                file.write("\n" + json.dumps([workload, candidate, count, seconds]))
            self._take(workload, candidate, count, seconds)

    def _take(self, workload: str, candidate: str, count: int, seconds: float) -> None:
        self._total[workload, candidate] += seconds
        self._count[workload, candidate] += count

    def kernel_s(self, workload: str, candidate: str) -> float:
        """Seconds for each schedule of a candidate; what one takes on average where the build was not seen."""
        with self._lock:
            if self._count.get((workload, candidate)):
                return self._total[workload, candidate] / self._count[workload, candidate]
            seen = [key for key in self._count if key != _PLAN]
            count = sum(self._count[key] for key in seen)
            return sum(self._total[key] for key in seen) / count if count else 0.0

    @property
    def plan_s(self) -> float:
        """Seconds for a whole model."""
        with self._lock:
            return self._total[_PLAN] / self._count[_PLAN] if self._count[_PLAN] else 0.0


class TimedBuilder(Builder):
    """A builder that notes how long its builds take.

    Args:
        times: where to.
        skeleton: of the model, to tell its kernels by.
        workers: see `Builder`.
    """

    def __init__(self, times: BuildTimes, skeleton: Skeleton, workers: int) -> None:
        super().__init__(workers=workers, preload=("layoutsearch.search.jobs",))
        self._times = times
        self._keys: Mapping[str, str] = {
            node.workload.module_json: key for key, (node, _) in skeleton.workloads.items()
        }

    def submit(self, function: str, payload: Any, timeout_s: float | None = None) -> Future[BuildResult]:
        """See `Builder.submit`."""
        future = super().submit(function, payload, timeout_s)
        future.add_done_callback(lambda done: self._note(function, payload, done))
        return future

    def _note(self, function: str, payload: Any, future: Future[BuildResult]) -> None:
        if future.cancelled():
            return
        result = future.result()
        if isinstance(payload, KernelJob):
            key, candidate = self._keys[payload.module_json], payload.candidate
            count = len(result.value.schedules) + len(result.value.failed) if result.ok else 1
        elif isinstance(payload, TransformJob):
            transform = TransformKey(
                payload.shape, payload.axes, payload.dtype, Layout(payload.source), Layout(payload.wanted)
            )
            key, candidate, count = transform.workload, transform.candidate, 1
        elif function == PLAN and result.ok:
            (key, candidate), count = _PLAN, 1
        else:
            return
        self._times.add(key, candidate, max(1, count), result.wall_s)
