"""Trials and the processes that run them: what a killed process left RUNNING is told, and asked again."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Sequence

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from layoutsearch.search.owner import Owner

OWNER = "owner"
RETRY_OF = "retry_of"
WHY = "why"
# Set on trials that are owed another go, so that it is given even if the process that was to give it dies as well.
RETRY = "retry"

# A process writes its name into a trial within milliseconds after it has asked for it.
_NAMELESS_S = 60.0
_MOST_GOES = 3


def recover(study: Study, storage: BaseStorage, names: Collection[str]) -> list[str]:
    """Tell trials of dead processes of this machine as failed, and put them back into the queue.

    Args:
        study: its trials.
        storage: of the study.
        names: of its parameters.

    Returns:
        A line for each trial that was told.
    """
    notes = []
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        owner = Owner.from_json(trial.user_attrs.get(OWNER))
        if owner.dead if owner else _nameless(trial):
            who = f"its process {owner.pid}" if owner else "its process"
            if _give_up(storage, trial, f"{who} was killed"):
                notes.append(f"trial {trial.number}: {who} was killed")
    requeue(study, names)
    return notes


def _give_up(storage: BaseStorage, trial: FrozenTrial, why: str) -> bool:
    """Tell a running trial as failed and owed another go; False if another process was first."""
    try:
        storage.set_trial_user_attr(trial._trial_id, WHY, why)
        storage.set_trial_user_attr(trial._trial_id, RETRY, True)
        storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
    except UpdateFinishedTrialError:
        return False
    return True


def requeue(study: Study, names: Collection[str]) -> None:
    """Put every trial that is owed another go, and has not had it yet, into the queue.

    Not those that were killed before they had all parameters: nothing is lost with them. Two processes that do this at
    once may queue a trial twice; the second is then told without being measured. After three goes a trial is let be:
    it may be what kills its process.
    """
    trials = study.get_trials(deepcopy=False)
    retried = {t.user_attrs.get(RETRY_OF) for t in trials}
    for trial in trials:
        owed = trial.state is TrialState.FAIL and trial.user_attrs.get(RETRY) and trial.number not in retried
        params = asked_params(trial)
        if owed and params.keys() >= set(names) and _goes(trials, trial) < _MOST_GOES:
            study.enqueue_trial(params, user_attrs={RETRY_OF: trial.number})


def asked_params(trial: FrozenTrial) -> dict[str, object]:
    """The parameters of a trial, or those it was queued with if it has not got that far."""
    return {**trial.system_attrs.get("fixed_params", {}), **trial.params}


def _nameless(trial: FrozenTrial) -> bool:
    """Whether a process was killed between asking for a trial and writing its name into it.

    Trials of a user's own scripts have no owner either, but they have parameters.
    """
    if OWNER in trial.user_attrs or trial.params or trial.datetime_start is None:
        return False
    now = datetime.datetime.now(tz=trial.datetime_start.tzinfo)
    return (now - trial.datetime_start).total_seconds() > _NAMELESS_S


def _goes(trials: Sequence[FrozenTrial], trial: FrozenTrial) -> int:
    """How often a trial was begun, the trials it repeats included."""
    count, before = 1, trial.user_attrs.get(RETRY_OF)
    while isinstance(before, int) and 0 <= before < len(trials):
        count, before = count + 1, trials[before].user_attrs.get(RETRY_OF)
    return count


def claim(trial: optuna.Trial) -> None:
    """Write the name of this process into a trial."""
    trial.set_user_attr(OWNER, Owner.current().to_json())
