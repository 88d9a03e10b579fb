"""TVM's way from scheduled kernels to OpenCL C, with what version 0.27 needs to do it right.

TVM's own pipeline for Adreno is registered in a form that builds refuse, and types the store of a texel as a pointer,
for which vectorisation splits it into four stores of one channel each: the texels are then wrong, without a word.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import backend
from tvm.s_tir import pipeline as stock
from tvm.tirx import compilation_pipeline

PIPELINE = "layoutsearch.opencl"
"""Name of the TIR pipeline, as in `tvm.compile(..., tir_pipeline=PIPELINE)`."""

_STORE = tvm.ir.Op.get("tirx.texture2d_store")


def _retyped(call: tvm.ir.Call) -> tvm.ir.Call:
    if not call.op.same_as(_STORE):
        return call
    return tvm.ir.Call(call.op, list(call.args), call.attrs, ret_ty=tvm.ir.PrimType("int32"))


@tirx.transform.prim_func_pass(opt_level=0, name="layoutsearch.RetypeTexelStores")
def _retype_stores(func: tirx.PrimFunc, _module: tvm.IRModule, _context: tvm.transform.PassContext) -> tirx.PrimFunc:
    return func.with_body(tvm_ffi.structural_map(func.body, (tvm.ir.Call, _retyped)))


@tvm.transform.module_pass(opt_level=0, name="layoutsearch.opencl")
def _lower(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    # Textures first: TVM's pipeline begins with the same pass, which then finds none left.
    module = backend.adreno.transform.TextureFlatten()(module)
    return backend.adreno.pipeline.default_tir_pipeline()(_retype_stores(module))


tirx.register_tir_pipeline(PIPELINE, lambda: (_lower, stock.finalize_host_passes, stock.finalize_device_passes))
assert PIPELINE in compilation_pipeline.PIPELINE_MAP
