"""Searches to compare with: Optuna's samplers over whole assignments, and the fastest candidate of each operator.

They see true costs: what is recorded of a candidate in the end, as soon as it is measured. Transforms cost them nothing
to measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import optuna

from layoutsearch.replay.table import Table
from layoutsearch.search.parameters import AssignmentSpace

# Trials after which a sampler that repeats itself is not asked any further.
_TRIALS = 150

Point = tuple[float, float, tuple[int, ...]]


def measured_shares(table: Table, method: str, seed: int, limits: Sequence[float]) -> Iterator[Point]:
    """What a method would ship at each limit: (limit, share that was measured, assignment).

    Args:
        table: where to search.
        method: one of `METHODS`.
        seed: of its choices.
        limits: shares of the candidates that may be measured, ascending.
    """
    return METHODS[method](table, seed, limits)


def _free(table: Table) -> dict[tuple[str, str], None]:
    """Candidates of kernels with a choice."""
    nodes = [node for node, _ in table.skeleton.workloads.values() if len(node.choices) > 1]
    return {(node.workload.key, str(choice)): None for node in nodes for choice in node.choices}


def _sampled(sampler: Callable[[int], optuna.samplers.BaseSampler]) -> Callable[..., Iterator[Point]]:
    def search(table: Table, seed: int, limits: Sequence[float]) -> Iterator[Point]:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        space, free = AssignmentSpace.of(table.skeleton), _free(table)
        study = optuna.create_study(sampler=sampler(seed), direction="minimize")
        measured: set[tuple[str, str]] = set()
        best: tuple[float, tuple[int, ...]] | None = None
        left = list(limits)
        for _ in range(_TRIALS):
            trial = study.ask(dict(space.distributions))
            solution = space.solution(trial.params)
            used = {
                (node.workload.key, str(node.choices[c]))
                for node, c in zip(table.skeleton.nodes, solution, strict=True)
                if len(node.choices) > 1
            }
            # A trial that does not fit under a limit is not known at it; before the first one, a search ships that.
            while left and len(measured | used) > left[0] * len(free):
                yield left[0], min(left[0], len(measured) / len(free)), best[1] if best else solution
                left.pop(0)
            measured |= used
            cost = table.additive_us(solution)
            if cost < float("inf"):
                study.tell(trial, cost)
            else:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            if best is None or cost < best[0]:
                best = cost, solution
        for limit in left:
            yield limit, len(measured) / len(free), best[1] if best else solution

    return search


def _greedy(table: Table, seed: int, limits: Sequence[float]) -> Iterator[Point]:
    """One candidate of each workload after the other, in random order; each operator takes its fastest measured one."""
    rng = np.random.default_rng(seed)
    sizes = {key: len(node.choices) for key, (node, _) in table.skeleton.workloads.items() if len(node.choices) > 1}
    queues = {key: rng.permutation(size) for key, size in sizes.items()}
    order = [
        (key, int(queues[key][turn]))
        for turn in range(max(sizes.values(), default=0))
        for key in (list(sizes)[k] for k in rng.permutation(len(sizes)))
        if turn < sizes[key]
    ]
    us = {
        key: [table.of(node.workload, choice).best_us for choice in node.choices]
        for key, (node, _) in table.skeleton.workloads.items()
    }
    for limit in limits:
        measured = order[: int(limit * len(order))]
        # Without a measurement an operator stays in its original layout, which is the first candidate.
        fastest = dict.fromkeys(us, 0)
        for key in sizes:
            tried = [c for k, c in measured if k == key]
            fastest[key] = min(tried, key=lambda c, key=key: us[key][c], default=0)  # type: ignore[misc]
        yield limit, len(measured) / max(1, len(order)), tuple(fastest[n.workload.key] for n in table.skeleton.nodes)


METHODS: dict[str, Callable[..., Iterator[Point]]] = {
    "tpe": _sampled(lambda seed: optuna.samplers.TPESampler(seed=seed)),
    "nsga2": _sampled(lambda seed: optuna.samplers.NSGAIISampler(seed=seed)),
    "random": _sampled(lambda seed: optuna.samplers.RandomSampler(seed=seed)),
    "greedy": _greedy,
}
