"""Layout problems with structured made-up costs, a lab that reveals them, a model that errs as models do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from layoutsearch.cost.conformal import Spread
from layoutsearch.cost.model import Prediction
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.facts import KernelFacts, OperandFacts
from layoutsearch.layout.graph import TensorInfo
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.transform import TransformKey
from layoutsearch.measure.results import Measurement, Status
from layoutsearch.search.budget import Budget
from layoutsearch.search.known import Known, Request
from layoutsearch.search.problem import Use
from layoutsearch.search.skeleton import Skeleton, SkeletonTensor
from layoutsearch.search.workloads import KernelNode, Workload
from tests.cost.rows import MACHINE

LAYOUTS = tuple(Layout(text) for text in ("NCHW", "NHWC", "NCHW8c", "NCHW16c"))
PAIRS = (*((i, i) for i in range(4)), (0, 1), (0, 2), (2, 3), (3, 2))
TRIES = 6


def _node(kind: str, number: int, size: int, choices: tuple[Candidate | None, ...]) -> KernelNode:
    # The shape makes every workload's facts different, so that facts identify it.
    shape = (1, 32, size, number + 1)
    tensor = OperandFacts(shape, "NCHW", "float32")
    facts = KernelFacts(kind, (), (tensor,), (tensor,), None, (1, 1), 1000 * math.prod(shape))
    key = f"{kind}{number}"
    return KernelNode((f"{key}.{size}",), Workload(key, f"a {key}", "", (), (), 1, facts), choices)


def residual_skeleton(seed: int = 0, blocks: int = 6, alike: int = 2) -> Skeleton:
    """Residual blocks of two convolutions and an add; each block's kernels occur `alike` times; a frozen end."""
    rng = np.random.default_rng(seed)
    conv = tuple(Candidate(LAYOUTS[i], None, LAYOUTS[o]) for i, o in PAIRS)
    flexible = tuple(Candidate.uniform(layout) for layout in LAYOUTS)
    nodes: list[KernelNode] = []
    tensors: list[list] = [[None, []]]

    def add(kind: str, number: int, choices: tuple[Candidate | None, ...], inputs: Sequence[int], size: int) -> int:
        nodes.append(_node(kind, number, size, choices))
        for t in inputs:
            tensors[t][1].append(len(nodes) - 1)
        tensors.append([len(nodes) - 1, []])
        return len(tensors) - 1

    x = 0
    for block in range(blocks):
        size = int(rng.integers(4, 40))
        for _ in range(alike):
            inner = add("conv2d", 2 * block, conv, [x], size)
            outer = add("conv2d_pointwise", 2 * block + 1, conv, [inner], size)
            x = add("add", block, flexible, [outer, x], size)
    add("reshape", 0, (None,), [x], 4)
    skeleton_tensors = []
    for number, (producer, users) in enumerate(tensors[:-1]):
        info = TensorInfo(f"t{number}", (1, 32, 8, 1 + number // 6), "float32", "NCHW")
        made = (0,) if producer is None else _layouts(nodes[producer], out=True)
        uses = tuple(Use(user, _layouts(nodes[user], out=False)) for user in users)
        skeleton_tensors.append(SkeletonTensor(info, LAYOUTS, producer, made, uses))
    return Skeleton(tuple(nodes), tuple(skeleton_tensors))


def _layouts(node: KernelNode, out: bool) -> tuple[int, ...]:
    return tuple(0 if c is None else LAYOUTS.index(c.out if out else c.data) for c in node.choices)


class World:
    """True costs: layouts have a quality of their own, candidates differ from it, schedules come near it one by one.

    Args:
        skeleton: the problem.
        seed: of everything.
        error: standard deviations of the model's error: shared by a workload, and a candidate's own.
        dead: (workload key, candidate index) of which nothing runs.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        seed: int = 0,
        error: tuple[float, float] = (0.15, 0.1),
        dead: Iterable[tuple[str, int]] = (),
    ) -> None:
        rng = np.random.default_rng([seed, 1])
        self.skeleton, self.error = skeleton, error
        quality = dict(zip(LAYOUTS, rng.uniform(0.0, 0.6, len(LAYOUTS)), strict=True))
        dead = set(dead)
        self.times: dict[tuple[str, Candidate | None], tuple[float, ...]] = {}
        self.predicted: dict[tuple[KernelFacts, Candidate | None], float] = {}
        for key, (node, _) in skeleton.workloads.items():
            base, shared = math.log(node.workload.facts.flops / 2e4), error[0] * rng.standard_normal()
            for index, choice in enumerate(node.choices):
                worth = 0.0 if choice is None else (quality[choice.data] + quality[choice.out]) / 2
                us = math.exp(base + worth + 0.15 * rng.standard_normal())
                slower = np.sort(rng.exponential(0.1, TRIES))[::-1] * (rng.random(TRIES) > 0.3)
                slower[int(rng.integers(TRIES))] = 0.0
                times = tuple(float(us * math.exp(s)) for s in slower)
                self.times[key, choice] = () if (key, index) in dead else times
                self.predicted[node.workload.facts, choice] = (
                    math.log(us) + shared + error[1] * float(rng.standard_normal())
                )
        self.moves = {
            key: 0.02 * math.prod(key.shape) ** 0.8 * math.exp(0.2 * rng.standard_normal())
            for key in dict.fromkeys(skeleton.keys.values())
        }
        self.moves_predicted = {key: math.log(us) + 0.2 * rng.standard_normal() for key, us in self.moves.items()}
        self.problem = skeleton.problem(
            lambda w, c: min(self.times[w.key, c], default=math.inf), lambda key: self.moves[key]
        )

    def true_us(self, solution: Sequence[int]) -> float:
        return self.problem.evaluate(solution).total


class WorldModel:
    """Predicts a world as well as it says."""

    machine = MACHINE

    def __init__(self, world: World) -> None:
        self._world = world
        self.spread = Spread(*world.error)
        self.transform_spread = Spread(0.05, 0.2)

    def kernels(self, kernels: Sequence[tuple[KernelFacts, Candidate | None]]) -> Prediction:
        log_us = np.array([self._world.predicted[pair] for pair in kernels])
        return Prediction(log_us, np.full(len(log_us), self.spread.total))

    def transforms(self, keys: Sequence[TransformKey]) -> Prediction:
        log_us = np.array([self._world.moves_predicted[key] for key in keys])
        return Prediction(log_us, np.full(len(log_us), self.transform_spread.total))


class WorldBounds:
    """A part of the true costs."""

    profile = None

    def __init__(self, world: World, part: float = 0.5) -> None:
        self._world, self._part = world, part
        self._keys = {node.workload.facts: key for key, (node, _) in world.skeleton.workloads.items()}

    def kernel_us(self, facts: KernelFacts, choice: Candidate | None) -> float:
        return self._part * min(self._world.times[self._keys[facts], choice], default=0.0)

    def transform_us(self, key: TransformKey) -> float:
        return self._part * self._world.moves[key]


class WorldLab:
    """Reveals a world, one second a schedule, and counts what it is asked for twice.

    What is `disturbed` takes ten times as long when it is timed first.
    """

    def __init__(self, world: World, budget: Budget | None = None) -> None:
        self.disturbed: set[TransformKey | tuple[str, Candidate | None]] = set()
        self._world, self._budget = world, budget or Budget()
        self._known: dict[tuple[str, Candidate | None], Known] = {}
        self._moved: dict[TransformKey, Known] = {}
        self.measured, self.refined = 0, 0
        self.failures: Mapping[str, int] = {}
        self.seconds = 0.0

    def of(self, workload: Workload, choice: Candidate | None) -> Known:
        return self._known.setdefault((workload.key, choice), Known())

    def transform(self, key: TransformKey) -> Known:
        return self._moved.setdefault(key, Known())

    def measure(self, requests: Sequence[Request], reserve_s: float = 0.0) -> None:
        for request in requests:
            if self._budget.over(reserve_s):
                return
            known, times = self.of(request.workload, request.choice), self._world.times
            every = times[request.workload.key, request.choice]
            for number in range(len(known.tries), min(request.tries, len(every))):
                us = every[number] * (10.0 if (request.workload.key, request.choice) in self.disturbed else 1.0)
                known.tries[f"s{number}"] = Measurement(Status.OK, (us,) * 7)
                self.measured += 1
                self.seconds += 1.0
            if request.tries >= len(every):
                known.closed, known.reason = True, "" if every else "it does not build"

    def refine(self, requests: Sequence[Request], repeat: int, reserve_s: float = 0.0) -> None:
        for request in requests:
            if self._budget.over(reserve_s):
                return
            known = self.of(request.workload, request.choice)
            for schedule, _ in known.ranked[: request.tries]:
                us = self._world.times[request.workload.key, request.choice][int(schedule[1:])]
                if len(known.tries[schedule].samples_us) < repeat:
                    known.tries[schedule] = Measurement(Status.OK, (us,) * repeat)
                    self.refined += 1
                    self.seconds += 1.0

    def measure_transforms(self, keys: Iterable[TransformKey], reserve_s: float = 0.0) -> None:
        for key in keys:
            if self._budget.over(reserve_s):
                return
            known = self.transform(key)
            if not known.tries:
                us = self._world.moves[key] * (10.0 if key in self.disturbed else 1.0)
                known.tries["s0"] = Measurement(Status.OK, (us,))
                known.closed = True
                self.measured += 1
                self.seconds += 1.0

    def measure_transforms_again(self, keys: Iterable[TransformKey], reserve_s: float = 0.0) -> None:
        for key in keys:
            known = self.transform(key)
            known.tries["s0"] = Measurement(Status.OK, (self._world.moves[key],))
            known.again.add("s0")
            self.seconds += 1.0
