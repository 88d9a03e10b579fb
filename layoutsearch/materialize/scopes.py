"""Memory scopes of an assignment, on a lowered module.

Every tensor gets a type with its virtual device. A function's parameters have scopes as well, so a kernel that is
called with different ones becomes one function for each; TVM's own pass specialises a shared function for its last call
only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import tvm
from tvm import relax, tirx

from layoutsearch.errors import MaterializeError
from layoutsearch.layout.candidate import Assignment, Candidate
from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.layout.scopes import GLOBAL, SCOPES, fits_texture
from layoutsearch.materialize.fuse import Kernel
from layoutsearch.materialize.lower import Lowered
from layoutsearch.materialize.verify import calls_by_name
from layoutsearch.materialize.writer import FunctionWriter, main_of, substitute

_CALL_TIR = tvm.ir.Op.get("relax.call_tir")


def put_in_scopes(
    lowered: Lowered, converted: tvm.IRModule, graph: LayoutGraph, assignment: Assignment, target: tvm.target.Target
) -> Lowered:
    """`lowered` with every kernel's result and weights in the memory scopes of `assignment`.

    The result of a kernel is in the scope of its operators, weights are in the `weight_scope` of theirs; everything
    else (inputs, layout transforms, biases) is in buffers.

    Args:
        lowered: kernels of `converted`.
        converted: the Relax module in the layouts of the assignment.
        graph: of the canonical module.
        assignment: the choices; those of operators in one kernel have one scope.
        target: has textures.

    Raises:
        MaterializeError: operators of one kernel in different scopes, weights that are not constant, equal constants in
            two scopes, or a texture that leaves the kernels.
    """
    placing = _Placing(_Choices(lowered, converted, graph, assignment), target)
    module = placing.place(lowered.module)
    kernels = tuple(Kernel(name, tuple(groups)) for name, groups in placing.groups.items() if any(groups))
    transforms = {name: len(placing.groups[name]) for name, of in placing.origin.items() if of in lowered.transforms}
    return replace(lowered, module=module, kernels=kernels, transforms=transforms)


class _Choices:
    """What the assignment says about each call of a kernel."""

    def __init__(self, lowered: Lowered, converted: tvm.IRModule, graph: LayoutGraph, assignment: Assignment) -> None:
        self._kernels = {kernel.function: kernel.groups for kernel in lowered.kernels}
        self._assignment = assignment
        self.ids = {op.name: op.id for op in graph.ops}
        self._weights = {}
        for name, call in calls_by_name(converted).items():
            if name in assignment and assignment[name].weight_scope != GLOBAL:
                self._weights[name] = call.args[1]

    def group(self, function: str, call: int) -> tuple[str, ...]:
        """The operators of call number `call` of a function, root first; empty for what is no kernel."""
        groups = self._kernels.get(function, ())
        return groups[call] if call < len(groups) else ()

    def result(self, group: Sequence[str]) -> str:
        """Scope of what the kernel makes."""
        scopes = {name: self._assignment[name].scope for name in group if name in self._assignment}
        root = next(iter(scopes), "")
        for name, scope in scopes.items():
            if scope != scopes[root]:
                raise MaterializeError(
                    f"op {self.ids[name]} has scope {scope}, but is fused behind {self.ids[root]}, which has "
                    f"{scopes[root]}; a kernel has one result, in one scope"
                )
        return scopes.get(root, GLOBAL)

    def operands(self, group: Sequence[str], args: Sequence[relax.Expr]) -> list[str | None]:
        """Scope of every argument that the kernel has as a constant; None for the others."""
        found: list[str | None] = [GLOBAL if isinstance(a, tvm.ir.GenericConst) else None for a in args]
        for name in group:
            if name not in self._weights:
                continue
            places = [i for i, arg in enumerate(args) if arg.same_as(self._weights[name]) and found[i] is not None]
            if not places:
                raise MaterializeError(
                    f"op {self.ids[name]} has weights that are not constant, which cannot be in "
                    f"{self._assignment[name].weight_scope}"
                )
            found[places[0]] = self._assignment[name].weight_scope
        return found


class _Placing:
    """Writes `main` again with scopes in its types, and the functions that it calls.

    Attributes:
        groups: operators of every call, by function.
        origin: the function that each was made from.
    """

    def __init__(self, choices: _Choices, target: tvm.target.Target) -> None:
        self._choices = choices
        self._devices = {scope: relax.VDevice(target, 0, scope) for scope in SCOPES}
        self._constants = _Constants(choices.ids)
        self._versions: dict[tuple[str, tuple[str, ...]], tvm.ir.GlobalVar] = {}
        self._calls: dict[str, int] = {}
        self._functions: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
        self.groups: dict[str, list[tuple[str, ...]]] = {}
        self.origin: dict[str, str] = {}

    def place(self, module: tvm.IRModule) -> tvm.IRModule:
        """The module in its scopes."""
        main, writer = main_of(module), FunctionWriter()
        prims = {g.name_hint: f for g, f in module.functions_items() if isinstance(f, tirx.PrimFunc)}
        params = [relax.Var(p.name, self._typed(p.ty, GLOBAL)) for p in main.params]
        env: dict[relax.Var, relax.Expr] = dict(zip(main.params, params, strict=True))
        for block in main.body.blocks:
            for binding in block.bindings:
                value = substitute(binding.value, env)
                if isinstance(value, relax.Call) and value.op.same_as(_CALL_TIR):
                    value = self._call(value, prims)
                else:
                    _refuse_textures(value, binding.var.name)
                match = binding.ty if isinstance(binding, relax.MatchCast) else None
                output = not isinstance(binding.var, relax.DataflowVar)
                env[binding.var] = writer.bind(binding.var.name, value, output=output, match=match)
            writer.end_block(isinstance(block, relax.DataflowBlock))
        result = substitute(main.body.body, env)
        _refuse_textures(result, "the model's output")
        function = writer.function(params, result, main.attrs)
        rest = {g: f for g, f in module.functions_items() if g.name_hint != "main" and not isinstance(f, tirx.PrimFunc)}
        return tvm.IRModule(
            {**rest, **self._functions, tvm.ir.GlobalVar("main"): function},
            attrs=module.attrs,
            global_infos={**module.global_infos, "vdevice": list(self._devices.values())},
        )

    def _call(self, call: relax.Call, prims: Mapping[str, tirx.PrimFunc]) -> relax.Call:
        """A call of a kernel with its result and its constants in their scopes."""
        origin = call.args[0].name_hint
        number = self._calls.get(origin, 0)
        self._calls[origin] = number + 1
        group = self._choices.group(origin, number)
        args = list(call.args[1].fields)
        for i, scope in enumerate(self._choices.operands(group, args)):
            if scope is not None:
                self._constants.claim(args[i], scope, group)
                args[i] = tvm.ir.GenericConst(args[i].value, self._typed(args[i].ty, scope))
        made = self._typed(call.ty_args[0], self._choices.result(group))
        scopes = tuple(scope_of(ty) for ty in (*(arg.ty for arg in args), *leaves_of(made)))
        gv = self._version(origin, prims[origin], scopes)
        self.groups[gv.name_hint].append(group)
        return relax.Call(call.op, [gv, relax.Tuple(args), *call.args[2:]], call.attrs, [made])

    def _version(self, origin: str, func: tirx.PrimFunc, scopes: tuple[str, ...]) -> tvm.ir.GlobalVar:
        """The function for these scopes of its parameters."""
        key = (origin, scopes)
        if key not in self._versions:
            taken = sum(name == origin for name, _ in self._versions)
            gv = tvm.ir.GlobalVar(f"{origin}_in_scopes{taken}" if taken else origin)
            func = _in_scopes(func, scopes)
            relax.expr._update_type(gv, func.ty)
            self._versions[key] = gv
            self._functions[gv] = func
            self.groups[gv.name_hint] = []
            self.origin[gv.name_hint] = origin
        return self._versions[key]

    def _typed(self, ty: relax.Type, scope: str) -> relax.Type:
        if isinstance(ty, relax.TupleType):
            return relax.TupleType([self._typed(field, scope) for field in ty.fields])
        if not isinstance(ty, relax.TensorType):
            return ty
        if ty.shape is None:
            return relax.TensorType(None, ty.dtype, self._devices[scope], ty.ndim)
        return relax.TensorType(ty.shape, ty.dtype, self._devices[scope])


@dataclass
class _Claim:
    scope: str
    op: str


class _Constants:
    """TVM's executable holds equal constants once, so they have one scope."""

    def __init__(self, ids: Mapping[str, str]) -> None:
        self._ids = ids
        self._claims: dict[bytes, _Claim] = {}

    def claim(self, constant: tvm.ir.GenericConst, scope: str, group: Sequence[str]) -> None:
        """Note the scope of a constant, or raise MaterializeError where it has another."""
        array = constant.value.numpy()
        digest = hashlib.blake2b(array.tobytes(), person=b"constant")
        digest.update(f"{array.shape} {array.dtype}".encode())
        op = self._ids.get(group[0], group[0]) if group else "the module"
        known = self._claims.setdefault(digest.digest(), _Claim(scope, op))
        if known.scope != scope:
            raise MaterializeError(
                f"op {op} has a constant in {scope} that {known.op} has in {known.scope}: equal constants are stored "
                "once, so give both operators the same weight_scope"
            )


