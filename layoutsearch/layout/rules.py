"""What a choice means for each operand and result of an operator, and when it is illegal.

`operand_layouts` and `result_layouts` are the single source: the search counts transforms with them, the conversion
answers from them, the verification compares against them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from layoutsearch.layout import kinds
from layoutsearch.layout.border import ORIGINAL, Border
from layoutsearch.layout.candidate import DIRECT, Assignment, Candidate
from layoutsearch.layout.declared import Declared
from layoutsearch.layout.graph import LayoutGraph, OpNode, TensorInfo, conv_info, declared_choices
from layoutsearch.layout.kinds import Role
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.scopes import GLOBAL, why_no_scope


def initial_candidate(op: OpNode) -> Candidate:
    """The operator's original layouts as a candidate; of an external function the first that it declares."""
    if declared_choices(op):
        return declared_choices(op)[0].candidate
    out = (op.result.initial if op.results else None) or Layout("A")
    if op.op in kinds.CONVOLUTIONS and op.operands[0].info.axes and op.operands[1].info.axes:
        return Candidate(Layout(op.operands[0].info.axes), Layout(op.operands[1].info.axes), out)
    if op.operands and op.operands[0].info.initial is not None and op.role is Role.ANCHOR:
        return Candidate.uniform(op.operands[0].info.initial)
    if op.op in kinds.REDUCTIONS:
        return Candidate.uniform(op.operands[0].info.initial or Layout("A"))
    return Candidate.uniform(out)


def operand_layouts(op: OpNode, choice: Candidate | None) -> tuple[Layout | None, ...]:
    """Layout of every (flattened) tensor operand under `choice`; None for scalars. `choice` None means frozen."""
    if choice is None or op.role is Role.FROZEN:
        return tuple(o.info.initial for o in op.operands)
    if op.op == kinds.EXTERN_CALL:
        declared = declared_choice(op, choice)
        return tuple(declared.param(i) or o.info.initial for i, o in enumerate(op.operands))
    if op.op in kinds.CONVOLUTIONS:
        rest = tuple(o.info.initial for o in op.operands[2:])
        return (choice.data, choice.kernel, *rest)
    return tuple(_follow(choice.data, o.info, op) for o in op.operands)


def result_layouts(op: OpNode, choice: Candidate | None) -> tuple[Layout | None, ...]:
    """Layout of every result under `choice`; None for scalars."""
    if choice is None or op.role is Role.FROZEN:
        return tuple(t.initial for t in op.results)
    if op.op in kinds.REDUCTIONS and not op.attrs["keepdims"]:
        return tuple(t.initial for t in op.results)
    if op.op == kinds.EXTERN_CALL:
        destination = declared_choice(op, choice).destination
        return tuple(destination or t.initial for t in op.results)
    return tuple(choice.out for _ in op.results)


def declared_choice(op: OpNode, choice: Candidate) -> Declared:
    """What an external function declared as `choice`."""
    return next(declared for declared in declared_choices(op) if declared.candidate == choice)


def _follow(layout: Layout, info: TensorInfo, op: OpNode) -> Layout | None:
    """Layout of an operand of `op` that runs in `layout`: extents that broadcast are not split."""
    if len(info.axes) != 4 or info.shape is None:
        return info.initial
    if op.op not in kinds.BROADCAST:
        return layout
    extents = dict(zip(info.axes, info.shape, strict=True))
    full = dict(zip(op.result.axes, op.result.shape or (), strict=True))
    return Layout(
        "".join(
            f"{1 if extents[a.letter.upper()] == 1 and full[a.letter.upper()] != 1 else a.factor}{a.letter}"
            if a.is_inner
            else a.letter
            for a in layout.axes
        )
    )


def why_illegal(op: OpNode, choice: Candidate) -> str | None:
    """Why `op` cannot run as `choice`, or None when it can."""
    if op.role is Role.FROZEN:
        return f"{op.op} is frozen: {op.why_frozen or 'it has no layout inference'}"
    return _why_no_layouts(op, choice) or _why_no_scopes(op, choice)


