"""Rules of a search space that say nothing about a model: most often a slip of the pen."""

from __future__ import annotations

import difflib

import tvm

from layoutsearch.errors import SpaceError
from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.layout.space import SearchSpace


def unmatched_rules(space: SearchSpace, graph: LayoutGraph) -> list[str]:
    """A line for every rule that matches no operator of the model, with the nearest operator it has.

    Raises:
        SpaceError: a rule names an operator that TVM does not have.
    """
    present = sorted({op.op.removeprefix("relax.") for op in graph.ops})
    known = {str(name) for name in tvm.ir.Op.list_op_names()}
    lines = []
    for rule in space.rules:
        wanted = str(rule.match.get("op", "")).removeprefix("relax.")
        near = difflib.get_close_matches(wanted, present, n=1, cutoff=0.0) if wanted else []
        hint = f"; the nearest op of the model is {near[0]}" if near else ""
        if wanted and f"relax.{wanted}" not in known:
            raise SpaceError(f"{space.source}: rule {rule.name!r}: TVM has no op {wanted!r}{hint}")
        if not any(rule.matches(op) for op in graph.ops):
            lines.append(f"{space.source}: rule {rule.name!r} matches no op of the model{hint}")
    return lines