def kernel_in_scopes(
    func: tirx.PrimFunc, lowered: Lowered, converted: tvm.IRModule, choice: Candidate
) -> tirx.PrimFunc:
    """A convolution's (or another root's) kernel to be timed alone, whose weights are a parameter.

    Its data are taken to be where its result is, if they can be there; within a model they are where their producer
    puts them.

    Args:
        func: the kernel of root `t0`.
        lowered: the module that calls it.
        converted: the same before fusion.
        choice: of the root.
    """
    root = calls_by_name(converted)["t0"]
    names = {getattr(arg, "name", ""): i for i, arg in reversed(list(enumerate(root.args)))}
    calls = calls_by_name(lowered.module).values()
    call = next(c for c in calls if c.op.same_as(_CALL_TIR) and _is_function(lowered.module, c.args[0], func))
    scopes = []
    for arg in call.args[1].fields:
        wanted = {0: choice.scope, 1: choice.weight_scope}.get(names.get(arg.name, -1), GLOBAL)
        shape = [int(s) for s in arg.ty.shape.values]
        fits = wanted != GLOBAL and fits_texture(shape, str(arg.ty.dtype), wanted)
        scopes.append(wanted if fits else GLOBAL)
    return _in_scopes(func, [*scopes, choice.scope])


def _is_function(module: tvm.IRModule, gv: tvm.ir.GlobalVar, func: tirx.PrimFunc) -> bool:
    return module[gv.name_hint].same_as(func)


