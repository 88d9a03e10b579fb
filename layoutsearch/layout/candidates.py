"""The legal candidates of every operator, from a search space."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from layoutsearch.errors import SpaceError
from layoutsearch.layout import kinds
from layoutsearch.layout.candidate import DIRECT, EXTERN, WINOGRAD, Candidate
from layoutsearch.layout.graph import LayoutGraph, OpNode, conv_info, declared_choices
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.matching import channels_of
from layoutsearch.layout.rules import initial_candidate, why_illegal
from layoutsearch.layout.scopes import GLOBAL
from layoutsearch.layout.space import Rule, SearchSpace

# A channel count that no block divides still packs by the largest common divisor, if that is worth a vector...
MIN_DIVISOR = 4


@dataclass(frozen=True)
class OpSpace:
    """Candidates of one operator.

    Attributes:
        op: bound variable.
        rule: name of the rule that decides.
        candidates: at least one.
        refused: what the rule proposed in vain, and what is pinned away or forbidden: text and reason.
        pinned: what pins the operator, in words; empty where it is free.
        scopes: memory scopes that the rule names for the result; where it names none, an operator that is fused behind
            another takes that one's.
    """

    op: str
    rule: str
    candidates: tuple[Candidate, ...]
    refused: tuple[tuple[str, str], ...]
    pinned: str = ""
    scopes: tuple[str, ...] = ()

    def allows(self, follower: Candidate, *, in_any_scope: bool = False) -> bool:
        """Whether the operator may be fused behind one whose result is as `follower` says."""
        if self.scopes and follower.scope not in self.scopes and not in_any_scope:
            return False
        return any(c.in_buffers == follower.in_buffers for c in self.candidates)


def enumerate_candidates(graph: LayoutGraph, space: SearchSpace) -> dict[str, OpSpace]:
    """Candidates of every operator that is not frozen, by bound variable.

    Raises:
        SpaceError: a rule leaves an operator without a legal candidate, or a pattern is not a layout.
    """
    rules = space.rules_for(graph)
    return {op.name: _op_space(op, rules[op.name], space) for op in graph.ops if op.role is not Role.FROZEN}


def _op_space(op: OpNode, rules: Sequence[Rule], space: SearchSpace) -> OpSpace:
    declared = declared_choices(op)
    if declared:
        return OpSpace(op.name, "declared", tuple(choice.candidate for choice in declared), ())
    if not rules:
        raise SpaceError(
            f"{space.source}: no rule matches {op.id} ({op.op}); end the file with a rule whose match is {{}}"
        )
    rule = rules[0]
    blocks = rule.blocks or space.blocks
    found: dict[Candidate, None] = {}
    refused: list[tuple[str, str]] = []
    for text, proposed in _proposals(op, rule, blocks, space.source):
        if proposed.extern and op.op != kinds.CONV:
            # Libraries are asked for everywhere, and are about convolutions.
            continue
        for candidate in _in_scopes(proposed, rule):
            reason = why_not(op, candidate)
            if reason is None:
                found.setdefault(candidate)
            else:
                refused.append((str(candidate) if candidate.has_textures else text, reason))
    why = "; ".join(f"{text}: {reason}" for text, reason in refused[:3])
    why = why or ("everything is forbidden" if found else "no block of it divides the channels")
    # What is flexible can always stay as it is.
    may_stay = op.role is Role.FLEXIBLE and not rule.pin and (GLOBAL in rule.scope or not rule.scope)
    stays = [initial_candidate(op)] if may_stay else []
    banned = set(forbidden(op, rule, blocks, space.source))
    refused += [(str(c), f"forbidden by {rule}") for c in found if c.in_buffers in banned and c not in stays]
    found = {c: None for c in found if c.in_buffers not in banned}
    for candidate in stays:
        found.setdefault(candidate)
    if not found:
        raise SpaceError(f"{space.source}: {rule} leaves no candidate for {op.id}: {why}")
    return OpSpace(op.name, rule.name, tuple(found), tuple(refused), str(rule) if rule.pin else "", rule.scope)


def forbidden(op: OpNode, rule: Rule, blocks: Sequence[int], source: str) -> list[Candidate]:
    """What a rule forbids for `op`."""
    return [candidate for pattern in rule.forbid for _, candidate in expand(op, pattern, blocks, source)]


def why_not(op: OpNode, candidate: Candidate) -> str | None:
    """Why `op` of this model cannot run as `candidate`; None when it can."""
    return why_illegal(op, candidate) or _why_no_constant(op, candidate)


def _in_scopes(proposed: Candidate, rule: Rule) -> Iterator[Candidate]:
    """The candidate in every memory scope that the rule names, in its order."""
    weights = rule.weight_scope if proposed.kernel is not None else ()
    for scope in rule.scope or (GLOBAL,):
        for weight_scope in weights or (GLOBAL,):
            yield replace(proposed, scope=scope, weight_scope=weight_scope)


def _why_no_constant(op: OpNode, candidate: Candidate) -> str | None:
    """Weights have to be known to be transformed, or put into textures, beforehand."""
    if op.op not in kinds.CONVOLUTIONS or op.operands[1].tensor is None:
        return None
    if candidate.winograd or candidate.extern:
        return f"{candidate.algorithm} needs constant weights"
    if candidate.weight_scope != GLOBAL:
        return f"{candidate.weight_scope} needs constant weights"
    return None


def _proposals(op: OpNode, rule: Rule, blocks: Sequence[int], source: str) -> list[tuple[str, Candidate]]:
    if not rule.pin:
        return [p for pattern in rule.layouts for p in expand(op, pattern, blocks, source)]
    try:
        if len(rule.pin) > 2:
            pinned = Candidate.of(*rule.pin)
        else:
            pinned = _candidate(op, Layout(rule.pin[0]), Layout(rule.pin[-1]))
    except ValueError as error:
        raise SpaceError(f"{source}: rule {rule.name!r}: {error}") from None
    return [(",".join(rule.pin), pinned)]


def expand(op: OpNode, pattern: str, blocks: Sequence[int], source: str) -> list[tuple[str, Candidate]]:
    """Every filling of {i}, {o}, {b} and {k}; `A->B:K@G` reads A, writes B, has its kernel in K, is computed by G."""
    named, _, algorithm = pattern.partition("@")
    layouts, _, kernel = named.partition(":")
    data, _, out = layouts.partition("->")
    out = out or data
    inputs, outputs = channels_of(op)
    choices = [("b", math.gcd(inputs, outputs)), ("i", inputs), ("o", outputs)]
    texts = [(data, out, kernel)]
    for letter, channels in choices:
        mark = f"{{{letter}}}"
        if mark in layouts:
            fill = _fitting(channels, blocks, letter)
            texts = [tuple(t.replace(mark, str(b)) for t in text) for text in texts for b in fill]  # type: ignore[misc]
    if "{k}" in kernel:
        pack = _pack(outputs, min(blocks))
        texts = [(d, o, k.replace("{k}", str(pack))) for d, o, k in texts if pack]
    found = []
    for d, o, k in texts:
        text = f"{d}->{o}" + (f":{k}" if k else "") + (f"@{algorithm}" if algorithm else "")
        try:
            found.append((text, _candidate(op, Layout(d), Layout(o), k, algorithm, blocks)))
        except ValueError as error:
            raise SpaceError(f"{source}: pattern {pattern!r}: {error}") from None
    return found


def _fitting(channels: int, blocks: Sequence[int], letter: str) -> list[int]:
    fit = [b for b in blocks if channels % b == 0]
    if fit:
        return fit
    common = math.gcd(channels, max(blocks))
    if common >= MIN_DIVISOR:
        return [common]
    # ... and an image's few channels are one block.
    return [channels] if letter == "i" and 1 < channels <= MIN_DIVISOR else []


def _candidate(
    op: OpNode, data: Layout, out: Layout, kernel: str = "", algorithm: str = "", blocks: Sequence[int] = ()
) -> Candidate:
    if op.op not in kinds.CONVOLUTIONS:
        return Candidate.of(data.name, None, out.name, algorithm or DIRECT)
    if algorithm in WINOGRAD:
        weights = kernel or _winograd_layout(op, blocks)
    elif algorithm in EXTERN:
        weights = kernel or "OIHW"
    else:
        weights = kernel or kernel_layout(op, data, out).name
    return Candidate.of(data.name, weights, out.name, algorithm or DIRECT)


# Narrower vectors at the end of a pack take the time of whole ones; fewer of its lanes in use than that do not pay.
_PACK_VECTORS, _PACK_FULL = 6, 0.6


def _pack(channels: int, lanes: int) -> int:
    """Output channels to keep together in the weights: one vector, or else a few with the least left over; 0 if none.

    `lanes` is the smallest block of the space, a vector.
    """
    if channels % lanes == 0:
        return lanes

    def full(block: int) -> float:
        return block / (lanes * (block // lanes + (block % lanes).bit_count()))

    fit = [b for b in range(lanes + 1, _PACK_VECTORS * lanes + 1) if channels % b == 0 and full(b) >= _PACK_FULL]
    return max(fit, key=lambda b: (full(b), -b), default=0)


def _winograd_layout(op: OpNode, blocks: Sequence[int]) -> str:
    """Weights point by point; within one a vector of output channels by input channel, where a block divides them."""
    fit = [b for b in blocks if conv_info(op).out_channels % b == 0]
    return f"HWOI{min(fit)}o" if fit else "HWIO"


def kernel_layout(op: OpNode, data: Layout, out: Layout) -> Layout:
    """The kernel layout that goes with two data layouts: output channels innermost wherever they are in the result."""
    axes = op.operands[1].info.axes
    info = conv_info(op)
    if info.depthwise:
        letter = "i" if op.op == kinds.CONV_TRANSPOSE else "o"
        block = f"{out.block('C')}{letter}" if out.is_blocked else ""
        return Layout("HWIO" if out.name == "NHWC" else axes + block)
    i = f"{data.block('C')}i" if data.is_blocked else ""
    o = f"{out.block('C')}o" if out.is_blocked else ""
    return Layout(("HWIO" if out.name == "NHWC" else axes) + i + o)


def nearest(candidates: Sequence[Candidate], wanted: Layout) -> Candidate:
    """The candidate of a uniform layout: `wanted` itself, or the largest legal divisor of its block, else the original.

    For a blocked `wanted`, each side of a convolution takes the largest block that divides the wanted one; a side that
    has none is unblocked. Of algorithms, the direct one.
    """

    def distance(candidate: Candidate) -> tuple[int, int, bool, int]:
        misses = (_miss(candidate.data, wanted), _miss(candidate.out, wanted))
        return (*misses, candidate.algorithm != DIRECT, len(str(candidate)))

    return min(candidates, key=distance)


def _miss(layout: Layout, wanted: Layout) -> int:
    if layout == wanted:
        return 0
    have, want = layout.block("C"), wanted.block("C")
    if want > 1 and have > 1 and want % have == 0:
        return 1 + want // have
    # An image's own channels as one block are closer to a packed layout than no block at all.
    if want > 1 and have > 1:
        return 1000 + abs(want - have)
    return 2000 if layout.name == "NCHW" else 3000


def uniform_layouts(spaces: Sequence[OpSpace]) -> list[Layout]:
    """The layouts a uniform assignment may be made of: every result layout of any convolution, NCHW first."""
    seen: dict[Layout, None] = {Layout("NCHW"): None}
    # Layouts that only a library knows are none for the rest of the model, unless it computes all of it.
    own = any(c.kernel is not None and not c.extern for space in spaces for c in space.candidates)
    for space in spaces:
        for candidate in space.candidates:
            if candidate.kernel is not None and candidate.data == candidate.out and not (own and candidate.extern):
                seen.setdefault(candidate.out)
    return list(seen)
