"""Where the next measurements are worth most: new candidates, further schedules of those that ran, transforms.

All compete for the same seconds. What a step is worth is read from solved draws of the posterior: by how much the
drawn optima that use a cost count on its being lower than what is known of it, and those that avoid what the present
solution uses, on its being higher. That is large for what may change the optimum, weighs each kernel by how often the
model runs it, and is nothing for what no optimum uses. Schedule tries double from step to step, so that few candidates
get many: successive halving with the posterior as the judge.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from layoutsearch.cost.improvement import FULL_TRIES
from layoutsearch.layout.transform import TransformKey
from layoutsearch.search.beliefs import REFINED, Beliefs
from layoutsearch.search.cost_index import BoolArray, CostIndex, FloatArray, IntArray
from layoutsearch.search.gap import Draws, SearchState
from layoutsearch.search.known import Request

# Schedules of a candidate's first measurement: the second halves what is still to be gained, see `cost.improvement`.
FIRST_TRIES = 2
# Steps of one batch: two for each of two build workers, few enough that the next ones are chosen with what these said.
BATCH = 4
# Samples of a schedule that is timed again.
REFINE_SAMPLES = 21
# What a step costs, in units of one schedule: every build has to lower the kernel and link first; timing one again
# takes three times as many samples.
_BUILD, _AGAIN = 1.5, 2.0
# What is not tried, and used by the present solution and the drawn optimum alike, widens the gap but decides nothing.
_AGREED = 0.1
# Steps worth less than this part of the batch's best wait for better knowledge.
_WORTHWHILE = 0.05


@dataclass(frozen=True)
class Step:
    """One thing to measure.

    Attributes:
        what: a request of a kernel, or a transform.
        worth_us: what the drawn optima count on, on average.
        effort: in units of building and timing one schedule.
        pair: entry of the candidate; None for a transform.
        again: whether its fastest schedules are timed again, instead of new ones tried.
    """

    what: Request | TransformKey
    worth_us: float
    effort: float
    pair: int | None = None
    again: bool = False

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
    now = np.array([state.solution], dtype=np.intp)
    worth = _counted_on(draws.uses, index.uses(now)[0], kernels, draws.costs[0], beliefs.measured)
    moves = _counted_on(draws.pays, index.pays(now)[0], transforms, draws.costs[1], beliefs.moved)
    evidence = beliefs.kernel_evidence
    open_pairs = (worth > 0) & ~evidence.final & ~evidence.dead
    found = [_step(index, beliefs, int(k), float(worth[k])) for k in np.flatnonzero(open_pairs)]
    for k in np.flatnonzero((moves > 0) & ~beliefs.moved):
        found.append(Step(index.transforms[k], float(moves[k]), _BUILD + 1))
    return sorted(found, key=lambda step: -step.rate)


def batch(found: list[Step], size: int) -> list[Step]:
    """The steps to take together."""
    return [step for step in found[:size] if step.rate >= _WORTHWHILE * found[0].rate]


def _step(index: CostIndex, beliefs: Beliefs, k: int, worth_us: float) -> Step:
    """More schedules, or those that there are timed again: whichever of the two is less certain."""
    evidence, (workload, choice) = beliefs.kernel_evidence, index.pairs[k]
    tries, noise = int(evidence.tries[k]), float(evidence.noise[k])
    if not evidence.seen[k]:
        upto = max(next_tries(tries) if index.free[k] else 1, tries + 1)
        return Step(Request(workload, choice, upto), worth_us, _BUILD + upto - tries, k)
    after = next_tries(tries)
    left, variance, _ = beliefs.improvement.moments(np.array([tries, after]))
    to_gain = 0.0 if evidence.over[k] else float(variance[0])
    if noise**2 > to_gain:
        part = noise**2 / (noise**2 + to_gain)
        return Step(Request(workload, choice, REFINED), worth_us * part, _BUILD + _AGAIN * REFINED, k, True)
    # Of what is still to be gained, the part that the next schedules show.
    part = float(1 - left[1] / left[0]) * to_gain / (noise**2 + to_gain)
    return Step(Request(workload, choice, after), worth_us * part, _BUILD + after - tries, k)


def _counted_on(uses: IntArray, now: IntArray, known: FloatArray, drawn: FloatArray, tried: BoolArray) -> FloatArray:
    """Mean over the draws of what their optima count on, in us.

    Args:
        uses: how often the optimum of each draw uses each cost; shape (draws, costs).
        now: how often the present solution does.
        known: what is known of each cost, `inf` for what does not run.
        drawn: shape (draws, costs).
        tried: whether more tries of it are a gain, not only knowledge.
    """
    finite = np.where(np.isfinite(known), known, 0.0)
    with np.errstate(invalid="ignore"):
        weight = np.maximum(uses - now, 0) + np.where(tried, 1.0, _AGREED) * np.minimum(uses, now)
        lower = np.where(weight > 0, weight * np.maximum(finite - drawn, 0.0), 0.0)
        higher = np.where(uses < now, (now - uses) * np.maximum(drawn - finite, 0.0), 0.0)
    return (lower + np.where(np.isfinite(higher), higher, 0.0)).mean(axis=0)
