"""Kernels that only rename the shape of a tensor.

Relax turns such a call into a view, and recognises it by its loops over one block, so these keep their block.
"""

from __future__ import annotations

import math

import tvm
from tvm import relax, s_tir, tirx

from layoutsearch.schedule.builder import mark
from layoutsearch.schedule.target import TargetInfo


def is_reshape(func: tirx.PrimFunc) -> bool:
    """Whether the function copies its one input to its one output in the same order of elements."""
    if len(func.params) != 2 or not isinstance(func.body, s_tir.SBlockRealize):
        return False
    source, target = ([int(s) for s in p.shape] for p in func.params)
    return math.prod(source) == math.prod(target) and bool(relax.analysis.has_reshape_pattern(func))


def emit(func: tirx.PrimFunc, target: TargetInfo) -> tirx.PrimFunc:
    """The copy, parallel and vectorised, for where Relax cannot make it a view (an output of the function)."""
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    sch = s_tir.Schedule(mod, debug_mask="none", error_render_level="none")
    (block,) = sch.get_child_blocks(sch.get_sblock("root"))
    loops = sch.get_loops(block)
    if loops:
        fused = sch.fuse(*loops) if len(loops) > 1 else loops[0]
        elements = math.prod(int(s) for s in func.params[0].shape)
        if elements % target.lanes == 0:
            fused, vector = sch.split(fused, [None, target.lanes])
            sch.vectorize(vector)
        if target.threads > 1 and elements > target.lanes:
            sch.parallel(fused)
    return mark(sch.mod["main"])
