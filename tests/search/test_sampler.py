"""The solver's sampler: Optuna's own conformance suites, and what is particular to it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.samplers import BaseSampler, PartialFixedSampler
from optuna.testing.pytest_samplers import (
    BasicSamplerTestCase,
    MultiObjectiveSamplerTestCase,
    RelativeSamplerTestCase,
)

from layoutsearch.search.budget import Budget
from layoutsearch.search.parameters import AssignmentSpace, Parameter
from layoutsearch.search.sampler import SolverSampler
from tests.search.small_model import SmallLab, SmallSearch, chain_skeleton

optuna.logging.set_verbosity(optuna.logging.WARNING)


class AnyChoice:
    """Proposes every candidate alike, and counts how often it is asked."""

    def __init__(self, space: AssignmentSpace) -> None:
        choices = {p.node: len(p.choices) for p in space.parameters}
        self._sizes = [choices.get(node, 1) for node in range(space.size)]
        self.asked = 0

    def propose(self, rng: np.random.Generator) -> Sequence[int]:
        self.asked += 1
        return [int(rng.integers(size)) for size in self._sizes]


# Names and choices that the suites use themselves, for other distributions as well.
FAMILIAR = AssignmentSpace(
    (
        Parameter("x", ("a", "b", "c"), 0),
        Parameter("y", ("a", "b"), 1),
        Parameter("category", ("x", "y"), 2),
        Parameter("never suggested", ("NCHW", "NHWC"), 3),
    ),
    4,
)
MODEL = AssignmentSpace.of(chain_skeleton())


class AnyFamiliarity:
    """The sampler of the suites: one that knows none of their parameters, one that knows some."""

    @pytest.fixture(params=["model", "familiar"])
    def sampler(self, request: pytest.FixtureRequest) -> Callable[[], BaseSampler]:
        space = MODEL if request.param == "model" else FAMILIAR
        return lambda: SolverSampler(space, AnyChoice(space), seed=0)


class TestBasic(AnyFamiliarity, BasicSamplerTestCase):
    pass


class TestRelative(AnyFamiliarity, RelativeSamplerTestCase):
    pass


class TestMultiObjective(AnyFamiliarity, MultiObjectiveSamplerTestCase):
    pass


def solver_sampler(seed: int | None) -> SolverSampler:
    skeleton = chain_skeleton()
    return SolverSampler(MODEL, SmallSearch(skeleton, SmallLab(skeleton, Budget())), seed=seed)


def assignments(study: optuna.Study, trials: int) -> list[dict[str, object]]:
    found = []
    for _ in range(trials):
        trial = study.ask(MODEL.distributions)
        study.tell(trial, 1.0)
        found.append(trial.params)
    return found


def new_study(sampler: BaseSampler) -> optuna.Study:
    return optuna.create_study(sampler=sampler)


def test_a_trial_is_one_proposal() -> None:
    proposer = AnyChoice(MODEL)
    proposer.propose = lambda rng: (3, 0, 2, 1, 3, 0, 0)  # type: ignore[method-assign]
    study = new_study(SolverSampler(MODEL, proposer, seed=0))
    for params in assignments(study, 3):
        assert MODEL.solution(params) == (3, 0, 2, 1, 3, 0, 0)


def test_the_proposer_is_asked_once_a_trial() -> None:
    proposer = AnyChoice(FAMILIAR)
    study = new_study(SolverSampler(FAMILIAR, proposer, seed=0))
    for number in range(4):
        study.tell(study.ask(FAMILIAR.distributions), 1.0)
        assert proposer.asked == number + 1


def test_known_parameters_are_relative_once_the_study_has_them() -> None:
    sampler = SolverSampler(FAMILIAR, AnyChoice(FAMILIAR), seed=0)
    study = new_study(sampler)
    study.tell(study.ask({"x": FAMILIAR.distributions["x"], "y": optuna.distributions.FloatDistribution(0, 1)}), 1.0)
    trial = study.ask()
    assert sampler.infer_relative_search_space(study, study.trials[trial.number]) == {"x": FAMILIAR.distributions["x"]}


def test_equal_seeds_give_equal_studies_and_others_do_not() -> None:
    first, again, other = (assignments(new_study(solver_sampler(seed)), 8) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_workers_of_one_study_with_one_seed_propose_different_assignments() -> None:
    storage = optuna.storages.InMemoryStorage()
    sampler = pickle.dumps(SolverSampler(MODEL, AnyChoice(MODEL), seed=0))
    workers = [
        optuna.create_study(storage=storage, study_name="shared", sampler=pickle.loads(sampler), load_if_exists=True)
        for _ in range(2)
    ]
    trials = [worker.ask(MODEL.distributions) for worker in workers * 3]
    assert len({MODEL.solution(t.params) for t in trials}) > 3


def test_reseeding_leaves_the_seed() -> None:
    reseeded = solver_sampler(3)
    reseeded.reseed_rng()
    assert assignments(new_study(reseeded), 8) != assignments(new_study(solver_sampler(3)), 8)


def test_a_pickled_sampler_goes_on_as_the_original_would() -> None:
    sampler = SolverSampler(MODEL, AnyChoice(MODEL), seed=5)
    study = new_study(sampler)
    study.ask(MODEL.distributions)
    copied = new_study(pickle.loads(pickle.dumps(sampler)))
    copied.ask(MODEL.distributions)
    assert assignments(copied, 4) == assignments(study, 4)


def test_threads_of_optimize_get_assignments_of_their_own() -> None:
    study = new_study(solver_sampler(0))

    def objective(trial: optuna.Trial) -> float:
        return float(len({trial.suggest_categorical(n, d.choices) for n, d in MODEL.distributions.items()}))

    study.optimize(objective, n_trials=12, n_jobs=3)
    assert len(study.get_trials(states=[optuna.trial.TrialState.COMPLETE])) == 12
    assert len({MODEL.solution(t.params) for t in study.trials}) > 6


def test_queued_trials_come_first_and_cost_no_proposal() -> None:
    proposer = AnyChoice(MODEL)
    study = new_study(SolverSampler(MODEL, proposer, seed=0))
    queued = MODEL.params((1, 1, 1, 1, 1, 1, 0))
    study.enqueue_trial(queued)
    assert assignments(study, 1) == [queued]
    assert proposer.asked == 0


def test_fixed_parameters_stay_fixed_and_the_others_are_proposed() -> None:
    proposer = AnyChoice(MODEL)
    proposer.propose = lambda rng: (3, 0, 2, 1, 3, 0, 0)  # type: ignore[method-assign]
    sampler = PartialFixedSampler({"conv0": "NCHW,NCHW"}, SolverSampler(MODEL, proposer, seed=0))
    for params in assignments(new_study(sampler), 3):
        assert MODEL.solution(params) == (0, 0, 2, 1, 3, 0, 0)


def test_conditional_and_changing_spaces() -> None:
    study = new_study(SolverSampler(FAMILIAR, AnyChoice(FAMILIAR), seed=0))

    def objective(trial: optuna.Trial) -> float:
        value = trial.suggest_float(f"only in {trial.number}", 0, 1)
        if trial.suggest_categorical("x", ["a", "b", "c"]) == "a":
            return value + trial.suggest_int("depth", 1, 9)
        return value + len(trial.suggest_categorical("y", ["a", "b"]))

    study.optimize(objective, n_trials=20)
    assert {t.state for t in study.trials} == {optuna.trial.TrialState.COMPLETE}


def test_two_objectives() -> None:
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=solver_sampler(0))
    for _ in range(4):
        trial = study.ask(MODEL.distributions)
        study.tell(trial, (1.0, 2.0))
    assert len(study.best_trials) == 4


def test_of_trials_that_are_never_told_the_last_few_hundred_proposals_are_kept() -> None:
    proposer = AnyChoice(FAMILIAR)
    sampler = SolverSampler(FAMILIAR, proposer, seed=0)
    study = new_study(sampler)
    for _ in range(600):
        study.ask(FAMILIAR.distributions)
    name, distribution = next(iter(FAMILIAR.distributions.items()))
    sampler.sample_independent(study, study.trials[-1], name, distribution)
    assert proposer.asked == 600
    sampler.sample_independent(study, study.trials[0], name, distribution)
    assert proposer.asked == 601


def test_a_proposal_that_is_no_solution_is_an_error_that_says_so() -> None:
    proposer = AnyChoice(MODEL)
    proposer.propose = lambda rng: (0, 1)  # type: ignore[method-assign]
    study = new_study(SolverSampler(MODEL, proposer, seed=0))
    with pytest.raises(ValueError, match="2 entries, expected 7"):
        study.ask(MODEL.distributions)


def test_a_space_gives_each_kernel_with_a_choice_a_parameter() -> None:
    assert [p.name for p in MODEL.parameters] == [f"conv{i}" for i in range(6)]
    assert MODEL.distributions["conv0"] == CategoricalDistribution(
        ["NCHW,NCHW", "NHWC,NHWC", "NCHW8c,NCHW8c", "NCHW16c,NCHW16c"]
    )
    named = AssignmentSpace.of(chain_skeleton(), {"conv0": "conv2d:1234:0"})
    assert named.parameters[0].name == "conv2d:1234:0"
    assert named.digest != MODEL.digest
    solution = (3, 0, 2, 1, 3, 1, 0)
    assert MODEL.solution(MODEL.params(solution)) == solution


def test_a_space_says_what_is_wrong_with_it() -> None:
    with pytest.raises(ValueError, match="two parameters are called 'x'"):
        AssignmentSpace((Parameter("x", ("a", "b"), 0), Parameter("x", ("a", "b"), 1)), 2)
    with pytest.raises(ValueError, match="x has two equal choices"):
        AssignmentSpace((Parameter("x", ("a", "a"), 0),), 1)
    with pytest.raises(ValueError, match="x is 'd'; expected one of a, b, c"):
        FAMILIAR.solution({"x": "d", "y": "a"})
    with pytest.raises(ValueError, match="x has no choice 3"):
        FAMILIAR.params((3, 0, 0, 0))
