"""`layoutsearch bench cost-model`: how well costs of a model are predicted from tables of other models.

Every model is left out in turn, in all its tables: what is predicted is what a first run on a new model would be told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from layoutsearch.cost.correction import Correction, WholeRow
from layoutsearch.cost.model import CostModel
from layoutsearch.cost.train import Rows, rows_of
from layoutsearch.cost.views import is_view
from layoutsearch.cost.whole import WholeShape, relative_to_best, whole_shape
from layoutsearch.errors import LayoutSearchError
from layoutsearch.measure.profile import DeviceProfile
from layoutsearch.measure.results import cost_us
from layoutsearch.replay.table import RecordedWhole, Table
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.search.solve import solve
from layoutsearch.targets import as_target

OWN_TIMINGS = (1, 3, 5, 10)
"""Numbers of whole timings of the model itself after which the correction is judged on the rest."""

_DRAWS = 10
_SOLVE_S = 20.0


@dataclass(frozen=True)
class Evaluation:
    """Predictions beside measurements, one row each.

    Attributes:
        kernels: table, workload, summary, kind, candidate, count, us, predicted_us, sigma, view (costs nothing by
            construction: a part of choices, not of errors).
        transforms: table, workload, candidate, us, predicted_us, sigma, view.
        wholes: table, label, us, additive_us (of measured parts), modeled_us (of predicted parts), corrected_us,
            sigma, and own_K_us after K timings of the same model (median over which ones they are).
        choices: table, optimum_us, chosen_us: the optimum under predicted costs, at its measured costs.
    """

    kernels: pd.DataFrame
    transforms: pd.DataFrame
    wholes: pd.DataFrame
    choices: pd.DataFrame


@dataclass(frozen=True)
class _Case:
    name: str
    table: Table
    rows: Rows
    profile: DeviceProfile | None
    target: TargetInfo


def load_tables(folder: str | Path) -> dict[str, Table]:
    """Every table of a folder by name.

    Raises:
        LayoutSearchError: fewer than two models.
        TableError: a table that cannot be read.
    """
    paths = sorted(Path(folder).glob("*.jsonl.gz"))
    tables = {path.name.removesuffix(".jsonl.gz"): Table.load(path) for path in paths}
    models = {table.header.model for table in tables.values()}
    if len(models) < 2:
        raise LayoutSearchError(
            f"{folder} has tables of {len(models)} models, leaving one out takes two: "
            "record more with layoutsearch bench record"
        )
    return tables


def evaluate(tables: Mapping[str, Table], seed: int = 0, tell: Callable[[str], None] = lambda _: None) -> Evaluation:
    """Leave every model out in turn. Tables of the same model, such as of other input sizes, go together."""
    cases = [_case(name, table) for name, table in tables.items()]
    frames: dict[str, list[pd.DataFrame]] = {"kernels": [], "transforms": [], "choices": []}
    models: dict[str, CostModel] = {}
    for held in dict.fromkeys(case.table.header.model for case in cases):
        tell(f"without {held}")
        rest = [case for case in cases if case.table.header.model != held]
        own = [case for case in cases if case.table.header.model == held]
        rows = sum((case.rows for case in rest), Rows())
        model = CostModel.fit(rows.kernels, rows.transforms, own[0].profile, target=own[0].target, seed=seed)
        for case in own:
            models[case.name] = model
            frames["kernels"].append(_kernels(case, model))
            frames["transforms"].append(_transforms(case, model))
            frames["choices"].append(_choice(case, model))
    tell("whole models")
    wholes = _wholes(cases, models, seed)
    return Evaluation(**{name: pd.concat(parts, ignore_index=True) for name, parts in frames.items()}, wholes=wholes)


def _case(name: str, table: Table) -> _Case:
    header = table.header
    target = TargetInfo.from_target(as_target(dict(header.target)), header.threads)
    return _Case(name, table, rows_of(table.skeleton, table, table.header.model), table.profile, target)


def _kernels(case: _Case, model: CostModel) -> pd.DataFrame:
    rows = case.rows.kernels
    found = model.kernels([(row.facts, row.choice) for row in rows])
    known = {key: (node.workload.summary, count) for key, (node, count) in case.table.skeleton.workloads.items()}
    return pd.DataFrame(
        {
            "table": case.name,
            "workload": [row.workload for row in rows],
            "summary": [known[row.workload][0] for row in rows],
            "kind": [row.facts.kind for row in rows],
            "candidate": [str(row.choice) if row.choice is not None else "" for row in rows],
            "count": [known[row.workload][1] for row in rows],
            "us": [row.us for row in rows],
            "predicted_us": found.us,
            "sigma": found.sigma,
            "view": [is_view(row.facts, row.choice) for row in rows],
        }
    )


def _transforms(case: _Case, model: CostModel) -> pd.DataFrame:
    rows = case.rows.transforms
    found = model.transforms([row.key for row in rows])
    return pd.DataFrame(
        {
            "table": case.name,
            "workload": [row.key.workload for row in rows],
            "candidate": [row.key.candidate for row in rows],
            "us": [row.us for row in rows],
            "predicted_us": found.us,
            "sigma": found.sigma,
            "view": [row.key.keeps_order for row in rows],
        }
    )


def _choice(case: _Case, model: CostModel) -> pd.DataFrame:
    """Solve under predicted costs alone, pay the measured ones."""
    table, skeleton = case.table, case.table.skeleton
    kernels = dict(zip(_pairs(table), model.kernels([(w.facts, c) for w, c in table.candidates]).us, strict=True))
    keys = list(dict.fromkeys(skeleton.keys.values()))
    transforms = dict(zip(keys, model.transforms(keys).us, strict=True))
    predicted = skeleton.problem(
        # What cannot run is known to be impossible without measuring how fast it is.
        lambda w, c: float(kernels[w.key, str(c)]) if table.of(w, c).best_us < float("inf") else float("inf"),
        lambda key: float(transforms[key]),
    )
    chosen = solve(predicted, time_limit_s=_SOLVE_S).assignment
    optimum = solve(table.problem, time_limit_s=_SOLVE_S).assignment
    row = {"table": case.name, "optimum_us": table.additive_us(optimum), "chosen_us": table.additive_us(chosen)}
    return pd.DataFrame([row])


def _pairs(table: Table) -> list[tuple[str, str]]:
    return [(workload.key, str(choice)) for workload, choice in table.candidates]


def _wholes(cases: Sequence[_Case], models: Mapping[str, CostModel], seed: int) -> pd.DataFrame:
    rows: dict[str, list[WholeRow]] = {}
    frames = []
    for case in cases:
        shapes = relative_to_best([_shape(case, models[case.name], whole) for whole in case.table.wholes])
        rows[case.name] = [
            WholeRow(shape, case.table.leveled_us(whole), case.table.header.model)
            for shape, whole in zip(shapes, case.table.wholes, strict=True)
        ]
    for case in cases:
        own = rows[case.name]
        if not own:
            continue
        rest = [
            row for other in cases if other.table.header.model != case.table.header.model for row in rows[other.name]
        ]
        correction = Correction.fit(rest)
        found = correction.predict([row.shape for row in own], case.name)
        frame = pd.DataFrame(
            {
                "table": case.name,
                "label": [whole.label for whole in case.table.wholes],
                "us": [row.us for row in own],
                "additive_us": [row.shape.additive_us for row in own],
                "modeled_us": _modeled(case, models[case.name]),
                "corrected_us": found.us,
                "sigma": found.sigma,
            }
        )
        for count in OWN_TIMINGS:
            frame[f"own_{count}_us"] = _after(correction, own, case.name, count, seed)
        frames.append(frame)
    if not frames:
        raise LayoutSearchError("no table has assignments that were timed whole; record again with --wholes 30")
    return pd.concat(frames, ignore_index=True)


def _after(correction: Correction, own: Sequence[WholeRow], name: str, count: int, seed: int) -> np.ndarray:
    """Predictions of each assignment after `count` timings of others, the median over several draws of those."""
    own = [WholeRow(row.shape, row.us, name) for row in own]
    rng = np.random.default_rng([seed, count])
    draws: list[list[float]] = [[] for _ in own]
    for _ in range(_DRAWS if count < len(own) else 0):
        order = rng.permutation(len(own))
        held = order[count:]
        found = correction.updated([own[i] for i in order[:count]]).predict([own[i].shape for i in held], name)
        for i, us in zip(held, found.us, strict=True):
            draws[i].append(float(us))
    return np.array([float(np.median(d)) if d else np.nan for d in draws])


def _shape(case: _Case, model: CostModel, whole: RecordedWhole) -> WholeShape:
    """The shape of an assignment under the measured times of the schedules that it was built with."""
    table = case.table
    special = dict(whole.schedules)
    kernels = []
    for index, (node, choice) in enumerate(zip(table.skeleton.nodes, whole.solution, strict=True)):
        candidate = node.choices[choice]
        known = table.of(node.workload, candidate)
        us = cost_us(special[index], known.tries[special[index]]) if index in special else known.best_us
        kernels.append((node.workload.facts, candidate, us))
    transforms = [(key, table.transform(key).best_us) for key in table.skeleton.transforms(whole.solution)]
    return whole_shape(kernels, transforms, model.machine)


def _modeled(case: _Case, model: CostModel) -> list[float]:
    """Additive times of the assignments out of predicted parts."""
    table, skeleton = case.table, case.table.skeleton
    kernels = dict(zip(_pairs(table), model.kernels([(w.facts, c) for w, c in table.candidates]).us, strict=True))
    keys = list(dict.fromkeys(skeleton.keys.values()))
    transforms = dict(zip(keys, model.transforms(keys).us, strict=True))
    found = []
    for whole in table.wholes:
        nodes: Iterable[tuple[str, str]] = (
            (node.workload.key, str(node.choices[choice]))
            for node, choice in zip(skeleton.nodes, whole.solution, strict=True)
        )
        moves = skeleton.transforms(whole.solution)
        found.append(float(sum(kernels[n] for n in nodes) + sum(transforms[k] for k in moves)))
    return found
