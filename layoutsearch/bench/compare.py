"""Alternate blocks of several runtimes, each in its own process, over several process starts."""

from __future__ import annotations

import os
import pickle
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from layoutsearch.bench.runtimes import RuntimeSpec
from layoutsearch.errors import LayoutSearchError
from layoutsearch.model.samples import relative_error
from layoutsearch.plan.border import from_plan
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.search.acceptance import Comparison, compare

_PAUSE_S = 0.02
_LEAST_SPREAD = 2


class Child:
    """A runtime process. A context manager.

    Raises:
        LayoutSearchError: the runtime does not load the model; the message is its own.
    """

    def __init__(self, spec: RuntimeSpec) -> None:
        threads = str(spec.threads)
        environment = {**os.environ, "TVM_NUM_THREADS": threads, "OMP_NUM_THREADS": threads, "TVM_BIND_THREADS": "0"}
        self._spec = spec
        self._process = subprocess.Popen(
            [sys.executable, "-m", "layoutsearch.bench.runtimes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )

    def __enter__(self) -> Child:
        status, message = self._ask(self._spec)
        if status == "failed":
            self.close()
            raise LayoutSearchError(f"{self._spec.kind} does not run {self._spec.path}: {message}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, seconds: float) -> float:
        """Median seconds of a call in a block of about `seconds`."""
        return float(self._ask(("run", seconds))[1])

    def outputs(self) -> list[list[np.ndarray]]:
        """The model's outputs for every set of inputs."""
        return list(self._ask(("outputs",))[1])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _ask(self, message: Any) -> tuple[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            pickle.dump(message, stdin)
            stdin.flush()
            return pickle.load(stdout)
        except (EOFError, BrokenPipeError):
            code = self._process.wait()
            raise LayoutSearchError(f"{self._spec.kind} died with {self._spec.path} (exit code {code})") from None


@dataclass(frozen=True)
class BenchRow:
    """One runtime: median of block medians, milliseconds, with the spread of the blocks."""

    name: str
    ms: float
    spread: float
    blocks: int
    max_rel_error: float


@dataclass(frozen=True)
class BenchResult:
    """Rows, and the first runtime's speed-up over each other one."""

    rows: tuple[BenchRow, ...]
    speedups: Mapping[str, Comparison]


def run_comparison(
    specs: Mapping[str, RuntimeSpec],
    *,
    starts: int = 3,
    rounds: int = 8,
    block_s: float = 0.25,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
    plans: Mapping[str, LayoutPlan] | None = None,
) -> BenchResult:
    """Time every runtime in alternating blocks.

    In each of `rounds` rounds of each of `starts` process starts every runtime runs one block, in random order, with a
    pause between two so that the last one's threads have gone to sleep. Outputs are compared with the last runtime's,
    those of `plans` in the model's own layouts.
    """
    names = list(specs)
    order = random.Random(seed)
    blocks: dict[str, list[float]] = {name: [] for name in names}
    outputs: dict[str, list[list[np.ndarray]]] = {}
    for start in range(starts):
        children: dict[str, Child] = {}
        try:
            for name in names:
                children[name] = Child(specs[name]).__enter__()
            for name in names:
                outputs[name] = children[name].outputs()
                if plans is not None and name in plans:
                    outputs[name] = [list(from_plan(plans[name], found)) for found in outputs[name]]
            for round_number in range(rounds):
                tell(f"start {start + 1} of {starts}, round {round_number + 1} of {rounds}")
                for name in order.sample(names, len(names)):
                    time.sleep(_PAUSE_S)
                    blocks[name].append(children[name].run(block_s) * 1e6)
        finally:
            for child in children.values():
                child.close()
    reference = outputs[names[-1]]
    rows = tuple(
        BenchRow(
            name,
            statistics.median(blocks[name]) / 1e3,
            spread(blocks[name]),
            len(blocks[name]),
            max(relative_error(got, want) for got, want in zip(outputs[name], reference, strict=True)),
        )
        for name in names
    )
    speedups = {name: compare(blocks[name], blocks[names[0]], per_start=rounds, seed=seed) for name in names[1:]}
    return BenchResult(rows, speedups)


def spread(samples: Sequence[float]) -> float:
    """Range of the middle half of the samples over their median; 0 for a single one."""
    if len(samples) < _LEAST_SPREAD or not statistics.median(samples):
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / statistics.median(samples)
