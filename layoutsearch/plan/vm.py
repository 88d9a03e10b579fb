"""From calls of scheduled kernels to code of Relax's virtual machine."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax


def vm_passes(once_allocated: Sequence[tvm.transform.Pass] = ()) -> list[tvm.transform.Pass]:
    """What TVM's own pipelines do after they have fused and scheduled; `once_allocated` sees storage as calls."""
    t = relax.transform
    return [
        t.RewriteDataflowReshape(),
        t.ToNonDataflow(),
        t.RemovePurityChecking(),
        t.CallTIRRewrite(),
        t.StaticPlanBlockMemory(),
        t.LowerAllocTensor(),
        t.KillAfterLastUse(),
        t.LowerRuntimeBuiltin(),
        *once_allocated,
        t.ComputePrimValue(),
        t.VMShapeLower(),
        t.AttachGlobalSymbol(),
    ]
