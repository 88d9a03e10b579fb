"""TIR of the kernels that calibrate a device; `probes` says what they are for.

Tensors of streams hold one part for each thread: `steps` steps of `STREAM_VECTORS` vectors.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from layoutsearch.schedule import builder as b
from layoutsearch.schedule.indexing import Expr

STREAM_DTYPE = "float32"
STREAM_BYTES = 4
STREAM_VECTORS = 8
"""Vectors that a streaming kernel takes at once."""
SMALL = 16
"""Elements for each thread in kernels that do nearly nothing."""

_At = Callable[[Expr], tirx.Stmt]


def peak(dtype: str, lanes: int, count: int, threads: int) -> tirx.PrimFunc:
    """function(x, out, rounds, tasks): multiply-adds on `count` vectors in registers.

    `x` holds a vector of factors and one of summands, `out` what comes of each task.
    """
    size = lanes * count
    x = tirx.decl_buffer((2 * lanes,), dtype, "x")
    out = tirx.decl_buffer((threads * size,), dtype, "out")
    rounds, tasks = tirx.Var("rounds", "int32"), tirx.Var("tasks", "int32")
    sums = b.registers("sums", size, dtype)

    def each(body: Callable[[Expr, Expr], tirx.Stmt]) -> tirx.Stmt:
        return b.unrolled("i", count, lambda i: b.vectorized("v", lanes, lambda v: body(i * lanes + v, v)))

    def work(t: Expr) -> tirx.Stmt:
        first = each(lambda at, v: b.store(sums, b.load(x, v), at))
        again = each(lambda at, v: b.store(sums, b.load(sums, at) * b.load(x, v) + b.load(x, v + lanes), at))
        last = each(lambda at, _: b.store(out, b.load(sums, at), t * size + at))
        return b.seq([tirx.AllocBuffer(sums), first, b.loop("r", rounds, lambda _: again), last])

    return tirx.PrimFunc([x, out, rounds, tasks], b.loop("t", tasks, work, tirx.ForKind.PARALLEL))


def read(capacity: int, threads: int, lanes: int, streams: int) -> tirx.PrimFunc:
    """function(x, y, steps, passes): sums over the first threads * steps steps of `x`, over and over.

    A thread reads its part at `streams` places at once, which keeps more loads from memory in flight.
    """
    x, y, steps, passes = _stream_params(capacity)

    def sum_up(sums: tirx.Buffer, t: Expr) -> tirx.Stmt:
        return b.loop("p", passes, lambda _: _add_up(sums, x, t, steps, lanes, streams))

    body = b.parallel("t", threads, lambda t: _summed(y, t, lanes, b.const(0, STREAM_DTYPE), sum_up))
    return tirx.PrimFunc([x, y, steps, passes], body)


def read_cold(size: int, threads: int, lanes: int, streams: int) -> tirx.PrimFunc:
    """function(warm, x, out): `read` once; `warm` is for servers that flush all arguments but the first."""
    warm = tirx.decl_buffer((SMALL,), STREAM_DTYPE, "warm")
    x = tirx.decl_buffer((size,), STREAM_DTYPE, "x")
    out = tirx.decl_buffer((threads * lanes * STREAM_VECTORS,), STREAM_DTYPE, "out")
    steps = size // (threads * lanes * STREAM_VECTORS)

    def sum_up(sums: tirx.Buffer, t: Expr) -> tirx.Stmt:
        return _add_up(sums, x, t, steps, lanes, streams)

    body = b.parallel("t", threads, lambda t: _summed(out, t, lanes, b.load(warm, 0), sum_up))
    return tirx.PrimFunc([warm, x, out], body)


def copy(capacity: int, threads: int, lanes: int) -> tirx.PrimFunc:
    """function(x, y, steps, passes): the first threads * steps steps of `x` to `y`, over and over."""
    x, y, steps, passes = _stream_params(capacity)
    body = _swept(threads, steps, passes, lanes, lambda at: b.store(y, b.load(x, at), at))
    return tirx.PrimFunc([x, y, steps, passes], body)


def add(capacity: int, threads: int, lanes: int) -> tirx.PrimFunc:
    """function(x, y, steps, passes): sums of the first and the second threads * steps steps of `x` to `y`."""
    x, y, steps, passes = _stream_params(capacity)
    second = steps * (threads * lanes * STREAM_VECTORS)
    body = _swept(threads, steps, passes, lanes, lambda at: b.store(y, b.load(x, at) + b.load(x, at + second), at))
    return tirx.PrimFunc([x, y, steps, passes], body)


def fill(capacity: int, threads: int, lanes: int) -> tirx.PrimFunc:
    """function(x): ones, so that every page is there and no sum meets a denormal."""
    x = tirx.decl_buffer((capacity,), STREAM_DTYPE, "x")
    steps = capacity // (threads * lanes * STREAM_VECTORS)
    body = _swept(threads, steps, 1, lanes, lambda at: b.store(x, b.const(1, STREAM_DTYPE), at))
    return tirx.PrimFunc([x], body)


def small(threads: int) -> tirx.PrimFunc:
    """function(x, y): one vector for each thread: what a call costs, and next to no work."""
    x, y = (tirx.decl_buffer((threads * SMALL,), STREAM_DTYPE, name) for name in "xy")

    def work(t: Expr) -> tirx.Stmt:
        half = b.const(0.5, STREAM_DTYPE)
        return b.vectorized("v", SMALL, lambda v: b.store(y, b.load(x, t * SMALL + v) * half, t * SMALL + v))

    return tirx.PrimFunc([x, y], b.parallel("t", threads, work))


def serial(threads: int) -> tirx.PrimFunc:
    """function(x, y): a call that touches one element and starts no thread."""
    x, y = (tirx.decl_buffer((threads * SMALL,), STREAM_DTYPE, name) for name in "xy")
    return tirx.PrimFunc([x, y], b.store(y, b.load(x, 0), 0))


def _stream_params(capacity: int) -> tuple[tirx.Buffer, tirx.Buffer, tirx.Var, tirx.Var]:
    x, y = (tirx.decl_buffer((capacity,), STREAM_DTYPE, name) for name in "xy")
    return x, y, tirx.Var("steps", "int32"), tirx.Var("passes", "int32")


def _vectors(lanes: int, body: _At) -> tirx.Stmt:
    return b.unrolled("i", STREAM_VECTORS, lambda i: b.vectorized("v", lanes, lambda v: body(i * lanes + v)))


def _swept(threads: int, steps: Expr, passes: Expr, lanes: int, body: _At) -> tirx.Stmt:
    """`body` at every element, `passes` times."""
    step = lanes * STREAM_VECTORS

    def part(t: Expr) -> tirx.Stmt:
        once = b.loop("s", steps, lambda s: _vectors(lanes, lambda at: body((t * steps + s) * step + at)))
        return b.loop("p", passes, lambda _: once)

    return b.parallel("t", threads, part)


def _summed(
    out: tirx.Buffer, t: Expr, lanes: int, start: tirx.Expr, sum_up: Callable[[tirx.Buffer, Expr], tirx.Stmt]
) -> tirx.Stmt:
    """Sums of one thread in registers, from `start` to `out`."""
    step = lanes * STREAM_VECTORS
    sums = b.registers("sums", step, STREAM_DTYPE)
    first = _vectors(lanes, lambda at: b.store(sums, start, at))
    last = _vectors(lanes, lambda at: b.store(out, b.load(sums, at), t * step + at))
    return b.seq([tirx.AllocBuffer(sums), first, sum_up(sums, t), last])


def _add_up(sums: tirx.Buffer, x: tirx.Buffer, t: Expr, steps: Expr, lanes: int, streams: int) -> tirx.Stmt:
    """Add the part of `x` of thread `t` to the sums, `streams` equal pieces of it side by side."""
    together = STREAM_VECTORS // streams
    piece = steps * (together * lanes)

    def at(s: Expr, i: Expr, v: Expr) -> Expr:
        stream, within = i // together, i % together
        return (t * streams + stream) * piece + s * (together * lanes) + within * lanes + v

    def vector(s: Expr, i: Expr) -> tirx.Stmt:
        def add_one(v: Expr) -> tirx.Stmt:
            to = i * lanes + v
            return b.store(sums, b.load(sums, to) + b.load(x, at(s, i, v)), to)

        return b.vectorized("v", lanes, add_one)

    return b.loop("s", steps, lambda s: b.unrolled("i", STREAM_VECTORS, lambda i: vector(s, i)))
