"""Looks for loop nests of a scheduled kernel that would run as scalar code on one thread."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.tirx import ForKind

LIMIT = 4096
"""Iterations a nest may have without being parallel or vectorised."""


def audit(func: tirx.PrimFunc) -> list[str]:
    """One line for every store that more than `LIMIT` iterations reach with no parallel and no vectorised loop."""
    found: list[str] = []
    _visit(func.body, 1.0, False, [], found)
    return found


def _visit(node: tirx.Stmt, iterations: float, fast: bool, path: list[str], found: list[str]) -> None:
    if isinstance(node, tirx.For):
        extent = float(int(node.extent)) if isinstance(node.extent, tirx.IntImm) else 1.0
        kind = ForKind(int(node.kind))
        fast = fast or kind in (ForKind.PARALLEL, ForKind.VECTORIZED)
        _visit(node.body, iterations * extent, fast, [*path, f"{node.loop_var.name}={extent:.0f}"], found)
    elif isinstance(node, tirx.SeqStmt):
        for part in node.seq:
            _visit(part, iterations, fast, path, found)
    elif isinstance(node, tirx.IfThenElse):
        _visit(node.then_case, iterations, fast, path, found)
        if node.else_case is not None:
            _visit(node.else_case, iterations, fast, path, found)
    elif isinstance(node, s_tir.SBlockRealize):
        if node.block.init is not None:
            _visit(node.block.init, iterations, fast, path, found)
        _visit(node.block.body, iterations, fast, path, found)
    elif isinstance(node, tirx.AttrStmt | tirx.While):
        _visit(node.body, iterations, fast, path, found)
    elif isinstance(node, tirx.BufferStore) and iterations > LIMIT and not fast:
        found.append(f"store to {node.buffer.name} in {iterations:.0f} scalar iterations ({', '.join(path)})")
