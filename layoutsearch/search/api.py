"""`layoutsearch.tune`: the run as a function."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from layoutsearch.errors import LayoutSearchError
from layoutsearch.layout.desired import DesiredLayouts
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.search.budget import parse_duration
from layoutsearch.search.options import DEFAULT_TRIALS, TuneOptions
from layoutsearch.search.reporter import Reporter
from layoutsearch.search.tune import run_tune


def tune(
    model: Any,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    target: Any = None,
    threads: int | None = None,
    space: str | os.PathLike[str] | None = None,
    desired_layouts: DesiredLayouts | None = None,
    trials: int = DEFAULT_TRIALS,
    time_budget: str | float | None = None,
    rpc: str | None = None,
    device_key: str | None = None,
    out: str | os.PathLike[str] | None = None,
    records: str | os.PathLike[str] | None = None,
    resume: bool = False,
    seed: int = 0,
    sampler: str = "solver",
    storage: str | None = None,
    kernel_tuner: str = "template",
    io_layout: str | Sequence[str] | Mapping[str, str] | None = None,
    extern: Sequence[str] = (),
    inputs: Sequence[Sequence[np.ndarray]] | None = None,
    reporter: Reporter | None = None,
) -> LayoutPlan:
    """Find, validate and save the best layout plan of a model.

    Args:
        model: path of an ONNX or Relax file, `onnx.ModelProto`, `tvm.IRModule` or a loaded model.
        shapes: shapes of dynamic inputs, by name.
        target: TVM target; this machine's CPU if None.
        threads: threads of a kernel; all cores this process may use if None.
        space: search-space file; the one shipped for the target if None.
        desired_layouts: layouts that operators must have, as `{"nn.conv2d": ["NHWC", "HWIO"]}` or
            `["nn.conv2d=NHWC:HWIO", ...]`; see `layout.desired` for keys and values.
        trials: different assignments that are built and timed whole, at most.
        time_budget: seconds, or text such as `8h`.
        rpc: `HOST:PORT` of a TVM RPC tracker, with `device_key`; this machine if None.
        out: folder for plan.json and the records; `results/<model>` if None.
        records: record store, if not `<out>/records.sqlite`.
        resume: continue the run in `out`, or raise where there is none like it.
        seed: of all that is drawn.
        sampler: what proposes assignments: `solver`, or Optuna's `tpe`, `random` or `nsga2`.
        storage: of the Optuna study: a journal file or a database URL; `<out>/study.journal` if None.
        kernel_tuner: where schedules come from: `template`, `metaschedule` (TVM's search, for kernels that have no
            template but generic loops) or `both` (for all kernels, in a race with their templates).
        io_layout: `keep`, `free`, `NAME=LAYOUT`, several of these, or a mapping of names: the layouts in which the
            compiled module takes its inputs and gives its outputs. `free` leaves them to the search, at no cost.
        inputs: sets of input arrays to validate with, in the model's order and layouts; made up where None.
        extern: external libraries that may compute operators in the place of our kernels: `onednn`.
        inputs: sets of input arrays to validate with, in the model's order; made up where None.
        reporter: told of progress.

    Raises:
        LayoutSearchError: anything the user can mend; see its subclasses.
    """
    budget = parse_duration(time_budget) if isinstance(time_budget, str) else time_budget
    options = TuneOptions(
        shapes=shapes,
        target=target,
        threads=threads,
        space=space,
        desired_layouts=desired_layouts,
        trials=trials,
        time_budget_s=budget,
        rpc=rpc,
        device_key=device_key,
        out=out,
        records=records,
        resume=resume,
        seed=seed,
        sampler=sampler,
        storage=storage,
        kernel_tuner=kernel_tuner,
        io_layout=io_layout,
        externs=tuple(extern),
        inputs=inputs,
    )
    result = run_tune(model, options, reporter)
    if result.plan is None:
        raise LayoutSearchError(result.note)
    return result.plan
