"""How a layout change walks through memory: which axes move, how long the runs are, which register tile turns them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from layoutsearch.layout.layout import Layout
from layoutsearch.layout.transform import TransformKey

# Below that many elements a kernel runs on one thread, and below that tile nothing is turned in registers.
SMALL = 2048
SMALLEST_TILE = 4
_LINE, _SETS = 64, 64  # bytes of a cache line, sets of a first-level cache: strides of 4 KiB meet in one set


@dataclass(frozen=True)
class TransformWalk:
    """The loops of a layout change.

    Attributes:
        moves: whether the order of the elements changes at all.
        shared_run: elements that are contiguous on both sides.
        turns: whether rows are turned into columns, since no run is contiguous on both sides.
        tile: side of the register tile that turns them; 1 where elements are gathered one by one.
        rows, columns: extents along the contiguous axis of the source, and of the target.
        rows_full, columns_full: useful share of the tiles along each (those at an end overlap).
        read_stride, write_stride: bytes between the rows of a tile, read and written.
        read_alias, write_alias: share of the rows of a tile that fall into a set of their own; 1 is best.
        parallel: whether it is worth all threads.
    """

    moves: bool
    shared_run: int
    turns: bool
    tile: int
    rows: int
    columns: int
    rows_full: float
    columns_full: float
    read_stride: int
    write_stride: int
    read_alias: float
    write_alias: float
    parallel: bool


def run_length(layout: Layout, shape: Sequence[int], axes: str) -> int:
    """Contiguous elements along what a kernel walks innermost: the pixels of NCHW, the channels of NHWC, a block."""
    extents = dict(zip(axes, shape, strict=True))
    last = layout.axes[-1]
    if last.is_inner:
        return last.factor
    run = extents[last.letter]
    if last.letter == "W" and len(layout.axes) > 1 and layout.axes[-2].letter == "H":
        run *= extents["H"]
    return run


def transform_walk(key: TransformKey, lanes: int) -> TransformWalk:
    """The walk of a layout change on a machine with vectors of `lanes` elements."""
    atoms = _atoms(key)
    source, target = (_order(layout, atoms) for layout in (key.source, key.target))
    size = key.bytes // max(1, math.prod(key.shape))
    # What moves nothing is built as a change of shape, which wakes the threads for more than one vector.
    parallel = math.prod(key.shape) > (SMALL if source != target else lanes)
    shared = 1
    for (a, extent), (b, _) in zip(reversed(source), reversed(target), strict=True):
        if a != b:
            break
        shared *= extent
    if source == target:
        return TransformWalk(False, shared, False, 1, 1, shared, 1.0, 1.0, 0, 0, 1.0, 1.0, parallel)
    read, written = _strides(source), _strides(target)
    extents = dict(source)
    if shared > 1:
        outer = next((a for a, _ in reversed(target) if read[a] != written[a] or written[a] >= shared), None)
        stride = read[outer] * size if outer else 0
        return TransformWalk(
            True, shared, False, 1, 1, shared, 1.0, _full(shared, lanes), stride, 0, 1.0, 1.0, parallel
        )
    rows = _merged(source[-1][0], extents, read, written)
    columns = _merged(target[-1][0], extents, read, written)
    side = min(lanes, _power(rows), _power(columns))
    tile = side if side >= SMALLEST_TILE else 1
    read_stride, write_stride = read[target[-1][0]] * size, written[source[-1][0]] * size
    return TransformWalk(
        True, 1, True, tile, rows, columns, _full(rows, tile), _full(columns, tile), read_stride, write_stride,
        _alias(read_stride, max(tile, SMALLEST_TILE)), _alias(write_stride, max(tile, SMALLEST_TILE)), parallel,
    )  # fmt: skip


_Atom = tuple[str, int]  # letter, and which part of it: 0 is the outermost


def _atoms(key: TransformKey) -> dict[str, list[int]]:
    """Extents of the parts into which both layouts cut each axis, outermost first."""
    found = {}
    for letter, extent in zip(key.axes, key.shape, strict=True):
        small, large = sorted((key.source.block(letter), key.target.block(letter)))
        if large % small:
            small = math.gcd(small, large)
        found[letter] = [extent // large, large // small, small]
    return found


def _order(layout: Layout, atoms: dict[str, list[int]]) -> list[tuple[_Atom, int]]:
    """Parts longer than one, in memory order of a layout."""
    out: list[tuple[_Atom, int]] = []
    for axis in layout.axes:
        letter = axis.letter.upper()
        parts = atoms[letter]
        block = layout.block(letter)
        inner = next(i for i in range(4) if math.prod(parts[i:]) <= block) if block > 1 else 3
        chosen = range(inner, 3) if axis.is_inner else range(inner)
        out += [((letter, i), parts[i]) for i in chosen if parts[i] > 1]
    return out


def _strides(order: Sequence[tuple[_Atom, int]]) -> dict[_Atom, int]:
    found, step = {}, 1
    for atom, extent in reversed(order):
        found[atom] = step
        step *= extent
    return found


def _merged(atom: _Atom, extents: dict[_Atom, int], read: dict[_Atom, int], written: dict[_Atom, int]) -> int:
    """Extent of the axes that together with `atom` behave as one on both sides."""
    extent = extents[atom]
    while True:
        following = [a for a in extents if read[a] == read[atom] * extent and written[a] == written[atom] * extent]
        if not following:
            return extent
        extent *= extents[following[0]]


def _power(extent: int) -> int:
    return 1 << (extent.bit_length() - 1)


def _full(extent: int, tile: int) -> float:
    return extent / (-(-extent // tile) * tile)


def _alias(stride: int, rows: int) -> float:
    return len({(i * stride // _LINE) % _SETS for i in range(rows)}) / rows if stride >= _LINE else 1.0
