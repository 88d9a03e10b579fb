"""How far an algorithm with fewer multiplications is from the exact result, operator by operator, on its own weights.

A layer is run in NumPy on a sample of tiles of normally distributed inputs, once as the kernel computes it (transforms
and sums in float32) and once directly in float64. What a whole model does is measured apart, when a plan is validated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import tvm

from layoutsearch.errors import LayoutSearchError, SpaceError
from layoutsearch.layout.candidates import OpSpace
from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.layout.layout import Layout
from layoutsearch.materialize.moves import move_array
from layoutsearch.materialize.verify import calls_by_name
from layoutsearch.schedule.winograd import KERNEL, minimal, transform_weights

_TILES, _CHANNELS = 24, 64

Errors = Mapping[tuple[str, str], float]
"""(bound variable, algorithm) -> largest error over the range of the exact outputs."""


def algorithm_errors(
    canonical: tvm.IRModule, graph: LayoutGraph, spaces: Mapping[str, OpSpace]
) -> dict[tuple[str, str], float]:
    """The error of every algorithm but the direct one that an operator has candidates for."""
    calls = calls_by_name(canonical)
    found = {}
    for name, space in spaces.items():
        wanted = {c.algorithm: c.winograd for c in space.candidates if c.winograd}
        if not wanted:
            continue
        axes = graph.by_name[name].operands[1].info.axes
        kernel = move_array(calls[name].args[1].value.numpy(), Layout(axes), Layout("OIHW"))
        for algorithm, outputs in wanted.items():
            found[name, algorithm] = winograd_error(kernel, outputs)
    return found


def check_limit(max_rel_error: float) -> None:
    """Refuse what is no limit: nothing compares with NaN, so it would let everything pass.

    Raises:
        LayoutSearchError: not above 0.
    """
    if not max_rel_error > 0:
        raise LayoutSearchError(f"--max-rel-error {max_rel_error}: expected a number above 0, such as 1e-3")


def within(spaces: Mapping[str, OpSpace], errors: Errors, limit: float) -> dict[str, OpSpace]:
    """The spaces without candidates whose operator alone is off by more than `limit`.

    Raises:
        SpaceError: that leaves an operator none.
    """
    found = {}
    for name, space in spaces.items():
        bad = {c: errors[name, c.algorithm] for c in space.candidates if errors.get((name, c.algorithm), 0.0) > limit}
        refused = tuple((str(c), f"its error is {e:.1e} of the range, {limit:g} is allowed") for c, e in bad.items())
        kept = tuple(c for c in space.candidates if c not in bad)
        if not kept:
            raise SpaceError(
                f"rule {space.rule!r} leaves {name} no candidate within an error of {limit:g}: {refused[0][1]}; "
                "give it a direct layout too, or a larger --max-rel-error"
            )
        found[name] = replace(space, candidates=kept, refused=(*space.refused, *refused)) if bad else space
    return found


def winograd_error(kernel: np.ndarray, outputs: int, seed: int = 0) -> float:
    """Largest error of F(m x m, 3 x 3) in float32 over the range of the exact outputs, for (O, I, 3, 3) weights."""
    rng = np.random.default_rng(seed)
    form = minimal(outputs)
    kernel = kernel[np.sort(rng.permutation(kernel.shape[0])[:_CHANNELS])]
    tiles = rng.standard_normal((_TILES, kernel.shape[1], form.points, form.points)).astype("float32")
    windows = np.lib.stride_tricks.sliding_window_view(tiles.astype("float64"), (KERNEL, KERNEL), axis=(2, 3))
    exact = np.einsum("tiyxhw,oihw->toyx", windows, kernel.astype("float64"), optimize=True)
    b, a = (np.array(matrix, dtype="float32") for matrix in (form.data, form.gather))
    u = transform_weights(kernel, outputs)
    v = b @ tiles @ b.T
    products = np.einsum("tief,oief->toef", v, u, optimize=True)
    spread = float(np.ptp(exact))
    return float(np.abs(a @ products @ a.T - exact).max()) / spread if spread > 0 else 0.0
