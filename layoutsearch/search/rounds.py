"""Which kernels to measure next: everything a little, then what the model's time depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from layoutsearch.layout.candidates import nearest
from layoutsearch.layout.layout import Layout
from layoutsearch.search.budget import Budget
from layoutsearch.search.known import Lab, Request
from layoutsearch.search.reporter import Reporter
from layoutsearch.search.workloads import KernelNode

# Schedules tried of every candidate at first, then of the contenders in further rounds.
FIRST_TRIES = 2
_ROUNDS = (4, 8, 16, 24)
# A candidate contends while its kernel is within this factor of the workload's fastest.
_CONTENDER = 1.2
# At the end so many schedules of each candidate this close are timed again, with so many samples.
_REFINED = 2
_REFINE_WITHIN = 1.15
_REFINE_SAMPLES = 21
# Workloads that make up this share of the model's time are worth further tries.
_SHARE = 0.97


class KernelRounds:
    """The order of kernel measurements of a run."""

    def __init__(self, nodes: Sequence[KernelNode], lab: Lab, budget: Budget, reporter: Reporter) -> None:
        self._lab, self._budget, self._reporter = lab, budget, reporter
        self._unique = {node.workload.key: node for node in nodes}
        self._count = {key: sum(n.workload.key == key for n in nodes) for key in self._unique}

    def one_layout(self, layout: Layout) -> None:
        """One try of what a uniform assignment of `layout` needs: the least that a plan can be made of."""
        requests = []
        for node in self._unique.values():
            free = [c for c in node.choices if c is not None]
            requests.append(Request(node.workload, nearest(free, layout) if free else None, 1))
        self._measure(f"kernels of uniform {layout}", requests, 0.0)

    def everything(self, reserve_s: float) -> None:
        """The first tries of every candidate."""
        self._measure("kernels, first tries", self._requests(FIRST_TRIES, everything=True), reserve_s)

    def digest(self) -> str:
        """What the rounds are about: every candidate of every workload, and how far the rounds go."""
        about = [_ROUNDS, _CONTENDER, _REFINED, _REFINE_WITHIN, _REFINE_SAMPLES, _SHARE]
        work = sorted((key, count, [str(c) for c in self._unique[key].choices]) for key, count in self._count.items())
        return hashlib.sha256(json.dumps([about, work]).encode()).hexdigest()[:16]

    def contenders(self, reserve_s: float) -> None:
        """More tries of the candidates that may still win, then the fastest ones again with more samples."""
        for tries in _ROUNDS:
            self._measure(f"kernels, up to {tries} tries", self._requests(tries, everything=False), reserve_s)
        if self._budget.over(reserve_s):
            return
        requests = [replace(r, tries=_REFINED) for r in self._contenders(_REFINE_WITHIN, everything=False)]
        self._reporter.stage("kernels, again", len(requests))
        self._lab.refine(requests, _REFINE_SAMPLES, reserve_s)

    def _measure(self, stage: str, requests: Sequence[Request], reserve_s: float) -> None:
        if requests and not self._budget.over(reserve_s):
            self._reporter.stage(stage, len(requests))
            self._lab.measure(requests, reserve_s)

    def _requests(self, tries: int, everything: bool) -> list[Request]:
        """Contenders that have had fewer than `tries` tries and may have more."""
        found = []
        for request in self._contenders(_CONTENDER, everything):
            known = self._lab.of(request.workload, request.choice)
            if not known.closed and len(known.tries) < tries:
                found.append(replace(request, tries=tries))
        return found

    def _contenders(self, within: float, everything: bool) -> list[Request]:
        """One request per workload and candidate that is within a factor of the workload's fastest (or all).

        Only workloads that make up nearly all of the model's time, unless `everything`; costly ones first.
        """
        shares = {
            key: self._count[key] * min(self._lab.of(node.workload, c).best_us for c in node.choices)
            for key, node in self._unique.items()
        }
        matters = set(self._unique) if everything else largest(shares, _SHARE)
        found: list[tuple[float, Request]] = []
        for key in matters:
            node = self._unique[key]
            times = {choice: self._lab.of(node.workload, choice).best_us for choice in node.choices}
            fastest = min(times.values())
            importance = shares[key] if shares[key] < float("inf") else 0.0
            found += [
                (-importance, Request(node.workload, choice, 0))
                for choice in node.choices
                if everything or times[choice] <= within * fastest
            ]
        return [r for _, r in sorted(found, key=lambda pair: (pair[0], pair[1].workload.key))]


def largest(shares: Mapping[str, float], part: float) -> set[str]:
    """Keys of the largest shares that together make up `part` of the finite sum."""
    finite = {k: v for k, v in shares.items() if v < float("inf")}
    left = part * sum(finite.values())
    found: set[str] = set()
    for key in sorted(finite, key=lambda k: -finite[k]):
        if left <= 0:
            break
        found.add(key)
        left -= finite[key]
    return found
