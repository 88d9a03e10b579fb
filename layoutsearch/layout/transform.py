"""A layout change of a tensor of one shape: what is measured, predicted and paid for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from layoutsearch.layout.graph import TensorInfo, dtype_bytes
from layoutsearch.layout.layout import Layout


@dataclass(frozen=True)
class TransformKey:
    """A layout change of a tensor of one shape.

    Attributes:
        shape: logical shape, in the order of `axes`.
        axes: axis names.
        dtype: element type.
        source: layout that is read.
        target: layout that is written.
    """

    shape: tuple[int, ...]
    axes: str
    dtype: str
    source: Layout
    target: Layout

    @classmethod
    def of(cls, info: TensorInfo, source: Layout, target: Layout) -> TransformKey:
        """The change of a tensor of the graph."""
        return cls(info.shape or (), info.axes, info.dtype, source, target)

    @property
    def workload(self) -> str:
        """Key in the record store."""
        return f"transform {self.axes} {'x'.join(map(str, self.shape))} {self.dtype}"

    @property
    def candidate(self) -> str:
        """Candidate in the record store."""
        return f"{self.source}->{self.target}"

    @property
    def bytes(self) -> int:
        """Bytes of the tensor: as many are read as written."""
        return math.prod(self.shape) * dtype_bytes(self.dtype)

    @property
    def keeps_order(self) -> bool:
        """Whether the elements stay in the same order in memory, as from NHWC to NCHW16c with 16 channels."""
        return self._order(self.source) == self._order(self.target)

    def _order(self, layout: Layout) -> list[tuple[str, int, int]]:
        """Memory order as runs (axis, step in elements of that axis, extent), outermost first, joined if possible."""
        runs: list[tuple[str, int, int]] = []
        for axis, extent in zip(layout.axes, layout.physical_shape(self.shape, self.axes), strict=True):
            letter = axis.letter.upper()
            step = 1 if axis.is_inner else layout.block(letter)
            if extent == 1:
                continue
            if runs and runs[-1][0] == letter and runs[-1][1] == step * extent:
                extent *= runs.pop()[2]
            runs.append((letter, step, extent))
        return runs

    @classmethod
    def parse(cls, workload: str, candidate: str) -> TransformKey:
        """Inverse of `workload` and `candidate`.

        Raises:
            ValueError: they are not of a transform.
        """
        words, layouts = workload.split(), candidate.split("->")
        if len(words) != 4 or words[0] != "transform" or len(layouts) != 2:
            raise ValueError(f"{workload!r} {candidate!r} is not a transform; expected AXES SHAPE DTYPE, FROM->TO")
        shape = tuple(int(s) for s in words[2].split("x"))
        return cls(shape, words[1], words[3], Layout(layouts[0]), Layout(layouts[1]))
