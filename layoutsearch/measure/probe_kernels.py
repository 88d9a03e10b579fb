"""TIR of the kernels that calibrate a device; `probes` says what they are for."""

# No `from __future__ import annotations`: the script parser evaluates the annotations of the functions.
from tvm import tirx
from tvm.script import tirx as T

STREAM_DTYPE = "float32"
STREAM_BYTES = 4
# Vectors that a streaming kernel takes at once.
STREAM_VECTORS = 8
# Elements for each thread in kernels that do nearly nothing.
SMALL = 16


def peak(dtype: str, lanes: int, count: int, threads: int) -> tirx.PrimFunc:
    """Multiply-adds on `count` vectors in registers; `x` holds a vector of factors and one of summands."""
    size = lanes * count

    @T.prim_func(private=True)
    def kernel(
        x: T.Buffer((2 * lanes,), dtype), out: T.Buffer((threads * size,), dtype), rounds: T.int32, tasks: T.int32
    ):
        for t in T.parallel(tasks):
            sums = T.alloc_buffer((size,), dtype, scope="local")
            for i in T.unroll(count):
                for v in T.vectorized(lanes):
                    sums[i * lanes + v] = x[v]
            for _ in range(rounds):
                for i in T.unroll(count):
                    for v in T.vectorized(lanes):
                        sums[i * lanes + v] = sums[i * lanes + v] * x[v] + x[lanes + v]
            for i in T.unroll(count):
                for v in T.vectorized(lanes):
                    out[t * size + i * lanes + v] = sums[i * lanes + v]

    return kernel


def read(capacity: int, threads: int, lanes: int) -> tirx.PrimFunc:
    """Sums over the first threads * steps * step elements of `x`, `passes` times."""
    step = lanes * STREAM_VECTORS

    @T.prim_func(private=True)
    def kernel(
        x: T.Buffer((capacity,), STREAM_DTYPE), y: T.Buffer((capacity,), STREAM_DTYPE), steps: T.int32, passes: T.int32
    ):
        for t in T.parallel(threads):
            sums = T.alloc_buffer((step,), STREAM_DTYPE, scope="local")
            for i in T.unroll(STREAM_VECTORS):
                for v in T.vectorized(lanes):
                    sums[i * lanes + v] = T.float32(0)
            for _ in range(passes):
                for s in range(steps):
                    for i in T.unroll(STREAM_VECTORS):
                        for v in T.vectorized(lanes):
                            sums[i * lanes + v] = sums[i * lanes + v] + x[(t * steps + s) * step + i * lanes + v]
            for i in T.unroll(STREAM_VECTORS):
                for v in T.vectorized(lanes):
                    y[t * step + i * lanes + v] = sums[i * lanes + v]

    return kernel


def copy(capacity: int, threads: int, lanes: int) -> tirx.PrimFunc:
    """The first threads * steps * step elements of `x` to `y`, `passes` times."""
    step = lanes * STREAM_VECTORS

    @T.prim_func(private=True)
    def kernel(
        x: T.Buffer((capacity,), STREAM_DTYPE), y: T.Buffer((capacity,), STREAM_DTYPE), steps: T.int32, passes: T.int32
    ):
        for t in T.parallel(threads):
            for _ in range(passes):
                for s in range(steps):
                    for i in T.unroll(STREAM_VECTORS):
                        for v in T.vectorized(lanes):
                            at = (t * steps + s) * step + i * lanes + v
                            y[at] = x[at]

    return kernel


def add(capacity: int, threads: int, lanes: int) -> tirx.PrimFunc:
    """Sums of the first and the second threads * steps * step elements of `x` to `y`, `passes` times."""
    step = lanes * STREAM_VECTORS

    @T.prim_func(private=True)
    def kernel(
        x: T.Buffer((capacity,), STREAM_DTYPE), y: T.Buffer((capacity,), STREAM_DTYPE), steps: T.int32, passes: T.int32
    ):
        for t in T.parallel(threads):
            for _ in range(passes):
                for s in range(steps):
                    for i in T.unroll(STREAM_VECTORS):
                        for v in T.vectorized(lanes):
                            at = (t * steps + s) * step + i * lanes + v
                            y[at] = x[at] + x[threads * steps * step + at]

    return kernel


def fill(capacity: int, threads: int, lanes: int) -> tirx.PrimFunc:
    """Ones, so that every page is there and no sum meets a denormal."""
    chunks = capacity // (threads * lanes)

    @T.prim_func(private=True)
    def kernel(x: T.Buffer((capacity,), STREAM_DTYPE)):
        for t in T.parallel(threads):
            for s in range(chunks):
                for v in T.vectorized(lanes):
                    x[(t * chunks + s) * lanes + v] = T.float32(1)

    return kernel


def read_cold(size: int, threads: int, lanes: int) -> tirx.PrimFunc:
    """Sums over `x`, once; `warm` is there for servers that flush all arguments but the first."""
    step = lanes * STREAM_VECTORS
    steps = size // (threads * step)

    @T.prim_func(private=True)
    def kernel(
        warm: T.Buffer((SMALL,), STREAM_DTYPE),
        x: T.Buffer((size,), STREAM_DTYPE),
        out: T.Buffer((threads * step,), STREAM_DTYPE),
    ):
        for t in T.parallel(threads):
            sums = T.alloc_buffer((step,), STREAM_DTYPE, scope="local")
            for i in T.unroll(STREAM_VECTORS):
                for v in T.vectorized(lanes):
                    sums[i * lanes + v] = warm[0]
            for s in range(steps):
                for i in T.unroll(STREAM_VECTORS):
                    for v in T.vectorized(lanes):
                        sums[i * lanes + v] = sums[i * lanes + v] + x[(t * steps + s) * step + i * lanes + v]
            for i in T.unroll(STREAM_VECTORS):
                for v in T.vectorized(lanes):
                    out[t * step + i * lanes + v] = sums[i * lanes + v]

    return kernel


def small(threads: int) -> tirx.PrimFunc:
    """One vector for each thread: what a call costs, and next to no work."""

    @T.prim_func(private=True)
    def kernel(x: T.Buffer((threads * SMALL,), STREAM_DTYPE), y: T.Buffer((threads * SMALL,), STREAM_DTYPE)):
        for t in T.parallel(threads):
            for v in T.vectorized(SMALL):
                y[t * SMALL + v] = x[t * SMALL + v] * T.float32(0.5)

    return kernel


def serial(threads: int) -> tirx.PrimFunc:
    """A call that touches one element and starts no thread."""

    @T.prim_func(private=True)
    def kernel(x: T.Buffer((threads * SMALL,), STREAM_DTYPE), y: T.Buffer((threads * SMALL,), STREAM_DTYPE)):
        y[0] = x[0]

    return kernel
