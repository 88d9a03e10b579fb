"""The loop over trials: what is measured, told, pruned, failed, repeated, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import optuna
import pytest
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from layoutsearch.errors import LayoutSearchError
from layoutsearch.layout.transform import TransformKey
from layoutsearch.measure.results import Measurement, Status
from layoutsearch.search.budget import Budget
from layoutsearch.search.known import Request
from layoutsearch.search.parameters import AssignmentSpace
from layoutsearch.search.solve import solve
from layoutsearch.search.storage import open_storage
from layoutsearch.search.study import SAMPLERS, StudySearch, make_sampler, open_study, study_name
from tests.search.small_model import Failures, SmallLab, SmallSearch, chain_skeleton, optimum

SKELETON = chain_skeleton()
SPACE = AssignmentSpace.of(SKELETON)


class Notes:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.bests: list[str] = []

    def stage(self, name: str, total: int) -> None:
        pass

    def step(self, what: str, count: int = 1) -> None:
        pass

    def best(self, text: str) -> None:
        self.bests.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)


class Run:
    """One process's part of a study in a journal of `folder`."""

    def __init__(
        self,
        folder: Path,
        sampler: str = "solver",
        *,
        seed: int = 0,
        failures: Failures | None = None,
        noise: float = 0.4,
    ) -> None:
        self.storage: BaseStorage = open_storage(None, folder)
        self.budget, self.reporter = Budget(), Notes()
        self.lab = SmallLab(SKELETON, self.budget, failures=failures)
        self.search = SmallSearch(SKELETON, self.lab, noise)
        self.study = open_study(self.storage, "small", make_sampler(sampler, SPACE, self.search, seed))
        self.loop = StudySearch(
            self.study, self.storage, SPACE, SKELETON, self.lab, self.search, self.budget, self.reporter
        )

    def state(self, state: TrialState) -> list[optuna.trial.FrozenTrial]:
        return self.study.get_trials(states=[state])

    def interrupt_at(self, kernels: int, what: Callable[[], None]) -> None:
        """Do something when so many kernels were measured."""

        def before(workload: str) -> None:
            if self.lab.measured == kernels:
                what()

        self.lab.before = before  # type: ignore[method-assign]


def test_the_solver_finds_the_optimum_and_settles_there(tmp_path: Path) -> None:
    run = Run(tmp_path)
    outcome = run.loop.run(max_trials=400)
    assert outcome.reason == "settled"
    assert outcome.cost_us == pytest.approx(optimum(SKELETON, run.lab))
    assert outcome.solution is not None
    assert run.search.evaluate(outcome.solution) == outcome.cost_us == run.study.best_value
    assert run.reporter.bests


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_complete_trial_costs_what_its_assignment_costs(tmp_path: Path, sampler: str) -> None:
    run = Run(tmp_path, sampler)
    outcome = run.loop.run(max_trials=30)
    assert (outcome.reason, outcome.trials, len(run.study.trials)) == ("trials", 30, 30)
    complete = run.state(TrialState.COMPLETE)
    assert complete
    for trial in complete:
        assert trial.value == pytest.approx(run.search.evaluate(SPACE.solution(trial.params)))
    assert outcome.cost_us == min(t.value for t in complete if t.value is not None)


def test_what_a_trial_says_of_itself(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.loop.run(max_trials=10)
    shares = []
    for trial in run.study.trials:
        solution = SPACE.solution(trial.params)
        assert trial.user_attrs["transforms"] == len(SKELETON.transforms(solution))
        assert trial.user_attrs["owner"]["pid"] > 0
        shares.append(trial.user_attrs["share_measured"])
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] <= 1
    assert sum(t.user_attrs["measured"] for t in run.study.trials) == run.lab.measured


def test_nothing_is_measured_twice(tmp_path: Path) -> None:
    run = Run(tmp_path, "random")
    run.loop.run(max_trials=60)
    assert len(run.lab.asked) == len(set(run.lab.asked))


