"""The layouts in which a compiled module takes its inputs and gives its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from layoutsearch.layout.graph import Operand, TensorInfo
from layoutsearch.layout.layout import Layout


@dataclass(frozen=True)
class Border:
    """Layouts of inputs and outputs; what is not named has the model's own.

    Attributes:
        inputs: by the graph's name of the input.
        outputs: by position.
    """

    inputs: Mapping[str, Layout] = field(default_factory=dict, hash=False)
    outputs: Mapping[int, Layout] = field(default_factory=dict, hash=False)

    def of_input(self, info: TensorInfo) -> Layout | None:
        """Layout of an input; None for a scalar."""
        return self.inputs.get(info.name, info.initial)

    def of_output(self, position: int, output: Operand) -> Layout | None:
        """Layout of an output; None for a scalar."""
        return self.outputs.get(position, output.info.initial)


ORIGINAL = Border()
"""Every input and output as the model has it."""
