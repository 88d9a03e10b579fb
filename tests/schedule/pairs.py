"""A pair of kernels as one, against the two apart."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from tvm import tirx

from layoutsearch.schedule import TargetInfo, apply, audit, candidates, pair
from layoutsearch.schedule.pair import Pair
from tests.schedule import kernels as k

Two: TypeAlias = tuple[tirx.PrimFunc, tirx.PrimFunc, list[np.ndarray], list[np.ndarray]]
"""Both kernels and what they read; the second reads what the first makes in front of that."""


def apart(two: Two) -> np.ndarray:
    """The two kernels one after the other."""
    first, second, reads_first, reads_second = two
    (between,) = k.run(apply(first, candidates(first, k.INFO)[0], k.INFO), reads_first)
    (result,) = k.run(apply(second, candidates(second, k.INFO)[0], k.INFO), [between, *reads_second])
    return result


def check(two: Two, count: int = 2, target: TargetInfo = k.INFO, seed: int = 0) -> None:
    """The first guess and some others compute what the two do."""
    first, second, reads_first, reads_second = two
    both = Pair.of(first, second)
    every = pair.candidates(both, target, (None, None))
    drawn = [every[0], *(every[i] for i in np.random.default_rng(seed).permutation(len(every))[: count - 1] if i)]
    want = apart(two)
    for schedule in drawn:
        kernel = pair.apply(both, schedule, target)
        assert audit(kernel) == []
        assert len(kernel.params) == len(reads_first) + len(reads_second) + 1
        (got,) = k.run(kernel, [*reads_first, *reads_second])
        k.close(got, want)
