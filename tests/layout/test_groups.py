"""Which operators become one kernel: the rules, mostly on hand-made graphs."""

from __future__ import annotations

from layoutsearch.layout.build import build_graph
from layoutsearch.layout.groups import FusionOp, fusion_groups, graph_groups
from layoutsearch.model import canonicalize
from tests.models import nets

SHAPE = (1, 16, 8, 8)


def ops(*lines: str, out: str = "", shapes: dict[str, tuple[int, ...] | None] | None = None) -> list[FusionOp]:
    """Operators from lines such as `s = add a b`; `conv`, `relu`, `add` and so on for Relax's names."""
    names = {"conv": "nn.conv2d", "relu": "nn.relu", "pool": "nn.max_pool2d", "softmax": "nn.softmax"}
    escaping = out.split()
    found = []
    for line in lines:
        name, right = line.split(" = ")
        op, *inputs = right.split()
        shape = (shapes or {}).get(name, SHAPE)
        found.append(FusionOp(name, f"relax.{names.get(op, op)}", tuple(inputs), shape, name in escaping))
    return found


def groups(*lines: str, out: str = "", shapes: dict[str, tuple[int, ...] | None] | None = None) -> list[str]:
    return [" ".join(g) for g in fusion_groups(ops(*lines, out=out, shapes=shapes))]


def test_a_chain_follows_its_convolution() -> None:
    assert groups("c = conv x w", "b = add c bias", "r = relu b", "d = conv r w", out="d") == ["c b r", "d"]


def test_hard_swish_fuses_whole() -> None:
    lines = ("c = conv x w", "a = add c three", "l = clip a", "m = multiply c l", "s = multiply m sixth")
    assert groups(*lines, out="s") == ["c a l m s"]


def test_a_residual_sum_joins_the_last_convolution() -> None:
    lines = ("p = conv x w", "a = conv x w", "b = conv a w", "s = add b p", "r = relu s")
    assert groups(*lines, out="r") == ["p", "a", "b s r"]


def test_a_shortcut_is_read_by_the_kernel_that_adds_it() -> None:
    """The shortcut's producer keeps its own activation; the sum is not pulled into it."""
    lines = ("c = conv x w", "r = relu c", "d = conv r w", "s = add d r", "t = relu s")
    assert groups(*lines, out="t") == ["c r", "d s t"]


def test_what_leaves_the_function_ends_a_kernel() -> None:
    assert groups("c = conv x w", "b = add c bias", "r = relu b", out="b r") == ["c b", "r"]
    # Inside a diamond it stops the whole diamond.
    lines = ("c = conv x w", "a = add c three", "l = clip a", "m = multiply c l")
    assert groups(*lines, out="l m")[0] == "c"


def test_a_reader_that_cannot_join_stops_it() -> None:
    assert groups("c = conv x w", "r = relu c", "p = pool c", "s = add r p", out="s")[0] == "c"


def test_another_shape_stops_it() -> None:
    lines = ("p = pool x", "m = multiply y p")
    assert groups(*lines, out="m", shapes={"p": (1, 16, 1, 1)}) == ["p", "m"]
    assert groups("c = conv x w", "r = relu c", out="r", shapes={"r": None}) == ["c", "r"]


def test_elementwise_operators_fuse_among_themselves() -> None:
    assert groups("a = add x y", "r = relu a", "s = softmax r", "t = relu s", out="t") == ["a r", "s", "t"]


def test_every_operator_is_in_one_group_and_groups_are_in_order() -> None:
    lines = (
        *("c = conv x w", "d = conv c w", "j = concat c d", "r = relu j", "p = pool r", "q = relu p", "z = add q p"),
        *("o = reshape z", "k = relu o"),
    )
    made = groups(*lines, out="k")
    assert sorted(n for g in made for n in g.split()) == sorted(line.split()[0] for line in lines)
    order = [line.split()[0] for line in lines]
    firsts = [order.index(g.split()[0]) for g in made]
    assert firsts == sorted(firsts)


def test_transposes_of_the_model_do_not_part_a_kernel() -> None:
    """The members of a group may name their axes in another order: memory is the same."""
    graph = build_graph(canonicalize(nets.wrapped_in_transposes()))
    kernels = [[n.rsplit("_", 1)[0] for n in group] for group in graph_groups(graph)]
    assert kernels == [["conv2d", "add"], ["conv2d", "add", "add"], ["conv2d", "add"]]


def test_unread_results_are_kernels_of_their_own() -> None:
    assert groups("c = conv x w", "r = relu c", "u = relu c", out="r") == ["c", "r", "u"]
