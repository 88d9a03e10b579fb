"""Concatenations whose operands follow each other in memory: along the outermost axis that is longer than one.

In a sequence of kernels such a kernel need not run: its operands are made in their places in its result (see
`plan.sequence`). Elsewhere it copies.
"""

from __future__ import annotations

import tvm
from tvm import tirx

from layoutsearch.schedule.anatomy import Anatomy, Stage
from layoutsearch.schedule.indexing import static_shape

STACKS = "layoutsearch.stacks"
"""Attribute of a scheduled kernel that only copies its operands, one after the other, into its result."""
_CONCAT = "T_concat"


def is_stack(anatomy: Anatomy) -> bool:
    """Whether the function copies each of its operands once, in their order, into consecutive parts of its result."""
    params = anatomy.func.params
    if len(anatomy.stages) != 1 or len(params) < 3:
        return False
    (stage,) = anatomy.stages
    if not isinstance(stage, Stage) or not stage.name.startswith(_CONCAT) or not stage.is_identity_store:
        return False
    *operands, result = (static_shape(p.shape) for p in params)
    axis = next((i for i, extent in enumerate(result) if extent != 1), None)
    if axis is None or any(len(shape) != len(result) for shape in operands):
        return False
    if any(shape[:axis] + shape[axis + 1 :] != result[:axis] + result[axis + 1 :] for shape in operands):
        return False
    if sum(shape[axis] for shape in operands) != result[axis] or len(stage.loads) != len(operands):
        return False
    starts = [sum(shape[axis] for shape in operands[:i]) for i in range(len(operands))]
    return all(_reads_at(stage, param, axis, start) for param, start in zip(params[:-1], starts, strict=True))


def _reads_at(stage: Stage, operand: tirx.Buffer, axis: int, start: int) -> bool:
    """Whether the one load of the operand is at the result's own place, `start` further along the axis."""
    loads = [load for load in stage.loads if load.source.same_as(operand)]
    if len(loads) != 1:
        return False
    analyzer = tvm.sym.Analyzer()
    for i, (index, (var, extent)) in enumerate(zip(loads[0].indices, stage.spatial, strict=True)):
        wanted = var - start if i == axis else var
        if extent != 1 and not analyzer.can_prove_equal(index, wanted):
            return False
    return True
