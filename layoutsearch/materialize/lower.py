"""From a converted module to one TIR kernel per fusion group, not yet scheduled."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from layoutsearch.materialize.codegen import hide, show
from layoutsearch.materialize.fuse import Kernel, fuse, is_transform_kernel
from layoutsearch.materialize.legalize import legalize
from layoutsearch.materialize.library import lower_kernels


@dataclass(frozen=True)
class Lowered:
    """A module of TIR kernels.

    Attributes:
        module: `main` calls PrimFuncs only (and what cannot be lowered, as it was).
        kernels: which operators each fused kernel holds.
        transforms: kernels that are a layout transform and nothing else, with the number of calls of each.
        scheduled: kernels that are scheduled already.
    """

    module: tvm.IRModule
    kernels: tuple[Kernel, ...]
    transforms: dict[str, int]
    scheduled: frozenset[str] = frozenset()


def lower(module: tvm.IRModule, target: tvm.target.Target) -> Lowered:
    """Fuse, legalize and lower a converted module for `target`."""
    module, external = hide(module)
    fused = fuse(module)
    functions = {g.name_hint: f for g, f in fused.module.functions_items()}
    transforms = {
        k.function: len(k.groups)
        for k in fused.kernels
        if isinstance(functions[k.function], relax.Function) and is_transform_kernel(functions[k.function])
    }
    with target:
        legal = legalize(lower_kernels(fused.module))
        lowered = relax.transform.FuseTIR()(legal)
        lowered = relax.transform.DeadCodeElimination()(lowered)
    lowered = show(lowered, external)
    return Lowered(lowered, fused.kernels, transforms)
