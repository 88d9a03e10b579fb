"""Layout changes as arrays, as index arithmetic and as Relax calls: three ways to the same elements."""

from __future__ import annotations

import numpy as np
import tvm
from hypothesis import given, settings
from tvm import relax

from layoutsearch.layout.layout import Layout
from layoutsearch.materialize.moves import is_move, logical_index, move, move_array, moved_index, physical_index
from tests.layout.layouts import layouts_and_shapes
from tests.materialize.cases import run_built
from tests.models.interpreter import interpret

Case = tuple[str, list[Layout], tuple[int, ...]]


def in_memory(case: Case) -> np.ndarray:
    """Distinct numbers, stored in the first layout."""
    primal, layouts, shape = case
    return np.arange(np.prod(shape), dtype="float32").reshape(layouts[0].physical_shape(shape, primal))


def module_of(*moves: tuple[tuple[int, ...], Layout, Layout]) -> tvm.IRModule:
    """A module that moves each of its inputs."""
    params = [relax.Var(f"x{i}", relax.TensorType(list(s), "float32")) for i, (s, _, _) in enumerate(moves)]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            calls = [move(p, source, target) for p, (_, source, target) in zip(params, moves, strict=True)]
            output = builder.emit_output(builder.normalize(relax.Tuple([builder.emit(c) for c in calls])))
        builder.emit_func_output(output)
    return builder.get()


@given(layouts_and_shapes(2))
def test_array_there_and_back(case: Case) -> None:
    primal, (source, target), shape = case
    array = in_memory(case)
    moved = move_array(array, source, target)
    assert moved.shape == target.physical_shape(shape, primal)
    assert moved.flags.c_contiguous
    np.testing.assert_array_equal(move_array(moved, target, source), array)


@given(layouts_and_shapes(2))
def test_array_against_index_arithmetic(case: Case) -> None:
    _, (source, target), _ = case
    array = in_memory(case)
    moved = move_array(array, source, target)
    for index in np.ndindex(array.shape):
        assert moved[tuple(physical_index(target, logical_index(source, index)))] == array[index]


@given(layouts_and_shapes(2))
@settings(max_examples=40)
def test_call_against_array(case: Case) -> None:
    """The Relax call, run element by element, and where it says that an element lands."""
    _, (source, target), _ = case
    array = in_memory(case)
    module = module_of((array.shape, source, target))
    (moved,) = interpret(module, [array])
    np.testing.assert_array_equal(moved, move_array(array, source, target))
    (call,) = [b.value for b in module["main"].body.blocks[0].bindings if isinstance(b.value, relax.Call)]
    assert is_move(call)
    last = [extent - 1 for extent in array.shape]
    assert moved[tuple(moved_index(call, last))] == array[tuple(last)]


def test_calls_built_by_tvm() -> None:
    """The moves that plans hold, compiled."""
    shape, primal = (2, 24, 5, 7), "NCHW"
    names = ["NCHW", "NHWC", "NCHW4c", "NCHW8c", "NCHW24c"]
    pairs = [(Layout(a), Layout(b)) for a in names for b in names if a != b]
    arrays = [np.random.default_rng(i).normal(size=a.physical_shape(shape, primal)) for i, (a, _) in enumerate(pairs)]
    arrays = [array.astype("float32") for array in arrays]
    module = module_of(*((array.shape, a, b) for array, (a, b) in zip(arrays, pairs, strict=True)))
    for moved, array, (a, b) in zip(run_built(module, arrays), arrays, pairs, strict=True):
        np.testing.assert_array_equal(moved, move_array(array, a, b))


def test_a_move_between_blocks_is_one_call() -> None:
    """From 8 to 16 lanes in one pass over the data, without the plain layout in between."""
    module = module_of(((1, 4, 3, 3, 8), Layout("NCHW8c"), Layout("NCHW16c")))
    calls = [b.value for b in module["main"].body.blocks[0].bindings if isinstance(b.value, relax.Call)]
    assert [c.op.name for c in calls] == ["relax.layout_transform"]