def test_a_trial_is_pruned_once_its_measured_part_alone_is_too_much(tmp_path: Path) -> None:
    run = Run(tmp_path, "random")
    run.loop.run(max_trials=60)
    pruned = run.state(TrialState.PRUNED)
    assert pruned
    best = float("inf")
    for trial in run.study.trials:
        if trial.state is TrialState.PRUNED:
            partial = trial.intermediate_values[max(trial.intermediate_values)]
            assert best < partial
            true_us = SKELETON.problem(run.lab.true_us, run.lab.true_transform_us).evaluate(
                SPACE.solution(trial.params)
            )
            assert partial <= true_us.total + 1e-9
        elif trial.value is not None:
            best = min(best, trial.value)
    assert any(any(run.search.requests(SPACE.solution(t.params))) for t in pruned), "something was left unmeasured"


CRASH = Measurement(Status.CRASH, (), "the kernel crashed the server")


def test_a_kernel_that_fails_fails_its_trial_and_says_why(tmp_path: Path) -> None:
    failures = {(node, choice): CRASH for node in range(2) for choice in (0, 2)}
    run = Run(tmp_path, failures=failures)
    outcome = run.loop.run(max_trials=40)
    failed = run.state(TrialState.FAIL)
    assert failed
    for trial in failed:
        solution = SPACE.solution(trial.params)
        assert solution[0] in (0, 2) or solution[1] in (0, 2)
        assert "crash: the kernel crashed the server" in trial.user_attrs["why"]
        assert trial.user_attrs["why"].startswith(("a conv0 NCHW", "a conv1 NCHW"))
        assert "\n" not in trial.user_attrs["why"]
    for trial in run.state(TrialState.COMPLETE):
        solution = SPACE.solution(trial.params)
        assert solution[0] in (1, 3)
        assert solution[1] in (1, 3)
    assert outcome.cost_us == pytest.approx(optimum(SKELETON, run.lab))
    assert len(run.reporter.notes) == len(failed)


def test_where_everything_fails_there_is_no_solution(tmp_path: Path) -> None:
    run = Run(tmp_path, "random", failures={(0, choice): CRASH for choice in range(4)})
    outcome = run.loop.run(max_trials=10)
    assert outcome.solution is None
    assert {t.state for t in run.study.trials} == {TrialState.FAIL}