def _why_no_scopes(op: OpNode, choice: Candidate) -> str | None:
    """In which memory the result and the weights cannot be."""
    if not choice.has_textures:
        return None
    if choice.winograd or choice.extern or op.op == kinds.EXTERN_CALL:
        return f"{choice.algorithm if op.op != kinds.EXTERN_CALL else 'an external function'} runs in buffers only"
    tensors = [
        (choice.scope, layout, info) for layout, info in zip(result_layouts(op, choice), op.results, strict=True)
    ]
    if choice.scope != GLOBAL and len(tensors) != 1:
        return f"{op.op} has {len(tensors)} results, which are buffers"
    if choice.weight_scope != GLOBAL and choice.kernel is None:
        return f"{op.op} has no weights"
    if choice.kernel is not None:
        tensors.append((choice.weight_scope, choice.kernel, op.operands[1].info))
    for scope, layout, info in tensors:
        reason = why_no_scope(scope, layout, info.shape, info.axes, info.dtype) if layout is not None else None
        if reason is not None:
            return reason
    return None


def _why_no_layouts(op: OpNode, choice: Candidate) -> str | None:
    if op.op == kinds.EXTERN_CALL:
        known = [declared.candidate for declared in declared_choices(op)]
        return None if choice in known else f"external function {op.attrs['function']} declares no {choice}"
    if op.op in kinds.CONVOLUTIONS:
        return _why_conv(op, choice)
    if choice.kernel is not None or choice.data != choice.out:
        return f"{op.op} has one layout, not {choice}"
    if choice.algorithm != DIRECT:
        return f"{choice.algorithm} is for convolutions"
    info = op.operands[0].info if op.op in kinds.REDUCTIONS else op.result
    reason = _why_not(choice.data, info)
    for check in (_CHECKS.get(op.op), _check_operands):
        if reason is None and check is not None:
            reason = check(op, choice.data)
    return reason


_NO_BOOL = "TVM cannot lower a layout transform of bool"


def _why_not(layout: Layout, info: TensorInfo) -> str | None:
    if info.shape is None or set(layout.primal) != set(info.axes):
        return f"layout {layout} does not fit a tensor with axes {info.axes}"
    if set(layout.blocks) - {"C"} and info.axes.isupper() and "C" in info.axes and "O" not in info.axes:
        return f"layout {layout} blocks another axis than C"
    extents = dict(zip(info.axes, info.shape, strict=True))
    for axis, block in layout.blocks.items():
        if extents[axis] % block:
            return f"block {block} does not divide {axis}={extents[axis]}"
    return None


def why_not_stored(layout: Layout, info: TensorInfo) -> str | None:
    """Why a tensor that a model takes or gives cannot be stored in a layout, or None when it can."""
    if layout.is_blocked and info.dtype == "bool":
        return _NO_BOOL
    return _why_not(layout, info)


def _why_conv(op: OpNode, choice: Candidate) -> str | None:
    data, kernel = op.operands[0].info, op.operands[1].info
    if choice.kernel is None:
        return f"{op.op} needs a kernel layout"
    for layout, info in ((choice.data, data), (choice.kernel, kernel), (choice.out, op.result)):
        reason = _why_not(layout, info)
        if reason is not None:
            return reason
    if choice.extern:
        return _why_not_extern(op, choice)
    return _why_not_winograd(op, choice) if choice.winograd else _why_conv_blocks(op, choice)


def _why_not_extern(op: OpNode, choice: Candidate) -> str | None:
    """What all external libraries have in common; the library itself says what else it cannot do."""
    if op.op != kinds.CONV or op.result.dtype != "float32" or op.operands[0].info.dtype != "float32":
        return f"{choice.algorithm} is for conv2d of float32"
    return None if str(choice.kernel) == "OIHW" else f"{choice.algorithm} packs weights from OIHW, not {choice.kernel}"


# Fewer channels than half a vector of AVX-512 leave most of a vector idle in every step.
_WINOGRAD_CHANNELS = 8


