"""Does a lowered kernel walk its buffers as their layouts say? Axis by axis, in TIR that is not scheduled yet.

Every dimension of an operand or result has the letter that its layout gives it. A loop that runs along dimensions of
two letters, or a buffer filled in another order than its layout's, is a kernel that takes a layout for another one:
shapes alone do not tell, say, NHWC from NWHC where H = W. A stage that reorders a whole tensor is a transpose that
hides in a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import ir, tirx
from tvm_ffi import structural_walk

from layoutsearch.schedule.anatomy import Anatomy, Stage

Letters = tuple[str, ...]
"""The axis of every dimension of a buffer, inner blocks as the axis they are of; empty where it has no meaning."""

# The weights' channels are those of the data and of the result.
_CHANNELS = {"O": "C", "I": "C"}


def wrong_axes(anatomy: Anatomy, layouts: Sequence[Letters | None]) -> str | None:
    """What is wrong with a kernel whose parameters have these axes, or None.

    Args:
        anatomy: of the kernel.
        layouts: of each parameter, results last; None where nothing is known of it.
    """
    known: dict[tirx.Var, Letters] = {
        buffer: tuple(_CHANNELS.get(letter, letter) for letter in letters)
        for buffer, letters in zip(anatomy.func.params, layouts, strict=True)
        if letters is not None
    }
    for stage in anatomy.stages:
        if not isinstance(stage, Stage) or any(_is_indirect(load) for load in stage.loads):
            continue
        found = _stage_axes(stage, known)
        if isinstance(found, str):
            return found
        made = tuple(_only(found, index) for index in stage.indices)
        wanted = known.get(stage.buffer)
        if wanted is None:
            known[stage.buffer] = made
        elif any(a and b and a != b for a, b in zip(made, wanted, strict=True)):
            return f"its result is in the order {_text(made)}, expected {_text(wanted)}"
    return None


def hidden_transpose(anatomy: Anatomy) -> str | None:
    """A stage of a kernel that only reorders a tensor, by its name, or None."""
    for stage in anatomy.stages:
        if isinstance(stage, Stage) and stage.is_identity_store and isinstance(stage.value, ir.TensorLoad):
            order = [p for index in stage.value.indices for p in _places(stage, index)]
            if order != sorted(order):
                return stage.name
    return None


def _stage_axes(stage: Stage, known: Mapping[tirx.Var, Letters]) -> dict[ir.Var, str] | str:
    """The axis that each loop of a stage runs along, or what is wrong."""
    found: dict[ir.Var, str] = {}
    loops = {var for var, extent in (*stage.spatial, *stage.reduction) if extent > 1}
    for load in stage.loads:
        for letter, index in zip(known.get(load.source, ()), load.indices, strict=False):
            for var in _variables(index) & loops if letter else ():
                other = found.setdefault(var, letter)
                if other != letter:
                    return f"one of its loops runs along {other} of one operand and {letter} of another"
    return found


def _only(found: Mapping[ir.Var, str], index: tirx.Expr) -> str:
    letters = {found[var] for var in _variables(index) if var in found}
    return letters.pop() if len(letters) == 1 else ""


def _places(stage: Stage, index: tirx.Expr) -> list[int]:
    """Positions of the loops in an index, those of extent 1 left out."""
    used = _variables(index)
    return [i for i, (var, extent) in enumerate(stage.spatial) if extent > 1 and var in used]


def _variables(expr: tirx.Expr | int) -> set[ir.Var]:
    if isinstance(expr, int):
        return set()
    found: set[ir.Var] = set()
    structural_walk(expr, (ir.Var, found.add))
    return found


def _is_indirect(load: ir.TensorLoad) -> bool:
    """Whether an index is read from memory."""
    hits: list[ir.TensorLoad] = []
    for index in load.indices:
        structural_walk(index, (ir.TensorLoad, hits.append))
    return bool(hits)


def _text(letters: Letters) -> str:
    return "".join(letter or "?" for letter in letters)
