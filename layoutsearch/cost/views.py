"""Kernels that move nothing in a model: what they make is memory that is there, under another name."""

from __future__ import annotations

from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.facts import KernelFacts
from layoutsearch.layout.layout import Layout

_RESHAPES = frozenset({"reshape", "squeeze", "expand_dims", "flatten", "batch_flatten"})


def is_view(facts: KernelFacts, choice: Candidate | None) -> bool:
    """Whether a kernel becomes a view under a candidate: a reshape, or a concatenation along the outermost axis.

    The operands of such a concatenation are made in their places in its result, see `plan.sequence`.
    """
    if facts.epilogue:
        return False
    if facts.kind in _RESHAPES:
        return True
    if facts.kind != "concat" or len(facts.results) != 1 or len(facts.operands) < 2:
        return False
    (made,) = facts.results
    extents = dict(zip(made.axes, made.shape, strict=True))
    joined = [
        letter
        for index, letter in enumerate(made.axes)
        if all(len(o.shape) == len(made.shape) for o in facts.operands)
        and sum(o.shape[index] for o in facts.operands) == extents[letter]
    ]
    layout = choice.out if choice is not None else Layout(made.axes)
    # The first axis in memory that has more than one position.
    for axis in layout.axes:
        letter = axis.letter.upper()
        size = axis.factor if axis.is_inner else extents.get(letter, 1) // layout.block(letter)
        if size != 1:
            return letter in joined and not axis.is_inner
    return True