def _why_not_winograd(op: OpNode, choice: Candidate) -> str | None:
    """Vectors run over channels; the form is that of 3 x 3 kernels at stride 1. Weights have blocks of their own."""
    assert choice.kernel is not None
    if set(choice.kernel.blocks) - {"I", "O"}:
        return f"kernel layout {choice.kernel} blocks another axis than I and O"
    info = conv_info(op)
    if op.op != kinds.CONV or info.kernel != (3, 3) or info.strides != (1, 1) or info.dilation != (1, 1):
        return f"no {choice.algorithm} kernel for {_geometry(op)}: it is for 3x3 convolutions of stride and dilation 1"
    if info.groups != 1 or info.in_channels % _WINOGRAD_CHANNELS or info.out_channels % _WINOGRAD_CHANNELS:
        return f"{choice.algorithm} needs one group and channels in multiples of {_WINOGRAD_CHANNELS}"
    if op.result.dtype != "float32" or op.operands[0].info.dtype != "float32":
        return f"{choice.algorithm} is for float32"
    for layout in (choice.data, choice.out):
        if layout.axes[-1].letter.upper() != "C":
            return f"{choice.algorithm} needs channels innermost, not {layout}"
    return None


def _geometry(op: OpNode) -> str:
    info, words = conv_info(op), []
    if op.op != kinds.CONV:
        words.append(op.op.rpartition(".")[2])
    if info.kernel != (3, 3):
        words.append("{}x{}".format(*info.kernel))
    for name, (y, x) in (("stride", info.strides), ("dilation", info.dilation)):
        if (y, x) != (1, 1):
            words.append(f"{name} {y}" if y == x else f"{name} {y}x{x}")
    return ", ".join(words)


def _why_conv_blocks(op: OpNode, choice: Candidate) -> str | None:
    info = conv_info(op)
    assert choice.kernel is not None
    i, o = choice.data.block("C"), choice.out.block("C")
    ki, ko = choice.kernel.block("I"), choice.kernel.block("O")
    if set(choice.kernel.blocks) - {"I", "O"}:
        return f"kernel layout {choice.kernel} blocks another axis than I and O"
    if info.depthwise:
        lanes = ki if op.op == kinds.CONV_TRANSPOSE else ko
        if i != o or lanes != o or ki * ko != lanes:
            return f"a depthwise convolution has one block for data, kernel and result, not {choice}"
        return None
    # Weights beside unblocked data may be blocked all the same: a vector of output channels is then contiguous.
    if (i > 1 and ki not in (1, i)) or (o > 1 and ko != o):
        axes = "".join(a.letter for a in choice.kernel.axes if not a.is_inner)
        expected = axes + (f"{i}i" if i > 1 else "") + (f"{o}o" if o > 1 else "")
        return f"the kernel's blocks {ki}i{ko}o are not the data's {i} and the result's {o}, as in {expected}"
    inputs, outputs = info.in_channels // info.groups, info.out_channels // info.groups
    if info.groups > 1 and (inputs % max(i, ki) or outputs % max(o, ko)):
        return f"a block of {choice} crosses the groups"
    return None


def _check_concat(op: OpNode, layout: Layout) -> str | None:
    for operand in op.operands:
        reason = _why_not(layout, operand.info)
        if reason is not None:
            return reason
    return None


def _check_resize(op: OpNode, layout: Layout) -> str | None:
    if layout == op.result.initial or layout.name in ("NCHW", "NHWC", f"NCHW{layout.block('C')}c"):
        return None
    return f"TVM cannot resize in {layout}"


def _check_split(op: OpNode, layout: Layout) -> str | None:
    for result in op.results:
        reason = _why_not(layout, result)
        if reason is not None:
            return reason
    return None


def _check_reduction(op: OpNode, layout: Layout) -> str | None:
    info = op.operands[0].info
    reduced = {info.axes[a % len(info.axes)] for a in op.attrs["axis"] or range(len(info.axes))}
    if reduced & set(layout.blocks):
        return f"it reduces over the blocked axis of {layout}"
    if op.attrs["keepdims"]:
        return None
    if layout.is_blocked:
        return f"its result has fewer axes, which {layout} cannot name"
    kept = [a for a in layout.primal if a not in reduced]
    return None if kept == [a for a in info.axes if a not in reduced] else f"{layout} would permute its result"


