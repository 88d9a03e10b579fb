"""Tables with made-up times for real models and the present templates: no device, and everything is known."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import tvm

from layoutsearch.measure.profile import PROFILE_VERSION, DeviceProfile, MemoryLevel
from layoutsearch.measure.records import canonical_json
from layoutsearch.measure.results import Measurement, Status
from layoutsearch.plan.apply import target_json
from layoutsearch.replay.table import RecordedTry, RecordedWhole, Table, TableHeader
from layoutsearch.schedule.value import Schedule
from layoutsearch.search.known import WHOLE
from layoutsearch.search.setup import ModelSetup, set_up, template_versions
from tests.cli.running import SPACE
from tests.models import nets

CLOSED = Measurement(Status.INFEASIBLE, (), "", 0.001)


def model_files(folder: Path) -> tuple[Path, Path]:
    """A model with two residual blocks, and a search space for it."""
    model, space = folder / "residual.json", folder / "space.toml"
    if not model.exists():
        model.write_text(tvm.ir.save_json(nets.residual()))
        space.write_text(SPACE)
    return model, space


@functools.cache
def model_setup(folder: Path) -> ModelSetup:
    model, space = model_files(folder)
    return set_up(model, folder, space=space)


def made_profile(key: str, cpu: str, features: tuple[str, ...], target: str) -> DeviceProfile:
    """A device of which nothing was measured, faster than any: its bounds hold."""
    levels = (MemoryLevel("l1", 1 << 16, 1e6), MemoryLevel("l2", 1 << 22, 1e6), MemoryLevel("memory", 0, 1e6))
    peak = {"float32": 1e6}
    return DeviceProfile(
        PROFILE_VERSION, key, cpu, features, 1, peak, levels, 1.0, "2026-01-01T00:00:00+00:00", target, 0.01, peak
    )


def schedule(number: int) -> str:
    """Some schedule that a plan may hold; different numbers give different ones."""
    return canonical_json(Schedule.make("flat", channels=1, vectors=1 + number % 8, rows=1 + number // 8).to_json())


def made_table(setup: ModelSetup, tries: int = 5, seed: int = 0, source: str = "made.jsonl.gz") -> Table:
    """Every candidate has `tries` schedules; the best of each is refined, one fails, and wholes are sums times 1.1."""
    rng = np.random.default_rng(seed)

    def timed(us: float, samples: int = 7) -> Measurement:
        values = us * np.exp(0.02 * rng.standard_normal(samples))
        return Measurement(Status.OK, tuple(round(float(v), 2) for v in values), "", round(float(rng.random()), 3))

    kernels = []
    for node, _ in setup.skeleton.workloads.values():
        for choice in node.choices:
            text, base = str(choice) if choice is not None else "", float(rng.uniform(20, 60))
            factors = rng.uniform(1, 2, tries)
            for number, factor in enumerate(factors):
                first = timed(base * factor)
                if number == 1:
                    first = Measurement(Status.CRASH, (), "killed by SIGSEGV", 0.2)
                refined = timed(base * factor * 1.01, 21) if first.ok and factor <= sorted(factors)[1] else None
                kernels.append(RecordedTry(node.workload.key, text, schedule(number), first, 0.25, refined))
            kernels.append(RecordedTry(node.workload.key, text, WHOLE, CLOSED, 0.25))
    transforms = []
    for key in dict.fromkeys(setup.skeleton.keys.values()):
        transforms.append(RecordedTry(key.workload, key.candidate, schedule(0), timed(rng.uniform(5, 20)), 0.2))
        transforms.append(RecordedTry(key.workload, key.candidate, WHOLE, CLOSED, 0.2))
    header = TableHeader(
        model=setup.loaded.name,
        fingerprint=setup.fingerprint,
        target=target_json(setup.target),
        device={"key": "local", "cpu": "made up", "features": ["avx2"], "cores": 2, "threads": 1},
        profile=made_profile("local", "made up", ("avx2",), "").to_json(),
        threads=1,
        tvm=tvm.__version__,
        templates=template_versions(),
        created="2026-01-01T00:00:00+00:00",
        layouts=setup.layouts,
        anchors=setup.anchors,
    )
    plain = Table(header, setup.skeleton, tuple(kernels), tuple(transforms), (), source)
    wholes = []
    for group, slow in enumerate((1.0, 1.5)):
        for index in range(6):
            draw = np.random.default_rng(0 if index == 0 else 100 * group + index)
            solution = tuple(int(draw.integers(len(node.choices))) for node in setup.skeleton.nodes)
            us = slow * 1.1 * plain.additive_us(solution) * float(np.exp(0.02 * draw.standard_normal()))
            samples = tuple(round(us * float(np.exp(0.01 * draw.standard_normal())), 2) for _ in range(8))
            wholes.append(RecordedWhole(group, 2, f"mix {index}", solution, samples, 1.5))
    return Table(header, plain.skeleton, plain.kernels, plain.transforms, tuple(wholes), source)