def scope_of(ty: relax.Type) -> str:
    """Memory scope of a tensor by its type."""
    device = getattr(ty, "vdevice", None)
    return str(device.memory_scope) if device is not None else GLOBAL


def leaves_of(ty: relax.Type) -> list[relax.Type]:
    """Types of the tensors in a tuple, or the type itself."""
    return [leaf for field in ty.fields for leaf in leaves_of(field)] if isinstance(ty, relax.TupleType) else [ty]


def _in_scopes(func: tirx.PrimFunc, scopes: Sequence[str]) -> tirx.PrimFunc:
    """The function with parameters in other scopes; those in buffers stay as they are."""
    places = {}
    for param, scope in zip(func.params, scopes, strict=False):
        if scope != GLOBAL:
            places[param] = tirx.decl_buffer(list(param.ty.shape), str(param.ty.dtype), param.name, scope=scope)
    return func.specialize(places) if places else func


def _refuse_textures(expr: relax.Expr, what: str) -> None:
    """Textures are for kernels: what else reads one, or returns it, would take it for a buffer."""
    parts = [expr]
    if isinstance(expr, relax.Call):
        parts = list(expr.args)
    elif isinstance(expr, relax.TupleGetItem):
        parts = [expr.tuple_value]
    for part in parts:
        fields = part.fields if isinstance(part, relax.Tuple) else [part]
        for ty in (leaf for field in fields for leaf in leaves_of(field.ty)):
            if scope_of(ty) != GLOBAL:
                name = getattr(part, "name", "a tensor")
                raise MaterializeError(f"{what} reads {name} in {scope_of(ty)}; only kernels read textures")