def _check_softmax(op: OpNode, layout: Layout) -> str | None:
    axis = op.result.axes[op.attrs["axis"] % len(op.result.axes)]
    return f"it runs over the blocked axis of {layout}" if axis in layout.blocks else None


def _check_pad(op: OpNode, layout: Layout) -> str | None:
    widths = op.attrs["pad_width"]
    for index, axis in enumerate(op.result.axes):
        if axis in layout.blocks and (widths[2 * index] or widths[2 * index + 1]):
            return f"it pads the blocked axis of {layout}"
    return None


def _check_slice(op: OpNode, layout: Layout) -> str | None:
    axes = {op.result.axes[a % len(op.result.axes)] for a in op.attrs["axes"]}
    return f"it slices the blocked axis of {layout}" if axes & set(layout.blocks) else None


def _check_operands(op: OpNode, layout: Layout) -> str | None:
    """Every operand can be stored as the choice wants it; bool tensors are never blocked."""
    if layout.is_blocked and "bool" in {t.dtype for t in (*op.results, *(o.info for o in op.operands))}:
        return _NO_BOOL
    for operand in op.operands:
        wanted = _follow(layout, operand.info, op)
        if wanted is not None and len(operand.info.axes) == 4:
            reason = _why_not(wanted, operand.info)
            if reason is not None:
                return reason
    return None


_CHECKS: Mapping[str, Callable[[OpNode, Layout], str | None]] = {
    kinds.CONCAT: _check_concat,
    kinds.RESIZE: _check_resize,
    kinds.SPLIT: _check_split,
    kinds.PAD: _check_pad,
    kinds.SLICE: _check_slice,
    **dict.fromkeys(kinds.REDUCTIONS, _check_reduction),
    **dict.fromkeys(kinds.SOFTMAX, _check_softmax),
}


def check_assignment(graph: LayoutGraph, assignment: Assignment) -> list[tuple[str, str]]:
    """(operator, reason) for everything in `assignment` that cannot be: unknown, missing, frozen or illegal choices."""
    problems = [(name, "there is no such operator") for name in assignment if name not in graph.by_name]
    for op in graph.ops:
        choice = assignment.get(op.name)
        if op.role is Role.FROZEN:
            if choice is not None and choice != initial_candidate(op):
                problems.append((op.name, why_illegal(op, choice) or ""))
        elif choice is None:
            problems.append((op.name, "the assignment has no choice for it"))
        else:
            reason = why_illegal(op, choice)
            if reason is not None:
                problems.append((op.name, reason))
    return problems


def initial_assignment(graph: LayoutGraph) -> dict[str, Candidate]:
    """Every operator in its original layouts."""
    return {op.name: initial_candidate(op) for op in graph.ops if op.role is not Role.FROZEN}


def made_layouts(graph: LayoutGraph, assignment: Assignment, border: Border = ORIGINAL) -> dict[str, Layout | None]:
    """The layout every tensor is made in; None for scalars."""
    made: dict[str, Layout | None] = {t.name: border.of_input(t) for t in graph.inputs}
    for op in graph.ops:
        layouts = result_layouts(op, assignment.get(op.name))
        made.update({t.name: layout for t, layout in zip(op.results, layouts, strict=True)})
    return made


def transforms_of(
    graph: LayoutGraph, assignment: Mapping[str, Candidate], border: Border = ORIGINAL
) -> list[tuple[str, Layout, Layout]]:
    """(tensor, from, to) of every transform the assignment needs, each once; model outputs want the border's layout.

    Constants are folded and do not count.
    """
    made = made_layouts(graph, assignment, border)
    needed: dict[tuple[str, Layout], tuple[str, Layout, Layout]] = {}

    def want(tensor: str | None, layout: Layout | None) -> None:
        have = made[tensor] if tensor is not None else None
        if tensor is not None and layout is not None and have is not None and layout != have:
            needed.setdefault((tensor, layout), (tensor, have, layout))

    for op in graph.ops:
        for operand, layout in zip(op.operands, operand_layouts(op, assignment.get(op.name)), strict=True):
            want(operand.tensor, layout)
    for position, output in enumerate(graph.outputs):
        want(output.tensor, border.of_output(position, output))
    return list(needed.values())
