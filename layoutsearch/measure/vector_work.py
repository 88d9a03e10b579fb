"""Some microseconds of vector code on every thread before a kernel is timed: in a model, the kernel before was that.

Cores power the upper halves of wide vector registers only while these are in use, and take some ten microseconds to
begin again. A kernel that is timed alone comes after an interpreter, and took up to a quarter longer for that than in
its model, where it takes a few microseconds itself. The work is multiply-adds in registers, so no cache notices. It is
built for the target and goes along with each library of kernels, since a server need not have a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from layoutsearch.schedule import TargetInfo
from layoutsearch.schedule import builder as b
from layoutsearch.schedule.indexing import Expr

SYMBOL = "layoutsearch_vector_work"
"""Of the function in a library of kernels: function(out, rounds, tasks)."""

_DTYPE = "float32"
# Of `out`, for each task.
_ELEMENTS = 256
# Independent sums: enough to hide the latency of a multiply-add, as many as any register file holds.
_SUMS = 8
# Of four cycles or more each: 20 us at 3 GHz, twice what vector units take to be ready.
_ROUNDS = 15_000
_FACTOR, _SUMMAND = 0.5, 0.25


def build(info: TargetInfo) -> tirx.PrimFunc:
    """The function with its symbol, for the vectors of `info`; `out` holds 256 numbers for each task."""
    lanes = min(info.lanes, _ELEMENTS // _SUMS)
    rounds, tasks = tirx.Var("rounds", "int32"), tirx.Var("tasks", "int32")
    out = tirx.decl_buffer((tasks * _ELEMENTS,), _DTYPE, "out")
    sums = b.registers("sums", lanes * _SUMS, _DTYPE)
    factor, summand = b.const(_FACTOR, _DTYPE), b.const(_SUMMAND, _DTYPE)

    def each(body: Callable[[Expr], tirx.Stmt]) -> tirx.Stmt:
        return b.unrolled("i", _SUMS, lambda i: b.vectorized("v", lanes, lambda v: body(i * lanes + v)))

    def work(t: Expr) -> tirx.Stmt:
        first = each(lambda at: b.store(sums, b.load(out, t * _ELEMENTS + at), at))
        again = each(lambda at: b.store(sums, b.load(sums, at) * factor + summand, at))
        last = each(lambda at: b.store(out, b.load(sums, at), t * _ELEMENTS + at))
        return b.seq([tirx.AllocBuffer(sums), first, b.loop("r", rounds, lambda _: again), last])

    func = tirx.PrimFunc([out, rounds, tasks], b.loop("t", tasks, work, tirx.ForKind.PARALLEL))
    return b.mark(func).with_attr("global_symbol", SYMBOL)


def worker(module: Any, threads: int) -> Callable[[], object] | None:
    """On the device: does the work of a loaded library on so many threads; None where the library has none."""
    if not module.implements_function(SYMBOL):
        return None
    function = module[SYMBOL]
    out = tvm.runtime.tensor(np.ones(threads * _ELEMENTS, _DTYPE))
    return lambda: function(out, _ROUNDS, threads)
