"""A small model with known costs, a lab that measures it and a search over it: studies without a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.facts import KernelFacts
from layoutsearch.layout.graph import TensorInfo
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.transform import TransformKey
from layoutsearch.measure.results import Measurement, Status
from layoutsearch.search.budget import Budget
from layoutsearch.search.known import Known, Request
from layoutsearch.search.problem import Use
from layoutsearch.search.skeleton import Skeleton, SkeletonTensor
from layoutsearch.search.solve import solve
from layoutsearch.search.workloads import KernelNode, Workload

LAYOUTS = ("NCHW", "NHWC", "NCHW8c", "NCHW16c")
Failures = Mapping[tuple[int, int], Measurement]


def chain_skeleton(kernels: int = 6) -> Skeleton:
    """A chain of convolutions in four layouts, then a kernel without a choice; input and output in NCHW."""
    layouts = tuple(Layout(text) for text in LAYOUTS)
    nodes = [_node(f"conv{i}", tuple(Candidate.uniform(lay) for lay in layouts)) for i in range(kernels)]
    nodes.append(_node("reshape", (None,)))
    tensors, producer = [], None
    for i in range(kernels + 1):
        info = TensorInfo(f"t{i}", (1, 32, 8 + i, 8), "float32", "NCHW")
        made = (0,) if producer is None else tuple(range(len(layouts)))
        wanted = (0,) if i == kernels else tuple(range(len(layouts)))
        tensors.append(SkeletonTensor(info, layouts, producer, made, (Use(i, wanted),)))
        producer = i
    return Skeleton(tuple(nodes), tuple(tensors))


def _node(name: str, choices: tuple[Candidate | None, ...]) -> KernelNode:
    facts = KernelFacts(kind="conv2d", epilogue=(), operands=(), results=(), conv=None, window=None, flops=0)
    return KernelNode((name,), Workload(name, f"a {name}", "", (), (), 1, facts), choices)


class SmallLab:
    """Measures a chain by a table of times drawn from a seed. `failures` says what fails: (kernel, candidate)."""

    def __init__(self, skeleton: Skeleton, budget: Budget, seed: int = 0, failures: Failures | None = None) -> None:
        rng = np.random.default_rng(seed)
        self._budget = budget
        self._times = {
            (node.workload.key, choice): Measurement(Status.OK, (float(rng.uniform(50, 150)),))
            for node in skeleton.nodes
            for choice in node.choices
        }
        for (node, choice), measurement in (failures or {}).items():
            kernel = skeleton.nodes[node]
            self._times[kernel.workload.key, kernel.choices[choice]] = measurement
        self._transforms = {key: float(rng.uniform(5, 30)) for key in dict.fromkeys(skeleton.keys.values())}
        self._known: dict[object, Known] = {}
        self.asked: list[object] = []
        self.measured = 0
        self.failures: dict[str, int] = {}

    def of(self, workload: Workload, choice: Candidate | None) -> Known:
        """See Lab."""
        return self._known.setdefault((workload.key, choice), Known())

    def transform(self, key: TransformKey) -> Known:
        """See Lab."""
        return self._known.setdefault(key, Known())

    def recall(self, requests: Sequence[Request], keys: Iterable[TransformKey] = ()) -> bool:
        """See Lab."""
        return False

    def measure(self, requests: Sequence[Request], reserve_s: float = 0.0) -> None:
        """See Lab."""
        for request in requests:
            if self._budget.over(reserve_s):
                return
            self.before(request.workload.key)
            self._measured((request.workload.key, request.choice), self._times[request.workload.key, request.choice])

    def measure_transforms(self, keys: Iterable[TransformKey], reserve_s: float = 0.0) -> None:
        """See Lab."""
        for key in keys:
            self._measured(key, Measurement(Status.OK, (self._transforms[key],)))

    def measure_transforms_again(self, keys: Iterable[TransformKey], reserve_s: float = 0.0) -> None:
        """See Lab."""

    def refine(self, requests: Sequence[Request], repeat: int, reserve_s: float = 0.0) -> None:
        """See Lab."""

    def before(self, workload: str) -> None:
        """Called before a kernel is measured; a test may put something here."""

    def _measured(self, what: object, measurement: Measurement) -> None:
        known = self._known.setdefault(what, Known())
        known.tries["{}"], known.closed = measurement, True
        self.asked.append(what)
        self.measured += 1

    def true_us(self, workload: Workload, choice: Candidate | None) -> float:
        """What measuring would say."""
        return self._times[workload.key, choice].median_us

    def true_transform_us(self, key: TransformKey) -> float:
        """What measuring would say."""
        return self._transforms[key]


class SmallSearch:
    """Proposes the optimum under guesses of what is not measured, off by a factor drawn anew each time."""

    def __init__(self, skeleton: Skeleton, lab: SmallLab, noise: float = 0.4) -> None:
        self._skeleton, self._lab, self._noise = skeleton, lab, noise
        self.done = False

    def propose(self, rng: np.random.Generator) -> Sequence[int]:
        """See Proposer."""

        def kernel(workload: Workload, choice: Candidate | None) -> float:
            known = self._lab.of(workload, choice)
            guess = 100.0 * float(rng.lognormal(0, self._noise))
            return known.best_us if known.closed else guess

        def transform(key: TransformKey) -> float:
            known = self._lab.transform(key)
            return known.best_us if known.closed else 15.0 * float(rng.lognormal(0, self._noise))

        return solve(self._skeleton.problem(kernel, transform)).assignment

    def requests(self, solution: Sequence[int]) -> tuple[list[Request], list[TransformKey]]:
        """See Search."""
        kernels = [
            Request(node.workload, node.choices[index], 1)
            for node, index in zip(self._skeleton.nodes, solution, strict=True)
            if not self._lab.of(node.workload, node.choices[index]).closed
        ]
        keys = dict.fromkeys(self._skeleton.transforms(solution))
        return kernels, [key for key in keys if not self._lab.transform(key).closed]

    def evaluate(self, solution: Sequence[int]) -> float:
        """See Search."""
        problem = self._skeleton.problem(
            lambda workload, choice: self._lab.of(workload, choice).best_us,
            lambda key: self._lab.transform(key).best_us,
        )
        return problem.evaluate(solution).total

    def finished(self) -> bool:
        """See Search."""
        return self.done


def optimum(skeleton: Skeleton, lab: SmallLab) -> float:
    """The true optimum, in microseconds."""
    return solve(skeleton.problem(lab.true_us, lab.true_transform_us)).cost
