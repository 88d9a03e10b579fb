"""On the server: when each step of a model begins, as its host function tells on the way.

A model that was built with `MARK` as its marker calls it between kernels, with the number of the next step. The times
are kept here, in memory set aside before the run, until the client takes them.
"""

from __future__ import annotations

import json
import time
from array import array

MARK = "layoutsearch.server.mark"
"""Global function of the server: number of a step -> nothing; keeps it with the time."""
START = "layoutsearch.server.marks.start"
"""Global function of the server: number of marks to keep from now on; later ones are dropped. Initially 0."""
TAKE = "layoutsearch.server.marks.take"
"""Global function of the server: nothing -> JSON with the `steps` and their times in nanoseconds (`ns`), in the order
in which they were called since `START`; room for more is given back."""


def register() -> None:
    """Offer the three functions."""
    import tvm_ffi

    clock = time.perf_counter_ns
    # Grown and shrunk in place: compiled code looks `MARK` up once and keeps it.
    steps, times, kept = array("q"), array("q"), [0]

    @tvm_ffi.register_global_func(MARK, override=True)
    def mark(step: int) -> None:
        at = kept[0]
        if at < len(times):
            times[at] = clock()
            steps[at] = step
            kept[0] = at + 1

    @tvm_ffi.register_global_func(START, override=True)
    def start(room: int) -> None:
        kept[0] = 0
        for numbers in (steps, times):
            del numbers[:]
            numbers.frombytes(bytes(numbers.itemsize * room))

    @tvm_ffi.register_global_func(TAKE, override=True)
    def take() -> str:
        found = {"steps": steps[: kept[0]].tolist(), "ns": times[: kept[0]].tolist()}
        start(0)
        return json.dumps(found)
