"""While a tile of channels is computed in panels, every vector of the next tile's weights is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tvm
from tvm import relax, s_tir, tirx
from tvm.sym import Analyzer
from tvm_ffi import structural_walk

from layoutsearch.schedule import Schedule, candidates
from layoutsearch.schedule import builder as b
from tests.schedule import kernels as k

Env = dict[tirx.Var, int]


def fetched(func: tirx.PrimFunc) -> Iterator[tuple[int, ...]]:
    """Indices of what is asked for, in order: the loops are run, and nothing else of the kernel."""
    analyzer = Analyzer()

    def value(expr: tirx.Expr, env: Env) -> int:
        return int(analyzer.simplify(b.substitute(expr, env)))

    def asks(stmt: tirx.Stmt) -> bool:
        return "llvm.prefetch" in stmt.script()

    def walk(stmt: tirx.Stmt, env: Env) -> Iterator[tuple[int, ...]]:
        if isinstance(stmt, tirx.SeqStmt):
            for each in stmt.seq:
                if isinstance(each, tirx.Bind):
                    env = {**env, each.var: value(each.value, env)}
                elif asks(each):
                    yield from walk(each, env)
        elif isinstance(stmt, tirx.For):
            for i in range(value(stmt.extent, env)):
                yield from walk(stmt.body, {**env, stmt.loop_var: value(stmt.min, env) + i})
        elif isinstance(stmt, tirx.IfThenElse):
            branch = stmt.then_case if value(stmt.condition, env) else stmt.else_case
            if branch is not None and asks(branch):
                yield from walk(branch, env)
        elif isinstance(stmt, tirx.Evaluate):
            (load,) = (a.args[0] for a in stmt.value.args if isinstance(a, tvm.ir.Call))
            yield tuple(value(i, env) for i in load.indices)
        elif isinstance(stmt, s_tir.SBlockRealize):
            yield from walk(stmt.block.body, env)
        else:
            raise TypeError(type(stmt).__name__)

    yield from walk(func.body, {})


@pytest.mark.parametrize("height", [7, 8, 3])
def test_every_vector_of_the_next_tile_is_asked_for(height: int) -> None:
    """Of 16 rows of weights 7 rows of pixels ask for 3 each until there are none left, 3 rows for 6."""
    channels, out = 64, 96

    def build(x: relax.Var, w: relax.Var, r: relax.Var) -> relax.Expr:
        return relax.op.add(relax.op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="HWIO"), r)

    func = k.fused(build, (1, height, 5, channels), (1, 1, channels, out), (1, 1, 1, out))
    schedule = Schedule.make("channels", tile=5, vectors=2, reduce="taps_outer", outer="panels")
    lanes = k.INFO.lanes
    want = {(0, 0, c, o) for c in range(channels) for o in range(2 * lanes, out, lanes)}
    assert want <= set(fetched(k.scheduled(func, schedule)))


def test_a_product_with_one_row_stays_small() -> None:
    """All weights of the next tile are asked for by one row: as a loop, where statements took minutes to build."""
    func = k.fused(lambda x, w: relax.op.matmul(x, w), (1, 2048), (2048, 1000))
    for vectors in (16, 8):
        schedule = Schedule.make("channels", tile=1, vectors=vectors, reduce="taps_outer", outer="panels")
        scheduled = k.scheduled(func, schedule)
        assert max(_unrolled(scheduled)) <= 512
        rng = np.random.default_rng(0)
        arrays = [rng.standard_normal(shape).astype("float32") for shape in ((1, 2048), (2048, 1000))]
        (got,) = k.run(scheduled, arrays)
        k.close(got, arrays[0].astype("float64") @ arrays[1], 2e-6)


@pytest.mark.parametrize("out", [1024, 1000, 1037])
def test_weights_that_are_used_once_are_read_in_long_pieces(out: int) -> None:
    channels = k.INFO.l2_bytes // 4 // 1000 + 1
    func = k.fused(lambda x, w: relax.op.matmul(x, w), (1, channels), (channels, out))
    found = [dict(s.params) for s in candidates(func, k.INFO)]
    # A panel would be fetched to be used a second time.
    assert {s["outer"] for s in found} == {"rows"}
    assert max(int(s["vectors"]) for s in found) >= 32
    rng = np.random.default_rng(out)
    arrays = [rng.standard_normal(shape).astype("float32") for shape in ((1, channels), (channels, out))]
    want = arrays[0].astype("float64") @ arrays[1]
    for schedule in candidates(func, k.INFO)[:3]:
        (got,) = k.run(k.scheduled(func, schedule), arrays)
        k.close(got, want, 2e-6)


def test_weights_that_are_used_twice_have_panels() -> None:
    channels = k.INFO.l2_bytes // 4 // 1000 + 1
    func = k.fused(lambda x, w: relax.op.matmul(x, w), (2, channels), (channels, 1024))
    assert "panels" in {dict(s.params)["outer"] for s in candidates(func, k.INFO)}


def _unrolled(func: tirx.PrimFunc) -> list[int]:
    """Extents of the loops that are written out."""
    found = [1]

    def visit(loop: tirx.For) -> None:
        if loop.kind == tirx.ForKind.UNROLLED:
            found.append(int(loop.extent))

    structural_walk(func.body, (tirx.For, visit))
    return found
