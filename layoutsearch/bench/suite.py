"""`layoutsearch bench suite`: a fixed set of models, each plan against other runtimes and the best uniform layout."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from layoutsearch.bench.metaschedule import NAME as METASCHEDULE
from layoutsearch.bench.metaschedule import MetaScheduleOptions
from layoutsearch.bench.model import EXTERNAL, bench_model
from layoutsearch.demo import CLASSIFIER, DETECTOR, fetch_demo_model
from layoutsearch.errors import LayoutSearchError
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.zoo import MODELS


@dataclass(frozen=True)
class SuiteModel:
    """A model of the suite.

    Attributes:
        name: of its row, and of the folder of its plan.
        source: a name of the zoo, or a file of the demo wheel.
        shapes: of dynamic inputs.
    """

    name: str
    source: str
    shapes: Mapping[str, tuple[int, ...]]

    def path(self, folder: Path) -> Path:
        """The ONNX file, made or fetched the first time.

        Raises:
            ModelError: it cannot be fetched.
        """
        if self.source not in MODELS:
            return fetch_demo_model(folder, self.source)
        path = folder / f"{self.source}.onnx"
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            onnx.save(MODELS[self.source](0), str(path))
        return path


SUITE = (
    SuiteModel("resnet50", "resnet50", {}),
    SuiteModel("squeezenet", "squeezenet", {}),
    SuiteModel("shufflenet", "shufflenet", {}),
    SuiteModel("mobilenet_v2", "mobilenet_v2", {}),
    SuiteModel("vgg16", "vgg16", {}),
    SuiteModel("unet", "unet", {}),
    SuiteModel("ppocr_det_640", DETECTOR, {"x": (1, 3, 640, 640)}),
    SuiteModel("ppocr_cls", CLASSIFIER, {"x": (1, 3, 48, 192)}),
)
TARGETS = {"best_runtime": 1.3, "uniform": 1.05}
"""Geometric means over the suite that are aimed at, against the better of the other runtimes and the best uniform."""


def chosen(names: Sequence[str]) -> list[SuiteModel]:
    """The models of these names, or all.

    Raises:
        LayoutSearchError: no such model.
    """
    known = {model.name: model for model in SUITE}
    for name in names:
        if name not in known:
            raise LayoutSearchError(f"--only {name!r}: no model of the suite; they are {', '.join(known)}")
    return [known[name] for name in names] if names else list(SUITE)


def bench_suite(
    models: Sequence[SuiteModel],
    model_folder: Path,
    plan_folder: Path,
    against: Sequence[str],
    *,
    threads: int | None,
    starts: int,
    rounds: int,
    metaschedule: MetaScheduleOptions | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """One row a model: milliseconds and ratios with intervals, see `bench_model`.

    The best uniform layout is the one that the plan was accepted over, or exported as: `uniform_ms`. Each model has a
    folder of its own in MetaSchedule's.

    Raises:
        LayoutSearchError: a model has no plan yet; the message says how to make one.
    """
    rows = []
    for model in models:
        path = model.path(model_folder)
        plan_path = plan_folder / model.name / "plan.json"
        if not plan_path.is_file():
            shape = "".join(f" --shape {n}={','.join(map(str, s))}" for n, s in model.shapes.items())
            raise LayoutSearchError(
                f"{plan_path} does not exist; run: layoutsearch tune {path}{shape} --out {plan_path.parent}"
            )
        uniform = _uniform_plan(plan_path)
        peers = [*against, *([str(uniform)] if uniform is not None else [])]
        _, data = bench_model(
            str(path), str(plan_path), peers, threads=threads, starts=starts, rounds=rounds,
            metaschedule=metaschedule.for_model(model.name) if metaschedule else None,
            tell=lambda text, name=model.name: tell(f"{name}: {text}"),  # type: ignore[misc]
        )  # fmt: skip
        rows.append({**_renamed(data, uniform), "model": model.name})
    return rows


def _uniform_plan(plan_path: Path) -> Path | None:
    """The plan of the uniform layout that was fastest when this one was tuned; None where this one is it.

    Raises:
        LayoutSearchError: it is not beside the plan.
    """
    plan = LayoutPlan.load(plan_path)
    if not plan.validation.get("accepted"):
        return None
    layout = str(plan.validation["baseline"]).rsplit(" ", 1)[-1]
    path = plan_path.parent / "uniform" / f"{layout}.json"
    if not path.is_file():
        raise LayoutSearchError(f"{plan_path} was accepted over {path}, which is not there; tune the model again")
    return path


def _renamed(data: Mapping[str, Any], uniform: Path | None) -> dict[str, Any]:
    if uniform is None:
        return {**data, "uniform_ms": data["plan_ms"], "speedup_over_uniform": 1.0}
    return {k.replace(uniform.stem, "uniform"): v for k, v in data.items()}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Geometric means and the worst model: against the better of the other runtimes, the best uniform, MetaSchedule."""
    best = [r for row in rows if (r := over_best_runtime(row)) is not None]
    uniform = [row["speedup_over_uniform"] for row in rows]
    out = {"over_uniform": _geometric(uniform), "over_uniform_worst": min(uniform)}
    if best:
        out |= {"over_best_runtime": _geometric(best), "over_best_runtime_worst": min(best)}
    tuned = [row[f"speedup_over_{METASCHEDULE}"] for row in rows if f"speedup_over_{METASCHEDULE}" in row]
    if tuned:
        out |= {f"over_{METASCHEDULE}": _geometric(tuned), f"over_{METASCHEDULE}_worst": min(tuned)}
    return {name: round(value, 4) for name, value in out.items()}


def over_best_runtime(row: Mapping[str, Any]) -> float | None:
    """The plan's speed-up over the fastest of the other runtimes."""
    found = [row[f"speedup_over_{name}"] for name in EXTERNAL if f"speedup_over_{name}" in row]
    return min(found) if found else None


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values))


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A line a model, in the order of the suite; what the file says of models that are not among `rows` stays.

    Raises:
        LayoutSearchError: what is there is no such file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    by_model = {row["model"]: row for row in (*_written(path), *rows)}
    order = {model.name: number for number, model in enumerate(SUITE)}
    lines = sorted(by_model.values(), key=lambda row: order.get(row["model"], len(order)))
    columns = ["model", *sorted({key for row in lines for key in row} - {"model"})]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(lines)


def _written(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if "model" not in (reader.fieldnames or ()):
            raise LayoutSearchError(f"{path} has no column 'model', so it is no table of the suite; give another --out")
        return [{key: value for key, value in row.items() if value} for row in reader]
