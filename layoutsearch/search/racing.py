"""Where the next measurements are worth most: new candidates, further schedules of those that ran, transforms.

All compete for the same seconds. What a step is worth is read from solved draws of the posterior: by how much the
drawn optima that use a cost count on its being lower than what is known of it. That is large for what may change the
optimum, weighs each kernel by how often the model runs it, and is nothing for what no optimum uses. Schedule tries
double from step to step, so that few candidates get many: successive halving with the posterior as the judge.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from layoutsearch.cost.improvement import FULL_TRIES
from layoutsearch.layout.transform import TransformKey
from layoutsearch.search.beliefs import Beliefs
from layoutsearch.search.cost_index import CostIndex, FloatArray
from layoutsearch.search.gap import Draws, SearchState
from layoutsearch.search.known import Request

# Schedules of a candidate's first measurement: the second halves what is still to be gained, see `cost.improvement`.
FIRST_TRIES = 2
# Steps of one batch: some for each build worker, few enough that the next ones are chosen with what these said.
BATCH = 8
# What a step costs, in units of one schedule: every build has to lower the kernel and link first.
_BUILD = 1.5
# Steps worth less than this part of the batch's best wait for better knowledge.
_WORTHWHILE = 0.05


@dataclass(frozen=True)
class Step:
    """One thing to measure.

    Attributes:
        what: a request of a kernel, or a transform.
        worth_us: what the drawn optima count on, on average.
        effort: in units of building and timing one schedule.
    """

    what: Request | TransformKey
    worth_us: float
    effort: float

    @property
    def rate(self) -> float:
        """Worth by effort."""
        return self.worth_us / self.effort


def next_tries(tries: int) -> int:
    """Schedules in all after the next step of a candidate that has had `tries`."""
    return FIRST_TRIES if tries < FIRST_TRIES else min(2 * tries, FULL_TRIES)


def steps(index: CostIndex, beliefs: Beliefs, state: SearchState, draws: Draws) -> list[Step]:
    """All steps that are worth anything, best rate first; frozen kernels decide nothing, but widen the gap as well."""
    kernels, transforms = beliefs.present()
    worth, moves = _worth(beliefs, state, draws, kernels, transforms, index)
    found = []
    tries, final = beliefs.kernel_evidence.tries, beliefs.kernel_evidence.final
    for k in np.flatnonzero((worth > 0) & ~final & ~beliefs.kernel_evidence.dead):
        workload, choice = index.pairs[k]
        upto = next_tries(int(tries[k])) if index.free[k] or tries[k] else 1
        effort = _BUILD + upto - int(tries[k])
        found.append(Step(Request(workload, choice, upto), float(worth[k]) * _gained(beliefs, int(tries[k])), effort))
    for k in np.flatnonzero((moves > 0) & ~beliefs.moved):
        found.append(Step(index.transforms[k], float(moves[k]), _BUILD + 1))
    return sorted(found, key=lambda step: -step.rate)


def batch(found: list[Step], size: int = BATCH) -> list[Step]:
    """The steps to take together."""
    return [step for step in found[:size] if step.rate >= _WORTHWHILE * found[0].rate]


def _gained(beliefs: Beliefs, tries: int) -> float:
    """The part of what is still to be learned that the next step tells."""
    if tries < FIRST_TRIES:
        return 1.0
    left = beliefs.improvement.moments(np.array([tries, next_tries(tries)]))[0]
    return float(1 - left[1] / left[0]) if left[0] > 0 else 0.0


def _worth(
    beliefs: Beliefs, state: SearchState, draws: Draws, kernels: FloatArray, transforms: FloatArray, index: CostIndex
) -> tuple[FloatArray, FloatArray]:
    """What the drawn optima count on, of each pair and each transform; us, summed over a kernel's occurrences."""
    return _counted_on(draws.uses, kernels, draws.costs[0]), _counted_on(draws.pays, transforms, draws.costs[1])


def _counted_on(uses: np.ndarray, known: FloatArray, drawn: FloatArray) -> FloatArray:
    below = np.where(uses > 0, np.maximum(np.where(np.isfinite(known), known, 0.0) - drawn, 0.0), 0.0)
    return (uses * below).mean(axis=0)
