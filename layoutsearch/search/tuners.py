"""Where the schedules of a kernel come from: templates, MetaSchedule, or both in a race."""

from __future__ import annotations

from enum import Enum

from layoutsearch.cost.improvement import FULL_TRIES
from layoutsearch.errors import LayoutSearchError
from layoutsearch.measure.records import canonical_json
from layoutsearch.schedule.metaschedule import NAME
from layoutsearch.schedule.value import TEMPLATES
from layoutsearch.search.known import Known

PROPOSALS = FULL_TRIES
"""Schedules of one candidate that MetaSchedule is asked for at most."""
NO_MORE = canonical_json({"template": NAME, "version": TEMPLATES[NAME].version, "params": {"trace": [[], []]}})
"""The empty trace: its record says that MetaSchedule has no further schedule, or why it could not find one."""

_OURS = f'"template":"{NAME}"'
_GENERIC = '"template":"loops"'
_TUNABLE = (_GENERIC, '"template":"flat"', '"template":"channels"', '"template":"winograd"')


class KernelTuner(str, Enum):
    """Who proposes schedules: `metaschedule` where there is no template but generic loops, `both` everywhere."""

    TEMPLATE = "template"
    METASCHEDULE = "metaschedule"
    BOTH = "both"

    @classmethod
    def named(cls, name: str) -> KernelTuner:
        """The tuner of this name.

        Raises:
            LayoutSearchError: there is none.
        """
        try:
            return cls(name)
        except ValueError:
            raise LayoutSearchError(
                f"--kernel-tuner {name!r} is unknown; expected one of {', '.join(t.value for t in cls)}"
            ) from None

    def goes_on(self, known: Known) -> bool:
        """Whether MetaSchedule may have a further schedule of a candidate.

        What a kernel is shows in the template of its first schedule. One that a model runs as a view has nothing to
        gain.
        """
        if self is KernelTuner.TEMPLATE or NO_MORE in known.tries or _proposed(known) >= PROPOSALS:
            return False
        wanted = _TUNABLE if self is KernelTuner.BOTH else (_GENERIC,)
        return any(name in schedule for schedule in known.tries for name in wanted)

    def shares(self, known: Known, missing: int) -> tuple[int, int]:
        """How many of the next `missing` schedules come from the template, and from MetaSchedule.

        The first is the template's; from there on they take turns until one has no more.
        """
        if self is KernelTuner.TEMPLATE:
            return missing, 0
        if not known.tries:
            return min(1, missing), 0
        proposed = _proposed(known)
        if not self.goes_on(known):
            return (0 if known.spent else missing), 0
        if known.spent:
            return 0, min(missing, PROPOSALS - proposed)
        turns = (len(known.tries) + missing) // 2 - proposed
        taken = max(0, min(missing, turns, PROPOSALS - proposed))
        return missing - taken, taken


def is_proposed(schedule: str) -> bool:
    """Whether a schedule (JSON) is MetaSchedule's."""
    return _OURS in schedule


def _proposed(known: Known) -> int:
    return sum(map(is_proposed, known.tries))