def test_a_known_assignment_is_told_again_without_measuring(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.loop.run(max_trials=1)
    first, measured = run.study.trials[0], run.lab.measured
    for _ in range(3):
        run.study.enqueue_trial(first.params)
    outcome = run.loop.run(repeats=3)
    assert (outcome.reason, outcome.trials) == ("settled", 3)
    assert run.lab.measured == measured
    assert [t.value for t in run.study.trials] == [first.value] * 4


def test_the_search_says_when_it_has_finished(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.interrupt_at(3, lambda: setattr(run.search, "done", True))
    outcome = run.loop.run()
    assert (outcome.reason, outcome.trials) == ("finished", 1)
    assert run.study.trials[0].state is TrialState.COMPLETE


@pytest.mark.parametrize("kernels", [0, 2, 5])
def test_an_interrupted_trial_is_the_first_of_the_next_run(tmp_path: Path, kernels: int) -> None:
    run = Run(tmp_path)
    run.interrupt_at(kernels, run.budget.interrupt)
    outcome = run.loop.run()
    assert (outcome.reason, outcome.trials) == ("interrupted", 1)
    (trial,) = run.state(TrialState.FAIL)
    assert trial.user_attrs["why"] == "the run was stopped"

    again = Run(tmp_path)
    again.loop.run(max_trials=1)
    retried = again.study.trials[1]
    assert retried.user_attrs["retry_of"] == 0
    assert retried.params == trial.params
    assert retried.state is TrialState.COMPLETE


def test_no_trial_begins_without_time(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.budget.seconds = 30.0
    outcome = run.loop.run(reserve_s=60.0)
    assert (outcome.reason, outcome.trials, outcome.solution) == ("budget", 0, None)


def test_an_error_leaves_no_trial_running(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def gone() -> None:
        raise LayoutSearchError("the device is gone: no answer")

    run.interrupt_at(2, gone)
    with pytest.raises(LayoutSearchError, match="the device is gone"):
        run.loop.run()
    (trial,) = run.state(TrialState.FAIL)
    assert trial.user_attrs["why"] == "LayoutSearchError: the device is gone: no answer"
    again = Run(tmp_path)
    again.loop.run(max_trials=1)
    assert again.study.trials[1].params == trial.params


def test_a_run_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    first = Run(tmp_path)
    best = first.loop.run(max_trials=5)
    second = Run(tmp_path, seed=1)
    outcome = second.loop.run(max_trials=3)
    assert len(second.study.trials) == 8
    assert outcome.cost_us <= best.cost_us


def test_an_assignment_found_otherwise_is_told_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.loop.run(max_trials=3)
    solution = solve(SKELETON.problem(run.lab.true_us, run.lab.true_transform_us)).assignment
    for _ in range(2):
        run.loop.tell(solution)
        assert len(run.study.trials) == 4
    assert SPACE.solution(run.study.best_params) == solution
    assert run.study.best_value == pytest.approx(optimum(SKELETON, run.lab))


def test_the_search_is_asked_few_times_a_trial(tmp_path: Path) -> None:
    """A search may learn from what was measured whenever it is asked, which takes long."""
    run = Run(tmp_path)
    asked, requests = [], run.search.requests

    def counted(solution: Sequence[int]) -> tuple[list[Request], list[TransformKey]]:
        asked.append(solution)
        return requests(solution)

    run.search.requests = counted  # type: ignore[method-assign]
    run.loop.run(max_trials=10)
    assert len(asked) <= 20


def test_whole_times_are_kept_with_their_trial(tmp_path: Path) -> None:
    run = Run(tmp_path)
    outcome = run.loop.run(max_trials=5)
    assert outcome.solution is not None
    assert run.loop.note_whole(outcome.solution, 1234.5)
    number = run.study.best_trial.number
    assert Run(tmp_path).study.user_attrs[f"whole_us/{number}"] == 1234.5
    assert not run.loop.note_whole((0, 1, 0, 1, 0, 1, 0), 1.0)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_what_people_look_at_a_study_with(tmp_path: Path) -> None:
    matplotlib.use("Agg")
    Run(tmp_path).loop.run(max_trials=30)
    # As optuna-dashboard opens a file: by the backend of Optuna itself.
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.journal"))
    study = optuna.load_study(study_name="small", storage=optuna.storages.JournalStorage(backend))
    assert len(study.trials) == 30
    assert study.user_attrs["unit"] == "us"
    frame = study.trials_dataframe()
    assert {"params_conv0", "user_attrs_transforms", "value"} <= set(frame.columns)
    plots = optuna.visualization.matplotlib
    for plot in (plots.plot_optimization_history, plots.plot_intermediate_values, plots.plot_param_importances):
        assert plot(study) is not None
    assert set(optuna.importance.get_param_importances(study)) == set(SPACE.distributions)
    plt.close("all")


def test_names_of_studies_change_with_whatever_a_time_depends_on() -> None:
    where = {"target": "llvm -mcpu=x", "device": "local 2 threads", "templates": "conv2d3"}
    name = study_name("net", "fingerprint", SPACE, **where)
    assert name == study_name("net", "fingerprint", AssignmentSpace.of(chain_skeleton()), **where)
    others = {
        study_name("net", "another", SPACE, **where),
        study_name("net", "fingerprint", AssignmentSpace.of(chain_skeleton(5)), **where),
        *(study_name("net", "fingerprint", SPACE, **{**where, key: "other"}) for key in where),
    }
    assert len(others - {name}) == 5
    assert name.startswith("net-")


def test_an_unknown_sampler_is_an_error_that_lists_them() -> None:
    run_space = AssignmentSpace.of(SKELETON)
    search = SmallSearch(SKELETON, SmallLab(SKELETON, Budget()))
    with pytest.raises(
        LayoutSearchError, match="--sampler 'gp' is unknown; expected one of solver, tpe, random, nsga2"
    ):
        make_sampler("gp", run_space, search)
