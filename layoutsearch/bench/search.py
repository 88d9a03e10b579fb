"""`layoutsearch bench search`: how good an assignment each search finds after how many measurements of a table.

Regret is what the assignment that a search would ship costs more than the optimum, both with all that is recorded; the
share is that of the candidates, of kernels with a choice, of which any schedule was tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context

import pandas as pd

from layoutsearch.bench.samplers import METHODS, measured_shares
from layoutsearch.cost.bounds import Bounds
from layoutsearch.cost.model import CostModel
from layoutsearch.cost.train import Rows, fit_from, rows_of
from layoutsearch.errors import LayoutSearchError
from layoutsearch.measure.profile import DeviceProfile
from layoutsearch.replay.lab import ReplayLab
from layoutsearch.replay.table import Table
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.search.lazy import LazySearch
from layoutsearch.search.solve import solve
from layoutsearch.targets import as_target

LIMITS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
"""Shares of the candidates after which each search is asked for its best assignment."""

OURS = "solver"
SEARCHES = (OURS, *METHODS)

# A bound is above the optimum if it is so by more than rounding.
_ROUNDING = 1e-9
# Steps worth less than this part of the cost do not keep a search from trying new candidates.
_NOTICED = 2e-4


@dataclass(frozen=True)
class Case:
    """A table to search in, and what is known before from tables of other models."""

    name: str
    table: Table
    others: Rows
    seed: int = 0

    @cached_property
    def profile(self) -> DeviceProfile | None:
        """The recorded device."""
        return self.table.profile

    @cached_property
    def model(self) -> CostModel:
        """Fitted to the other models."""
        header = self.table.header
        target = TargetInfo.from_target(as_target(dict(header.target)), header.threads)
        return fit_from([self.others], self.profile, target=target, seed=self.seed)

    @cached_property
    def optimum_us(self) -> float:
        """The true additive optimum."""
        return solve(self.table.problem).cost

    def regret(self, solution: Sequence[int]) -> float:
        """What an assignment truly costs more than the optimum, as a part of it; `inf` if it does not run."""
        return self.table.additive_us(solution) / self.optimum_us - 1.0


def cases(tables: Mapping[str, Table], seed: int = 0) -> list[Case]:
    """Every table with the rows of all tables of other models.

    Raises:
        LayoutSearchError: no table.
    """
    if not tables:
        raise LayoutSearchError("there is no table to search in; record some with layoutsearch bench record")
    rows = {name: rows_of(table.skeleton, table, table.header.model) for name, table in tables.items()}
    return [
        Case(
            name,
            table,
            sum((rows[k] for k, other in tables.items() if other.header.model != table.header.model), Rows()),
            seed,
        )
        for name, table in tables.items()
    ]


def compare(
    found: Sequence[Case],
    seeds: int,
    searches: Sequence[str] = SEARCHES,
    tell: Callable[[str], None] = lambda _: None,
    jobs: int = 1,
) -> pd.DataFrame:
    """Run every search on every table.

    Args:
        found: the tables.
        seeds: runs of each search.
        searches: of `SEARCHES`.
        tell: called with a line for each run.
        jobs: processes; the result is the same with any number.

    Returns:
        One row for each table, search, seed and limit: table, search, seed, limit, share, regret; and of our own search
        gap, strict_gap, valid (whether the optimum is above the bound), seconds (simulated). `limit` is the share that
        was allowed.
    """
    runs = [(case, search, seed) for case in found for seed in range(seeds) for search in searches]
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) if jobs > 1 else None
    with pool or nullcontext():
        answers = pool.map(_run, *zip(*runs, strict=True)) if pool else (_run(*run) for run in runs)
        rows = []
        for (case, search, seed), points in zip(runs, answers, strict=True):
            tell(f"{case.name}: {search}, seed {seed}")
            rows += [{"table": case.name, "search": search, "seed": seed, **point} for point in points]
    return pd.DataFrame(rows)


def _run(case: Case, search: str, seed: int) -> list[dict[str, float]]:
    return list(ours(case, seed) if search == OURS else others(case, search, seed))


def others(case: Case, method: str, seed: int) -> Iterator[dict[str, float]]:
    """Points of a search that does not solve: what it would ship at each limit."""
    for limit, share, solution in measured_shares(case.table, method, seed, LIMITS):
        yield {"limit": limit, "share": share, "regret": case.regret(solution)}


def ours(case: Case, seed: int) -> Iterator[dict[str, float]]:
    """Points of the lazy exact search: within each limit it measures all that is worth it."""
    lab = ReplayLab(case.table)
    bounds = Bounds(case.profile) if case.profile is not None else None
    search = LazySearch(case.table.skeleton, lab, case.model, bounds, seed=seed, gap=0.0)
    for limit in LIMITS:
        if limit < 1.0:
            _search_to(search, math.floor(limit * search.state().candidates))
        state = search.state() if limit < 1.0 else search.exhaust()
        yield {
            "limit": limit,
            "share": state.measured / max(1, state.candidates),
            "regret": case.regret(state.solution),
            "gap": state.gap,
            "strict_gap": state.strict_gap,
            "valid": float(state.lower_bound_us <= case.optimum_us * (1 + _ROUNDING)),
            "seconds": lab.budget.elapsed_s,
        }


def _search_to(search: LazySearch, candidates: int) -> None:
    """Search until so many candidates are measured and nothing noticeable is left to learn of them."""
    while True:
        state = search.state()
        steps = search.next_batch(new=max(0, candidates - state.measured))
        enough = state.measured >= candidates and sum(s.worth_us for s in steps) < _NOTICED * state.cost_us
        if not steps or enough or not search.measure(steps):
            return
