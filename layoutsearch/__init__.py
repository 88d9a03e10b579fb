"""Autotuner over layout assignments for Apache TVM.

    plan = layoutsearch.tune("model.onnx", shapes={"x": (1, 3, 320, 320)})
    layoutsearch.compile("model.onnx", plan, output="model.so")

In a compile script of one's own: `tvm.compile(module, target, relax_pipeline=layoutsearch.pipeline(plan))`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from layoutsearch._pins import check_pins

check_pins()

__version__ = "0.1.0"
__all__ = ["ApplyPlan", "LayoutPlan", "LayoutSearchError", "compile", "declare_layouts", "load", "pipeline", "tune"]

# Loaded on first use: applying a plan needs neither the search nor what it depends on.
_HOMES = {
    "ApplyPlan": "layoutsearch.plan.apply",
    "LayoutPlan": "layoutsearch.plan.plan",
    "LayoutSearchError": "layoutsearch.errors",
    "compile": "layoutsearch.plan.compile",
    "declare_layouts": "layoutsearch.layout.declare",
    "load": "layoutsearch.model.load",
    "pipeline": "layoutsearch.plan.apply",
    "tune": "layoutsearch.search.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'layoutsearch' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


if TYPE_CHECKING:
    from layoutsearch.errors import LayoutSearchError
    from layoutsearch.layout.declare import declare_layouts
    from layoutsearch.model.load import load
    from layoutsearch.plan.apply import ApplyPlan, pipeline
    from layoutsearch.plan.compile import compile
    from layoutsearch.plan.plan import LayoutPlan
    from layoutsearch.search.api import tune
