"""How far assignments of a model are from the sum of their parts: the cost model's correction, for the refinement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from layoutsearch.cost.correction import Correction, WholeRow
from layoutsearch.cost.machine import Machine
from layoutsearch.cost.whole import WholeShape, whole_shape
from layoutsearch.search.assemble import Program, transform_us
from layoutsearch.search.known import Lab
from layoutsearch.search.refine import Vector


def shape_of(program: Program, solution: Sequence[int], lab: Lab, machine: Machine) -> WholeShape:
    """What the correction needs to know of an assignment, before it is seen relative to the others."""
    costs = program.problem.nodes
    kernels = [
        (node.workload.facts, node.choices[index], costs[position].costs[index])
        for position, (node, index) in enumerate(zip(program.nodes, program.skeleton.of_kernels(solution), strict=True))
    ]
    return whole_shape(kernels, [(k, transform_us(k, lab)) for k in program.transforms(solution)], machine)


class CorrectedResiduals:
    """A `refine.ResidualModel` of a correction.

    Args:
        correction: learned from other models, or from earlier timings of this one.
        shapes: of the assignments, relative to the best of them.
        model: this one's name in the correction.
    """

    def __init__(self, correction: Correction, shapes: Sequence[WholeShape], model: str) -> None:
        self._correction, self._shapes, self._model = correction, tuple(shapes), model

    def rows(self, observed: Mapping[int, float]) -> list[WholeRow]:
        """Residuals by index as rows to learn from."""
        return [
            WholeRow(self._shapes[i], float(np.exp(value)) * self._shapes[i].additive_us, self._model)
            for i, value in observed.items()
        ]

    def residuals(self, observed: Mapping[int, float]) -> tuple[Vector, Vector]:
        """See ResidualModel."""
        prediction = self._correction.updated(self.rows(observed)).predict(self._shapes, self._model)
        means = np.array(prediction.log_us) - np.log([s.additive_us for s in self._shapes])
        deviations = np.array(prediction.sigma, dtype=np.float64)
        for index, value in observed.items():
            means[index], deviations[index] = value, 0.0
        return means, deviations
