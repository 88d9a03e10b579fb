"""Raw samples of A/A pairs: two copies of one plan, timed as `tune` times its finalists; kept in a file."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tvm

import layoutsearch
from layoutsearch.errors import LayoutSearchError
from layoutsearch.measure.builder import Builder
from layoutsearch.measure.device import Device
from layoutsearch.model.samples import sample_inputs
from layoutsearch.plan.apply import target_of
from layoutsearch.plan.border import to_plan
from layoutsearch.plan.compile import load_for
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.search.acceptance import FINAL_STARTS, ROUNDS_PER_START
from layoutsearch.search.budget import Budget
from layoutsearch.search.jobs import PLAN, file_stamp
from layoutsearch.search.reporter import Silent
from layoutsearch.search.whole import Built, ModelSource, WholeLab

SCHEMA = "layoutsearch.aa-samples/1"
_BUILD_S = 900.0


@dataclass(frozen=True)
class Origin:
    """Where samples come from; all pairs of a file share it."""

    model: str
    fingerprint: str
    plan_us: float | None
    cpu: str
    threads: int
    layoutsearch: str
    tvm: str


@dataclass(frozen=True)
class Pair:
    """Microseconds of two copies of a plan, in order of rounds, `per_start` of them from each process start."""

    seed: int
    per_start: int
    a_us: tuple[float, ...]
    b_us: tuple[float, ...]


@dataclass(frozen=True)
class Samples:
    """What a file holds: JSON lines, compressed; the first is the origin, each other one a pair."""

    origin: Origin
    pairs: tuple[Pair, ...]

    @classmethod
    def load(cls, path: Path) -> Samples:
        """Read a file.

        Raises:
            LayoutSearchError: there is none, or it is something else.
        """
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                head, *lines = [json.loads(line) for line in file]
            if head.pop("schema") != SCHEMA:
                raise ValueError("its schema is another")
            pairs = [Pair(x["seed"], x["per_start"], tuple(x["a_us"]), tuple(x["b_us"])) for x in lines]
            return cls(Origin(**head), tuple(pairs))
        except FileNotFoundError:
            raise LayoutSearchError(f"{path} does not exist; give --model and --plan to measure it") from None
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise LayoutSearchError(f"{path} does not hold A/A samples ({SCHEMA}): {error}") from None

    def save(self, path: Path) -> None:
        """Write in place of what is there, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        with gzip.open(temporary, "wt", encoding="utf-8") as file:
            file.write(json.dumps({"schema": SCHEMA, **asdict(self.origin)}) + "\n")
            for pair in self.pairs:
                file.write(json.dumps(asdict(pair)) + "\n")
        os.replace(temporary, path)


def measure_pairs(
    model: str,
    plan_path: str,
    path: Path,
    n_pairs: int,
    *,
    threads: int | None = None,
    tracker: str | None = None,
    device_key: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Samples:
    """Time pairs until the file holds `n_pairs`; it is written after each, so that a stopped run continues.

    The two copies are files of their own, loaded as a baseline and a challenger would be: both into each of
    `FINAL_STARTS` processes, for `ROUNDS_PER_START` interleaved rounds.

    Raises:
        LayoutSearchError: the file's samples are of another model, plan or device, or the plan does not run.
    """
    plan = LayoutPlan.load(plan_path)
    loaded = load_for(model, plan)
    count = threads or plan.threads
    inputs = to_plan(plan, sample_inputs(loaded.inputs, 0))
    shapes = tuple((i.name, tuple(i.shape)) for i in loaded.inputs)
    source = ModelSource(str(Path(model).resolve()), False, file_stamp(model), shapes)
    with (
        tempfile.TemporaryDirectory(prefix="layoutsearch-") as name,
        Builder(workers=1) as builder,
        _device(count, tracker, device_key) as device,
    ):
        device.check_target(target_of(plan))
        folder = Path(name)
        origin = Origin(
            loaded.name,
            plan.fingerprint,
            (plan.validation.get("plan_us") or {}).get("median"),
            device.identity().cpu,
            count,
            layoutsearch.__version__,
            tvm.__version__,
        )
        samples = _begun(path, origin)
        tell("building")
        first = builder.submit(PLAN, source.job(plan, str(folder / "a.so")), _BUILD_S).result().get()
        second = shutil.copyfile(first, folder / "b.so")
        built = {"a": Built(first, 0.0), "b": Built(str(second), 0.0)}
        whole = WholeLab(device, builder, source, [inputs], (folder / "reference.npz", ""), folder, Budget(), Silent())
        while len(samples.pairs) < n_pairs:
            seed = len(samples.pairs)
            tell(f"pair {seed + 1} of {n_pairs}")
            timed = whole.time(built, FINAL_STARTS * ROUNDS_PER_START, seed * FINAL_STARTS, FINAL_STARTS)
            if set(timed) != {"a", "b"}:
                raise LayoutSearchError(f"{model}: a copy of the plan failed while it was timed; run check on the plan")
            a_us, b_us = (tuple(round(us, 3) for us in timed[label]) for label in ("a", "b"))
            samples = replace(samples, pairs=(*samples.pairs, Pair(seed, ROUNDS_PER_START, a_us, b_us)))
            samples.save(path)
    return samples


def _device(threads: int, tracker: str | None, key: str | None) -> AbstractContextManager[Device]:
    if bool(tracker) != bool(key):
        raise LayoutSearchError("--rpc HOST:PORT and --device-key KEY go together; give both or neither")
    return Device.remote(tracker, key, threads) if tracker and key else Device.local(threads)


def _begun(path: Path, origin: Origin) -> Samples:
    """What an earlier run left, or nothing yet."""
    if not path.exists():
        return Samples(origin, ())
    found = Samples.load(path)
    have, want = asdict(found.origin), asdict(origin)
    differs: dict[str, tuple[Any, Any]] = {k: (have[k], want[k]) for k in want if have[k] != want[k]}
    if differs:
        words = ", ".join(f"{key} {old!r} (now {new!r})" for key, (old, new) in differs.items())
        raise LayoutSearchError(f"{path} has samples of {words}; write to another file with --samples")
    return found
