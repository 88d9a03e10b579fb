"""What a user wants of the layouts of a model's inputs and outputs: `--io-layout keep|free|NAME=LAYOUT`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from layoutsearch.errors import SpaceError
from layoutsearch.layout.border import ORIGINAL, Border
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.graph import LayoutGraph, TensorInfo
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.rules import made_layouts, operand_layouts, why_not_stored

KEEP, FREE = "keep", "free"
_OPTION = "--io-layout"


@dataclass(frozen=True)
class IoLayouts:
    """The words of a user.

    Attributes:
        default: `keep` or `free`, for what is not named.
        named: layout, `keep` or `free` by name of an input or output.
    """

    default: str = KEEP
    named: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def parse(cls, words: str | Sequence[str] | Mapping[str, str] | None) -> IoLayouts:
        """From `keep`, `free` and `NAME=LAYOUT` (one or several), or a mapping of names.

        Raises:
            SpaceError: a word is none of these, or two contradict each other.
        """
        if isinstance(words, Mapping):
            words = [f"{name}={layout}" for name, layout in words.items()]
        defaults: dict[str, None] = {}
        named: dict[str, str] = {}
        for word in [words] if isinstance(words, str) else words or []:
            name, equals, layout = (part.strip() for part in word.rpartition("="))
            if not equals and layout in (KEEP, FREE):
                defaults[layout] = None
                continue
            if not equals or not name or not layout:
                raise SpaceError(f"{_OPTION} {word!r}: expected keep, free or NAME=LAYOUT, such as x=NHWC")
            if named.setdefault(name, layout) != layout:
                raise SpaceError(f"{_OPTION}: {name} is to be {named[name]} and {layout}; give one of them")
        if len(defaults) > 1:
            raise SpaceError(f"{_OPTION}: keep and free contradict each other; give one of them")
        return cls(next(iter(defaults), KEEP), named)

    @property
    def words(self) -> list[str] | None:
        """The same for a file; None for what is the default."""
        named = [f"{name}={self.named[name]}" for name in sorted(self.named)]
        return [*([FREE] if self.default == FREE else []), *named] or None

    def rules(self, graph: LayoutGraph, inputs: Sequence[str], outputs: Sequence[str]) -> BorderRules:
        """What they mean for a model.

        Args:
            graph: of the model.
            inputs: names that the model's file has for its inputs, in the graph's order.
            outputs: for its outputs.

        Raises:
            SpaceError: a name or layout that cannot be; the message names it, and what is known.
        """
        for name in self.named:
            if name not in (*inputs, *outputs):
                raise SpaceError(
                    f"{_OPTION}: the model has no {name!r}; its inputs are {', '.join(inputs) or 'none'}, its outputs "
                    f"{', '.join(outputs) or 'none'}"
                )
        found = BorderRules()
        for name, info in zip(inputs, graph.inputs, strict=True):
            layout = self._of(f"input {name}", name, info)
            if layout == FREE:
                found = found.with_free_input(info.name)
            elif isinstance(layout, Layout):
                found = found.with_input(info.name, layout)
        for position, (name, output) in enumerate(zip(outputs, graph.outputs, strict=True)):
            layout = self._of(f"output {name}", name, output.info)
            if layout == FREE:
                found = found.with_free_output(position)
            elif isinstance(layout, Layout):
                found = found.with_output(position, layout)
        return found

    def _of(self, what: str, name: str, info: TensorInfo) -> Layout | str:
        """Layout of one tensor; `keep` or `free`."""
        wanted = self.named.get(name, self.default)
        movable = len(info.axes) == 4 and info.shape is not None
        if wanted == KEEP or (wanted == FREE and name not in self.named and not movable):
            return KEEP
        if not movable:
            raise SpaceError(
                f"{_OPTION} {name}={wanted}: {what} has {len(info.axes)} dimensions; only a tensor of four, of fixed "
                "shape, can have another layout"
            )
        if wanted == FREE:
            return FREE
        try:
            layout = Layout(wanted)
        except ValueError as error:
            raise SpaceError(f"{_OPTION} {name}={wanted}: {error}, or keep, or free") from None
        reason = why_not_stored(layout, info)
        if reason is not None:
            shape = "x".join(map(str, info.shape or ()))
            raise SpaceError(f"{_OPTION} {name}={wanted}: {what} is {info.axes} {shape}: {reason}; give another layout")
        return KEEP if layout == info.initial else layout


AS_THEY_ARE = IoLayouts()
"""The default."""


@dataclass(frozen=True)
class BorderRules:
    """Which layouts the inputs and outputs of one model may have.

    Attributes:
        fixed: those that are given; what is neither given nor free has its original layout.
        free_inputs: names (the graph's) of inputs whose layout is chosen with the kernels'.
        free_outputs: positions of such outputs.
    """

    fixed: Border = ORIGINAL
    free_inputs: frozenset[str] = frozenset()
    free_outputs: frozenset[int] = frozenset()

    def with_input(self, name: str, layout: Layout) -> BorderRules:
        """With an input in a layout."""
        border = Border({**self.fixed.inputs, name: layout}, self.fixed.outputs)
        return BorderRules(border, self.free_inputs, self.free_outputs)

    def with_output(self, position: int, layout: Layout) -> BorderRules:
        """With an output in a layout."""
        border = Border(self.fixed.inputs, {**self.fixed.outputs, position: layout})
        return BorderRules(border, self.free_inputs, self.free_outputs)

    def with_free_input(self, name: str) -> BorderRules:
        """With an input in any layout."""
        return BorderRules(self.fixed, self.free_inputs | {name}, self.free_outputs)

    def with_free_output(self, position: int) -> BorderRules:
        """With an output in any layout."""
        return BorderRules(self.fixed, self.free_inputs, self.free_outputs | {position})

    def wanted(self, graph: LayoutGraph, assignment: Mapping[str, Candidate], name: str) -> list[Layout]:
        """Layouts that an input is wanted in, each once: by operators, in program order, then as an output."""
        found: dict[Layout, None] = {}
        for op, index in graph.consumers[name]:
            layout = operand_layouts(op, assignment.get(op.name))[index]
            if layout is not None:
                found[layout] = None
        for position, output in enumerate(graph.outputs):
            layout = self.fixed.of_output(position, output)
            if output.tensor == name and position not in self.free_outputs and layout is not None:
                found[layout] = None
        return list(found)

    def border(
        self, graph: LayoutGraph, assignment: Mapping[str, Candidate], chosen: Mapping[str, Layout] | None = None
    ) -> Border:
        """The border of an assignment.

        A free output is as it is made, and a free input as it is read, where that is in one layout; where it is in
        several it is as `chosen`.
        """
        inputs = dict(self.fixed.inputs)
        for info in graph.inputs:
            if info.name in self.free_inputs:
                wanted = self.wanted(graph, assignment, info.name)
                layout = (chosen or {}).get(info.name, wanted[0] if wanted else info.initial)
                if layout is not None and layout != info.initial:
                    inputs[info.name] = layout
        made = made_layouts(graph, assignment, Border(inputs))
        outputs = dict(self.fixed.outputs)
        for position in sorted(self.free_outputs):
            output = graph.outputs[position]
            layout = made.get(output.tensor or "")
            if layout is not None and layout != output.info.initial:
                outputs[position] = layout
        return Border(inputs, outputs)

    def admits(self, graph: LayoutGraph, border: Border) -> bool:
        """Whether a border is what was asked for."""
        fixed = all(
            border.of_input(info) == self.fixed.of_input(info)
            for info in graph.inputs
            if info.name not in self.free_inputs
        )
        return fixed and all(
            border.of_output(i, output) == self.fixed.of_output(i, output)
            for i, output in enumerate(graph.outputs)
            if i not in self.free_outputs
        )


KEEP_ALL = BorderRules()
"""Every input and output as the model has it."""
