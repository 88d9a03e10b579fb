"""`layoutsearch bench model`: a plan against other plans and runtimes, on the same machine in the same run."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from layoutsearch.bench.compare import BenchResult, run_comparison
from layoutsearch.bench.metaschedule import NAME as METASCHEDULE
from layoutsearch.bench.metaschedule import MetaScheduleOptions, build_peer
from layoutsearch.bench.runtimes import RuntimeSpec
from layoutsearch.errors import LayoutSearchError
from layoutsearch.measure.builder import Builder
from layoutsearch.model.samples import sample_inputs
from layoutsearch.plan.apply import target_of
from layoutsearch.plan.border import to_plan
from layoutsearch.plan.compile import load_for
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.search.jobs import PLAN, STOCK, PlanJob, file_stamp
from layoutsearch.targets import architecture, local_architecture, runs_here

EXTERNAL = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
"""Runtimes that read the ONNX file themselves."""
PEERS = (*EXTERNAL, "tvm", METASCHEDULE)
BUILD_S = 900.0
_SAMPLES = 3


def bench_model(
    model: str,
    plan_path: str,
    against: Sequence[str],
    *,
    threads: int | None = None,
    starts: int = 3,
    rounds: int = 8,
    seed: int = 0,
    metaschedule: MetaScheduleOptions | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[BenchResult, dict[str, Any]]:
    """Compare the plan with each of `against`.

    That is `onnxruntime`, `openvino`, `tvm` (its default build), `metaschedule` (its build after tuning every kernel,
    as the options for it say) or a plan.json.

    Returns:
        The result, and a JSON object with times in milliseconds and ratios with intervals.

    Raises:
        LayoutSearchError: an unknown peer, one that is not installed, or one that does not run the model.
    """
    plan = LayoutPlan.load(plan_path)
    loaded = load_for(model, plan)
    count = threads or plan.threads
    samples = tuple(tuple(sample_inputs(loaded.inputs, s)) for s in range(_SAMPLES))
    others = {name: None if name in PEERS else LayoutPlan.load(_plan_file(name)) for name in against}
    for name in others:
        if name in EXTERNAL and importlib.util.find_spec(name) is None:
            raise LayoutSearchError(f"{EXTERNAL[name]} is not installed; run: pip install 'layoutsearch[bench]'")
    for name, of in {plan_path: plan, **{n: o for n, o in others.items() if o is not None}}.items():
        check_runs_here(name, of)
    path = str(Path(model).resolve())
    shapes = tuple((i.name, tuple(i.shape)) for i in loaded.inputs)
    with tempfile.TemporaryDirectory(prefix="layoutsearch-") as folder:
        facts: dict[str, Any] = {}
        built: dict[str, str] = {}
        if METASCHEDULE in others:
            # Alone, before anything else is built: it times kernels.
            tell("tuning by MetaSchedule")
            job = plan_job(path, shapes, plan, f"{folder}/metaschedule.so")
            peer = build_peer(job, count, metaschedule or MetaScheduleOptions(), Path(folder))
            built[METASCHEDULE], facts = peer.library, peer.facts
            tell("building")
        with Builder(workers=2) as builder:
            futures = {"plan": builder.submit(PLAN, plan_job(path, shapes, plan, f"{folder}/plan.so"), BUILD_S)}
            for number, (name, other) in enumerate(others.items()):
                if name not in EXTERNAL and name not in built:
                    what = STOCK if other is None else PLAN
                    job = plan_job(path, shapes, other or plan, f"{folder}/other_{number}.so")
                    futures[name] = builder.submit(what, job, BUILD_S)
            built |= {name: future.result().get() for name, future in futures.items()}
        specs = {"plan": planned(built["plan"], plan, count, samples)}
        for name, other in others.items():
            if name in EXTERNAL:
                fixed = _fixed_onnx(path, dict(shapes), f"{folder}/{name}.onnx")
                specs[name] = RuntimeSpec(name, fixed, count, samples)
            elif other is not None:
                specs[name] = planned(built[name], other, count, samples)
            else:
                specs[name] = RuntimeSpec("tvm", built[name], count, samples)
        # The reference for the outputs comes last: a runtime that is not ours where there is one.
        # The plan stays first, since ratios are its own over each other.
        reference = next((n for n in PEERS if n in specs), list(specs)[-1])
        ordered = {**{n: s for n, s in specs.items() if n != reference}, reference: specs[reference]}
        plans = {"plan": plan, **{name: other for name, other in others.items() if other is not None}}
        result = run_comparison(ordered, starts=starts, rounds=rounds, seed=seed, tell=tell, plans=plans)
    return result, {**_as_json(loaded.name, count, result), **facts}


def check_runs_here(name: str, plan: LayoutPlan) -> None:
    """Refuse a plan for another machine, or for a GPU; `name` is its file.

    Raises:
        LayoutSearchError: it is one.
    """
    target = target_of(plan)
    if not runs_here(target):
        what = architecture(target) if target.kind.name == "llvm" else target.kind.name
        raise LayoutSearchError(
            f"{name} is a plan for {what}, and bench model runs on this machine's CPU, which is "
            f"{local_architecture()}; its own times are in its validation: layoutsearch explain {name}"
        )


def planned(path: str, plan: LayoutPlan, threads: int, samples: Sequence[Sequence[np.ndarray]]) -> RuntimeSpec:
    """The library of a plan, with the samples in the layouts that it takes them in."""
    return RuntimeSpec("tvm", path, threads, tuple(tuple(to_plan(plan, s)) for s in samples))


def _plan_file(name: str) -> str:
    if not name.endswith(".json"):
        raise LayoutSearchError(f"--against {name!r} is neither one of {', '.join(PEERS)} nor a plan (a .json file)")
    return name


def plan_job(path: str, shapes: Any, plan: LayoutPlan, output: str) -> PlanJob:
    """A build of the model at `path` with a plan."""
    return PlanJob(path, False, file_stamp(path), shapes, plan.to_json(), output)


def _fixed_onnx(path: str, shapes: dict[str, tuple[int, ...]], output: str) -> str:
    """The ONNX file with its input shapes fixed, so that other runtimes may plan for them as well."""
    try:
        model = onnx.load(path)
    except Exception as error:
        raise LayoutSearchError(f"{path} is no ONNX file, so no other runtime can run it: {error}") from None
    for value in model.graph.input:
        for dimension, extent in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False):
            dimension.dim_value = extent
    onnx.save(model, output)
    return output


def _labels(names: Sequence[str]) -> dict[str, str]:
    """What each runtime is called in JSON: a plan by its file, with its folder where files of others are called so."""
    forms = [(n, Path(n).stem, f"{Path(n).resolve().parent.name}_{Path(n).stem}") for n in names if n.endswith(".json")]
    taken = Counter([n for n in names if not n.endswith(".json")] + [stem for _, stem, _ in forms])
    nested = Counter(longer for _, _, longer in forms)
    labels = {n: n for n in names}
    for name, stem, longer in forms:
        labels[name] = stem if taken[stem] == 1 else longer if nested[longer] == 1 else name
    return labels


def _as_json(name: str, threads: int, result: BenchResult) -> dict[str, Any]:
    data: dict[str, Any] = {"model": name, "threads": threads}
    labels = _labels([row.name for row in result.rows])
    for row in result.rows:
        label = labels[row.name]
        data[f"{label}_ms"] = round(row.ms, 4)
        data[f"{label}_spread"] = round(row.spread, 4)
        data[f"{label}_max_rel_error"] = float(f"{row.max_rel_error:.3g}")
        comparison = result.speedups.get(row.name)
        if comparison is not None:
            data[f"speedup_over_{label}"] = round(comparison.speedup, 4)
            data[f"speedup_over_{label}_ci"] = [round(x, 4) for x in comparison.ci]
    return data


def append_table(path: Path, data: dict[str, Any], command: str) -> None:
    """Add a line to a JSON-lines table, with the command that makes it again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**data, "command": command}) + "\n")
