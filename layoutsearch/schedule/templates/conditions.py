"""Where the conditions of a padded window hold anyway, so that the inner part of a tensor is computed without them."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, tirx
from tvm.sym import Analyzer
from tvm_ffi import structural_map, structural_walk

from layoutsearch.schedule import builder as b
from layoutsearch.schedule.anatomy import Stage

_COMPARISONS = (tirx.LE, tirx.LT, tirx.GE, tirx.GT)


class Conditions:
    """The comparisons in the value of a stage, by data-parallel axis."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def inside(self, axis: int) -> tuple[int, int]:
        """The range of the axis, end excluded, in which each comparison that depends on it holds; empty if none."""
        stage = self._stage
        var, extent = stage.spatial[axis]
        tests = self._tests(var)

        def holds(low: int, high: int) -> bool:
            analyzer = Analyzer()
            for other, size in (*stage.spatial, *stage.reduction):
                analyzer.bind(other, ir.Range(low, high) if other.same_as(var) else ir.Range(0, size))
            return all(analyzer.can_prove(t) for t in tests)

        middle = extent // 2
        if not holds(middle, middle + 1):
            return 0, 0
        low = next(i for i in range(middle + 1) if holds(i, middle + 1))
        return low, next(i for i in range(extent, middle, -1) if holds(low, i))

    def bare(self, axis: int) -> tirx.Expr:
        """The value without the comparisons that hold in the range `inside`."""
        tests, true = self._tests(self._stage.spatial[axis][0]), tirx.const(True, "bool")

        def drop(node: tirx.Expr, tests: Sequence[tirx.Expr] = tests) -> tirx.Expr:
            return true if any(node.same_as(t) for t in tests) else node

        return structural_map(self._stage.value, (_COMPARISONS, drop)) if tests else self._stage.value

    def _tests(self, var: ir.Var) -> list[tirx.Expr]:
        found: list[tirx.Expr] = []

        def visit(node: tirx.Expr) -> None:
            if b.uses_any(node, [var]):
                found.append(node)

        structural_walk(self._stage.value, (_COMPARISONS, visit))
        return found
