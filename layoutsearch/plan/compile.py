"""A model and a plan to an executable that plain TVM runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import tvm

from layoutsearch.errors import ModelError, PlanError
from layoutsearch.materialize.library import link_input
from layoutsearch.model.load import LoadedModel, load
from layoutsearch.plan.apply import Applied, apply_plan, target_of, vm_pipeline
from layoutsearch.plan.expected import Expectation
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.schedule import BUILD_CONFIG, opencl
from layoutsearch.toolchain import export


def load_for(model: Any, plan: LayoutPlan, shapes: Mapping[str, Sequence[int]] | None = None) -> LoadedModel:
    """Load a model with the input shapes of a plan, and check that the inputs are the plan's.

    Raises:
        PlanError: the model's inputs are not the plan's.
        ModelError: the model cannot be loaded.
    """
    try:
        loaded = model if isinstance(model, LoadedModel) else load(model, shapes or plan.shapes)
    except ModelError as error:
        names = ", ".join(f"{n}={','.join(map(str, s))}" for n, s in plan.shapes.items())
        raise PlanError(f"the model does not load with the plan's inputs ({names}): {error}") from None
    have = [(i.name, tuple(i.shape), i.dtype) for i in loaded.inputs]
    want = [(i["name"], tuple(i["shape"]), i["dtype"]) for i in plan.model["inputs"]]
    if have != want:
        raise PlanError(f"the model's inputs are {have}, the plan is for {want}; tune again")
    return loaded


def apply_to(
    model: Any,
    plan: LayoutPlan,
    target: tvm.target.Target | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Applied:
    """Load a model and apply a plan; see `compile`."""
    return apply_plan(load_for(model, plan, shapes).module, plan, target)


def compile(
    model: Any,
    plan: LayoutPlan,
    *,
    target: tvm.target.Target | None = None,
    output: str | os.PathLike[str] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Any:
    """Compile `model` with `plan`, without search and without measuring.

    Args:
        model: path of an ONNX or Relax file, `onnx.ModelProto`, `tvm.IRModule` or `LoadedModel`.
        plan: the plan; its target, input shapes and fingerprint must be the model's.
        target: other than None, must be the plan's target.
        output: path of the shared library to write.
        shapes: input shapes; by default those of the plan.

    Returns:
        TVM's VM executable; its `main` takes the model's inputs in order and returns its outputs in order, each in
        the layout that the plan has for it (`plan.io_layouts`; mostly the model's own).

    Raises:
        PlanError: the plan belongs to another model or target.
        ToolchainError: there is no linker.
    """
    applied = apply_to(model, plan, target, shapes)
    executable = build_executable(applied.module, target_of(plan), proven=applied.proven)
    if output is not None:
        export(executable, output, target_of(plan), link_input(applied.module, target_of(plan)))
    return executable


def build_executable(
    scheduled: tvm.IRModule, target: tvm.target.Target, marker: str = "", proven: Expectation | None = None
) -> Any:
    """VM executable of a module whose kernels are scheduled; see `vm_pipeline` for `marker` and `proven`."""
    with tvm.transform.PassContext(config=BUILD_CONFIG):
        tir_pipeline = opencl.PIPELINE if target.kind.name == "opencl" else "default"
        relax_pipeline = vm_pipeline(marker, target, proven)
        return tvm.compile(scheduled, target, relax_pipeline=relax_pipeline, tir_pipeline=tir_pipeline)
