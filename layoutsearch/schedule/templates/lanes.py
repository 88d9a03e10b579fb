"""How output channels are cut into vectors, whatever the blocks of the tensors and the groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from layoutsearch.schedule.contraction import Contraction
from layoutsearch.schedule.indexing import Coordinate, Expr, Split
from layoutsearch.schedule.target import TargetInfo


@dataclass(frozen=True)
class Run:
    """`count` vectors of `width` output channels in a tile."""

    count: int
    width: int
    channel: Callable[[Expr, Expr], Coordinate]


@dataclass(frozen=True)
class Lanes:
    """How output channels are cut into vectors.

    Attributes:
        mode: `broadcast` (all lanes use the same input channel), `own` (depthwise: each lane its own, contiguous) or
            `gather` (groups narrower than a vector: each lane its group's).
        spaces: Independent ranges of channels (groups in mode broadcast, or packs of the weights; else one).
        span: Channels of one space.
        width: Lanes of a vector.
    """

    mode: str
    spaces: int
    span: int
    width: int

    @classmethod
    def of(cls, c: Contraction, target: TargetInfo) -> Lanes:
        """The widest vectors that the blocks of all tensors allow."""
        if c.depthwise or c.groups == 1:
            mode, spaces, span = ("own" if c.depthwise else "broadcast"), 1, c.out_channels
        else:
            mode, spaces, span = "broadcast", c.groups, c.out_per_group
            if _width(span, (*c.lane_blocks, span) if c.lane_blocks else (), target.lanes) < min(4, target.lanes):
                mode, spaces, span = "gather", 1, c.out_channels
        packed = c.lane_blocks == (c.kernel_block,) and c.kernel_block > target.lanes and c.kernel_block % target.lanes
        if c.groups == 1 and packed:
            # Weights packed by some vectors and a rest: each pack is a space of its own.
            return cls(mode, c.out_channels // c.kernel_block, c.kernel_block, target.lanes)
        blocks = (*c.lane_blocks, span) if c.lane_blocks else ()
        return cls(mode, spaces, span, _width(span, blocks, target.lanes))

    @property
    def full(self) -> int:
        """Whole vectors of one space."""
        return self.span // self.width

    @property
    def most(self) -> int:
        """Vectors of one space, the narrower ones of the rest included."""
        return self.full + (self.span % self.width).bit_count()

    def numbers(self, choices: Sequence[int]) -> list[int]:
        """Those of `choices` that one tile may have, and all vectors of a space where few are left over."""
        extra = {self.most} if self.full < self.most <= max(choices) else set()
        return sorted({v for v in choices if v <= max(1, self.full)} | extra)

    def tiles(self, vectors: int) -> int:
        """Tiles of one space."""
        return -(-self.full // vectors) if self.span % self.width == 0 else self.full // vectors + 1

    def runs(self, vectors: int, last: bool, space: Expr, tile: Expr) -> list[Run]:
        """The vectors of a tile: whole ones, and in the last tile the narrower ones of the rest."""
        width, full = self.width, self.full

        def whole(u: Expr, lane: Expr) -> Coordinate:
            if self.span % width == 0:
                return Split(space * full + (tile * vectors + u), width, lane)
            return Split(space, self.span, (tile * vectors + u) * width + lane)

        if not last:
            return [Run(vectors, width, whole)]
        whole_tiles = self.tiles(vectors) - 1
        runs = [Run(full - whole_tiles * vectors, width, whole)] if full > whole_tiles * vectors else []
        done, rest = full * width, self.span % width
        while rest:
            piece = 1 << (rest.bit_length() - 1)
            runs.append(Run(1, piece, partial(self._rest, space, done)))
            done, rest = done + piece, rest - piece
        return runs

    def _rest(self, space: Expr, start: int, _: Expr, lane: Expr) -> Coordinate:
        return Split(space, self.span, lane + start)


def _width(span: int, blocks: tuple[int, ...], lanes: int) -> int:
    if not blocks:
        return min(lanes, 1 << (span.bit_length() - 1))
    fits = [w for w in range(1, lanes + 1) if all(block % w == 0 for block in blocks)]
    powers = [w for w in fits if w & (w - 1) == 0]
    return powers[-1] if powers[-1] > 1 else fits[-1]
