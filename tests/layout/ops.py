"""Single operators as graph nodes, and spaces written in a few words."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax

from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidates import enumerate_candidates
from layoutsearch.layout.graph import LayoutGraph, OpNode
from layoutsearch.layout.space import SearchSpace, parse_space
from layoutsearch.model import canonicalize
from tests.models.nets import Net, build

HEAD = '[target]\nmatch = { kind = "llvm" }\nblocks = [4, 8, 16]\n'


def space(*rules: str, blocks: str = "[4, 8, 16]") -> SearchSpace:
    """A space of rules, each the inside of one `[[rule]]` but for its name."""
    text = HEAD.replace("[4, 8, 16]", blocks)
    text += "".join(f'[[rule]]\nname = "rule{i}"\n{rule}\n' for i, rule in enumerate(rules))
    return parse_space(text, "test.toml")


def everywhere(layouts: str, blocks: str = "[4, 8, 16]") -> SearchSpace:
    """One rule for all operators."""
    return space(f"match = {{}}\nlayouts = {layouts}", blocks=blocks)


def graph_of(channels: int, body: Callable[[Net, relax.Expr], relax.Expr]) -> LayoutGraph:
    """The graph of `body` on an image of `channels` channels."""
    return build_graph(canonicalize(build((2, channels, 8, 10), body=body)))


def first(graph: LayoutGraph, kind: str) -> OpNode:
    return next(op for op in graph.ops if op.op == f"relax.{kind}")


def candidates_of(graph: LayoutGraph, op: OpNode, space: SearchSpace) -> set[str]:
    return {str(c) for c in enumerate_candidates(graph, space)[op.name].candidates}
