"""Jobs for the build workers of `test_builder.py`, good and bad."""

from __future__ import annotations

import ctypes
import os
import sys
import time

import numpy as np


def add(payload: tuple[int, int]) -> int:
    return sum(payload)


def pid(_: object) -> int:
    return os.getpid()


def noisy(payload: str) -> str:
    print("to standard output", flush=True)
    os.write(1, b"\x00" * 64)
    print("to standard error", file=sys.stderr)
    return payload


def raise_two_lines(_: object) -> None:
    raise ValueError("first line\nsecond line")


def segfault(_: object) -> None:
    print("about to die", file=sys.stderr, flush=True)
    ctypes.string_at(8)


def leave(code: int) -> None:
    os._exit(code)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def allocate(nbytes: int) -> int:
    return int(np.ones(nbytes, dtype="uint8").sum())


def unpicklable(_: object) -> object:
    return sys.stdin


def compile_kernel(path: str) -> int:
    import tvm
    from tvm import te

    a = te.placeholder((16,), name="a")
    b = te.compute((16,), lambda i: a[i] * 2.0, name="b")
    function = te.create_prim_func([a, b]).with_attr("global_symbol", "twice")
    tvm.compile(tvm.IRModule({"twice": function}), target="llvm").export_library(path)
    return os.path.getsize(path)
