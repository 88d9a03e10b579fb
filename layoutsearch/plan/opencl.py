"""From scheduled OpenCL kernels to VM code."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import relax, tirx

from layoutsearch.plan.vm import vm_passes
from layoutsearch.schedule import opencl  # registers the TIR pipeline that such modules are built with

__all__ = ["gpu_passes", "opencl"]

_ALLOCATE = "relax.vm.alloc_storage"


@tvm.transform.module_pass(opt_level=0, name="layoutsearch.OneDevice")
def _one_device(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Allocates all storage on device 0. TVM numbers devices by scope, and a VM would want one for each."""

    def first(call: tvm.ir.Call) -> tvm.ir.Call:
        if not (isinstance(call.op, tvm.ir.Op) and call.op.name == _ALLOCATE):
            return call
        args = list(call.args)
        args[1] = tirx.IntImm("int64", 0)
        return relax.Call(call.op, args, call.attrs, call.ty_args)

    functions = {
        g: tvm_ffi.structural_map(f, (tvm.ir.Call, first)) if isinstance(f, relax.Function) else f
        for g, f in module.functions_items()
    }
    return tvm.IRModule(functions, attrs=module.attrs, global_infos=dict(module.global_infos))


def gpu_passes() -> list[tvm.transform.Pass]:
    """What TVM's own pipeline for GPUs does after it has scheduled, with one device in the place of one a scope."""
    return vm_passes([_one_device])
