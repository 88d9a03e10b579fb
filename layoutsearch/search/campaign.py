"""The search for the best assignment by its parts: an Optuna study of assignments, then the schedules in a race."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from layoutsearch.measure.records import RecordContext
from layoutsearch.search.budget import Budget
from layoutsearch.search.gap import SearchState
from layoutsearch.search.known import Lab
from layoutsearch.search.lazy import LazySearch
from layoutsearch.search.reporter import Reporter
from layoutsearch.search.setup import ModelSetup
from layoutsearch.search.storage import open_storage
from layoutsearch.search.study import StudySearch, make_sampler, open_study, study_name

# Proposals of the solver in a row that bring nothing new, or nothing to measure: from here on schedules are worth more.
_REPEATS = 5
_IDLE = 10
# Optuna's own samplers propose something new for ever.
_OTHER_TRIALS = 1000


class Campaign:
    """Searches with one sampler in one study.

    Args:
        setup: the model.
        context: of the records; what a time depends on.
        search: the lazy exact search.
        lab: measures.
        sampler: `solver`, `tpe`, `random` or `nsga2`.
        storage: of the study, as `open_storage` takes it.
        out: output folder.
        seed: of the sampler.
        budget: when to stop.
        reporter: told of progress.

    Raises:
        LayoutSearchError: no such sampler.
        StorageError: the storage cannot be used.
    """

    def __init__(
        self,
        setup: ModelSetup,
        context: RecordContext,
        search: LazySearch,
        lab: Lab,
        sampler: str,
        storage: str | None,
        out: Path,
        seed: int,
        budget: Budget,
        reporter: Reporter,
    ) -> None:
        self._search, self._budget, self._is_solver = search, budget, sampler == "solver"
        space = setup.assignments
        opened = open_storage(storage, out)
        name = study_name(
            setup.loaded.name,
            setup.fingerprint,
            space,
            target=context.target,
            device=context.device,
            cpu=context.cpu,
            threads=str(context.threads),
            tvm=context.tvm,
            template=context.template,
        )
        study = open_study(opened, name, make_sampler(sampler, space, search, seed), {"model": setup.loaded.name})
        self._trials = StudySearch(study, opened, space, setup.skeleton, lab, search, budget, reporter)

    def run(self, reserve_s: float) -> SearchState:
        """Search until it is settled, or the budget is over but for `reserve_s` seconds."""
        if self._is_solver:
            self._trials.run(repeats=_REPEATS, idle=_IDLE, reserve_s=reserve_s)
            state = self._search.run(self._budget, reserve_s)
        else:
            self._trials.run(max_trials=_OTHER_TRIALS, reserve_s=reserve_s)
            state = self._search.finish(self._budget, reserve_s)
        if not self._budget.over(reserve_s):
            self._trials.tell(state.solution)
        return state

    def note_whole(self, solution: Sequence[int], us: float) -> None:
        """Remember in the study what an assignment took as a whole model."""
        self._trials.note_whole(solution, us)
