"""Requested is not achieved, to the end: the kernels that a compiled module calls, against what its plan implies.

The calls are followed from the inputs to the outputs, through memory: every operand has to be the tensor that the plan
says, in the layout that it says, made by the kernel that the plan says. So a transform that is not listed, one too many
or too few, an operator that runs twice, or in other layouts than its neighbours believe, is an error that names the
operator, also where the shapes are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import tvm
from tvm import relax, tirx

from layoutsearch.errors import MaterializeError
from layoutsearch.materialize.axes import hidden_transpose, wrong_axes
from layoutsearch.materialize.copies import only_copies
from layoutsearch.plan.calls import CONSTANT, OPAQUE, UNKNOWN, KernelCall, Place, trace_calls
from layoutsearch.plan.expected import Expectation, ExpectedCall, Value
from layoutsearch.schedule.anatomy import Anatomy
from layoutsearch.schedule.templates.stack import STACKS


def prove_lowered(module: tvm.IRModule, expectation: Expectation) -> None:
    """Check kernels that are not scheduled yet: each walks its buffers as the plan's layouts say.

    Raises:
        MaterializeError: a kernel does not, or moves a tensor inside; the message names the operator.
    """
    functions = {g.name_hint: f for g, f in module.functions_items()}
    seen = set()
    for call in expectation.calls:
        function = functions.get(call.function)
        if call.axes is None or (call.function, call.axes) in seen or not isinstance(function, tirx.PrimFunc):
            continue
        seen.add((call.function, call.axes))
        if len(function.params) != len(call.axes):
            raise MaterializeError(f"{call.name}: its kernel has {len(function.params)} buffers, not {len(call.axes)}")
        anatomy = Anatomy.of(function)
        wrong = wrong_axes(anatomy, call.axes)
        if wrong is not None:
            raise MaterializeError(f"{call.name}: in its kernel {call.function}, {wrong}")
        stage = None if call.is_transform else hidden_transpose(anatomy)
        if stage is not None:
            raise MaterializeError(f"{call.name}: its kernel {call.function} moves a tensor inside, in {stage}")


def prove_scheduled(module: tvm.IRModule, expectation: Expectation) -> Expectation:
    """Check `main` of scheduled kernels; the expectation with every call's kernel, in the order of the module.

    Raises:
        MaterializeError: the module does something else; the message names the operator.
    """
    return _Proof(module, expectation).scheduled()


def prove_final(module: tvm.IRModule, proven: Expectation) -> None:
    """Check a module behind any pass that follows, against what `prove_scheduled` gave.

    Concatenations and reshapes may have become memory; everything else has to be there in the same order.

    Raises:
        MaterializeError: the module does something else; the message names the operator.
    """
    _Proof(module, proven).final()


@dataclass
class _Held:
    """A tensor in memory."""

    place: Place
    value: Value


class _Memory:
    """Which tensors are where; aliases are several of them at one place."""

    def __init__(self) -> None:
        self._held: dict[str, list[_Held]] = {}

    def write(self, place: Place, value: Value) -> None:
        """A tensor takes the place of all that it overlaps."""
        end = place.offset + place.bytes
        kept = [
            h
            for h in self._held.get(place.base, [])
            if h.place.offset >= end or h.place.offset + h.place.bytes <= place.offset
        ]
        self._held[place.base] = [*kept, _Held(place, value)]

    def alias(self, place: Place, value: Value) -> None:
        """What is at a place is another tensor too."""
        self._held.setdefault(place.base, []).append(_Held(place, value))

    def at(self, place: Place) -> list[Value]:
        """The tensors that are exactly at a place."""
        return [h.value for h in self._held.get(place.base, []) if _where(h.place) == _where(place)]

    def find(self, value: Value) -> Iterator[Place]:
        """Where a tensor is."""
        for held in self._held.values():
            yield from (h.place for h in held if _is(h.value, value))


_SOMETHING = Value("something that is no tensor of the model")


def _where(place: Place) -> tuple[str, int, int]:
    return place.base, place.offset, place.bytes


def _is(value: Value, wanted: Value) -> bool:
    return (value.tensor, value.layout) == (wanted.tensor, wanted.layout)


class _Proof:
    def __init__(self, module: tvm.IRModule, expectation: Expectation) -> None:
        self._trace = trace_calls(module, {call.function for call in expectation.calls if call.function})
        self._functions = {g.name_hint: f for g, f in module.functions_items() if isinstance(f, tirx.PrimFunc)}
        self._expectation = expectation
        self._memory = _Memory()
        if self._trace.strays:
            raise MaterializeError(
                f"the lowered module still has {self._trace.strays[0]}, which the plan does not list"
            )
        for place, value in zip(self._trace.parameters, expectation.inputs, strict=True):
            self._check_shape(f"input {value.tensor}", place, value)
            self._memory.write(place, value)

    def scheduled(self) -> Expectation:
        waiting: dict[str, list[ExpectedCall]] = {}
        for planned in self._expectation.calls:
            waiting.setdefault(planned.function, []).append(planned)
        found = []
        for call in self._trace.calls:
            if call.function == OPAQUE:
                self._pass(call)
                continue
            known = waiting.get(call.function)
            expected = known.pop(0) if known else self._loose(call, waiting.get("", []))
            if expected is None:
                raise self._stray(call)
            self._match(call, expected)
            found.append(replace(expected, function=call.function))
        # Operators that were lowered to something else than a kernel have no call.
        left = [e for function, calls in waiting.items() if function for e in calls]
        left += [e for e in waiting.get("", []) if e.is_transform]
        if left:
            raise MaterializeError(f"{left[0].name} is not in the lowered module")
        self._check_outputs()
        return replace(self._expectation, calls=tuple(found))

    def final(self) -> None:
        calls = list(self._trace.calls)
        for expected in self._expectation.calls:
            while calls and calls[0].function == OPAQUE:
                self._pass(calls.pop(0))
            if calls and calls[0].function == expected.function:
                self._match(calls.pop(0), expected)
            elif not self._became_memory(expected):
                raise (
                    self._stray(calls[0])
                    if self._is_extra(calls)
                    else MaterializeError(f"{expected.name} is not in the final module")
                )
        for call in calls:
            if call.function != OPAQUE:
                raise self._stray(call)
            self._pass(call)
        self._check_outputs()

    def _pass(self, call: KernelCall) -> None:
        """What no kernel has written may be the result of something else."""
        for place in call.places:
            if not self._memory.at(place) and not place.base.startswith("parameter"):
                self._memory.write(place, _SOMETHING)

    def _is_extra(self, calls: Sequence[KernelCall]) -> bool:
        """Whether the next call is not one of those that are still to come."""
        names = [e.function for e in self._expectation.calls]
        have = [c.function for c in self._trace.calls]
        return bool(calls) and have.count(calls[0].function) > names.count(calls[0].function)

    def _loose(self, call: KernelCall, waiting: list[ExpectedCall]) -> ExpectedCall | None:
        """The next call of a kernel without a known name that reads the same."""
        for i, expected in enumerate(waiting):
            count = len(expected.reads) + len(expected.makes)
            pairs = zip(expected.reads, call.places, strict=False)
            if not expected.checked or (count == len(call.places) and all(self._reads(p, v) for v, p in pairs)):
                return waiting.pop(i)
        return None

    def _reads(self, place: Place, value: Value) -> bool:
        if not value.tensor:
            return place.base == CONSTANT
        held = self._memory.at(place)
        if not held:
            return place.base.startswith(UNKNOWN)
        return any(_is(v, value) or v == _SOMETHING for v in held)

    def _match(self, call: KernelCall, expected: ExpectedCall) -> None:
        function = self._functions.get(call.function)
        if not expected.checked:
            self._memory.write(call.places[-1], _SOMETHING)
            return
        values = (*expected.reads, *expected.makes)
        # What an external function does inside is its own affair.
        buffers = [None] * len(call.places) if function is None else list(function.params)
        if len(values) != len(call.places) or len(buffers) != len(call.places):
            raise MaterializeError(
                f"{expected.name}: its kernel {call.function} has {len(buffers)} buffers, not {len(values)}"
            )
        for i, (place, value, buffer) in enumerate(zip(call.places, values, buffers, strict=True)):
            is_result = i >= len(expected.reads)
            what = f"{expected.name}: {f'result {i - len(expected.reads)}' if is_result else f'operand {i}'}"
            self._check_shape(what, place, value)
            shape = _shape_of(buffer) if buffer is not None else None
            if shape is not None and value.shape is not None and shape != value.shape:
                raise MaterializeError(f"{what} of its kernel has the shape {shape}, {value} is {value.shape}")
            if not is_result and not self._reads(place, value):
                held = self._memory.at(place)
                raise MaterializeError(f"{what} is {held[0] if held else 'something else'}, the plan has {value}")
        if expected.is_transform and (function is None or not only_copies(function)):
            raise MaterializeError(f"{expected.name} computes something")
        for place, value in zip(call.places[len(expected.reads) :], expected.makes, strict=True):
            self._memory.write(place, value)

    def _became_memory(self, expected: ExpectedCall) -> bool:
        """Whether a kernel need not run, since its operands lie where its result is."""
        function = self._functions.get(expected.function)
        if function is None or len(expected.makes) != 1:
            return False
        (made,) = expected.makes
        if len(expected.reads) == 1 and relax.analysis.has_reshape_pattern(function):
            for place in list(self._memory.find(expected.reads[0])):
                self._memory.alias(replace(place, shape=made.shape), made)
            return True
        if not function.attrs.get(STACKS):
            return False
        for start in list(self._memory.find(expected.reads[0])):
            end = start.offset
            for part in expected.reads:
                here = [p for p in self._memory.find(part) if (p.base, p.offset) == (start.base, end)]
                if not here:
                    break
                end += here[0].bytes
            else:
                self._memory.alias(Place(start.base, start.offset, end - start.offset, made.shape), made)
                return True
        return False

    def _check_shape(self, what: str, place: Place, value: Value) -> None:
        if place.shape is not None and value.shape is not None and place.shape != value.shape:
            raise MaterializeError(f"{what} has the shape {place.shape}, {value} is {value.shape}")

    def _check_outputs(self) -> None:
        for i, (place, value) in enumerate(zip(self._trace.results, self._expectation.outputs, strict=True)):
            self._check_shape(f"output {i}", place, value)
            held = self._memory.at(place)
            if not self._reads(place, value):
                raise MaterializeError(f"output {i} is {held[0] if held else 'not made'}, the plan has {value}")

    def _stray(self, call: KernelCall) -> MaterializeError:
        """A call that nothing in the plan stands for."""
        function = self._functions.get(call.function)
        does = "moves" if function is not None and only_copies(function) else "reads"
        read = next((v for p in call.places for v in self._memory.at(p) if v.tensor), None)
        if read is None:
            return MaterializeError(f"the lowered module calls {call.function}, which the plan does not list")
        maker = self._expectation.makers.get(read.tensor)
        readers = " and ".join(self._expectation.readers.get(read.tensor, ())[:3]) or "no operator"
        of = f"made by {maker}, read by {readers}" if maker else f"an input, read by {readers}"
        return MaterializeError(
            f"{call.function} {does} {read} ({of}) in the lowered module, and the plan does not list it"
        )


def _shape_of(buffer: tirx.Var) -> tuple[int, ...] | None:
    shape = buffer.ty.shape if hasattr(buffer.ty, "shape") else ()
    return tuple(int(s) for s in shape) if all(isinstance(s, tirx.IntImm) for s in shape) else None
