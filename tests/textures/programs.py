"""Plans, and what they compile to, as programs for PoCL."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from layoutsearch.layout.scopes import GLOBAL, Texture
from layoutsearch.materialize.scopes import scope_of
from layoutsearch.plan.compile import build_executable
from layoutsearch.schedule.builder import buffer_loads, stored_buffers
from tests.textures.pocl import Launch, Place, Program

TARGET = tvm.target.Target("qcom/adreno-opencl-texture")
_KERNEL = re.compile(r"^__kernel void (\w+)\(([^)]*)\) \{", re.MULTILINE)


def opencl_sources(executable: Any) -> dict[str, str]:
    """OpenCL C of every kernel of an executable, by name, each complete."""
    found: dict[str, str] = {}

    def visit(module: Any) -> None:
        if module.kind == "opencl":
            for part in module.inspect_source().split("// Function: ")[1:]:
                name, _, text = part.partition("\n")
                found[name.strip()] = re.sub(r"^__kernel void [^{]*\);$", "", text, flags=re.MULTILINE)
        for imported in module.imports:
            visit(imported)

    visit(executable.mod)
    return found


def parameters(source: str) -> list[tuple[str, str]]:
    """(name without `_ptr`, declaration) of a kernel's parameters, in order."""
    match = _KERNEL.search(source)
    assert match is not None, source
    declared = [p.strip() for p in match.group(2).split(",")]
    return [(re.sub(r"_ptr$", "", p.split()[-1]), p) for p in declared]


def program_of(module: tvm.IRModule, inputs: Sequence[np.ndarray]) -> Program:
    """What `main` of a scheduled module does, by the source that it is built to."""
    sources = opencl_sources(build_executable(module, TARGET))
    builder = _Builder(module, sources)
    return builder.program(inputs)


def _leaves(name: Any) -> list[str]:
    return [leaf for field in name for leaf in _leaves(field)] if isinstance(name, list) else [name]


class _Builder:
    def __init__(self, module: tvm.IRModule, sources: Mapping[str, str]) -> None:
        self.main, self.sources = module["main"], sources
        self.functions = {g.name_hint: f for g, f in module.functions_items() if isinstance(f, tirx.PrimFunc)}
        self.places: dict[str, Place] = {}
        self.given: dict[str, np.ndarray] = {}
        self.launches: list[Launch] = []
        self.names: dict[relax.Var, Any] = {}

    def program(self, inputs: Sequence[np.ndarray]) -> Program:
        for param, array in zip(self.main.params, inputs, strict=True):
            self.names[param] = self.place(param.ty)
            self.given[self.names[param]] = array
        for block in self.main.body.blocks:
            for binding in block.bindings:
                self.names[binding.var] = self.bind(binding.value)
        outputs = _leaves(self.bind(self.main.body.body))
        return Program(self.places, self.given, tuple(self.launches), tuple(outputs))

    def bind(self, value: relax.Expr) -> Any:
        """Name of the tensor that a value is, or a list for a tuple; a kernel is launched."""
        if isinstance(value, relax.Var):
            return self.names[value]
        if isinstance(value, relax.Tuple):
            return [self.bind(field) for field in value.fields]
        if isinstance(value, relax.TupleGetItem):
            return self.bind(value.tuple_value)[value.index]
        assert value.op.name == "relax.call_tir", value
        made = value.ty_args[0]
        result = [self.place(ty) for ty in made.fields] if isinstance(made, relax.TupleType) else self.place(made)
        args = [self.operand(a) for a in value.args[1].fields] + _leaves(result)
        self.launch(value.args[0].name_hint, args)
        return result

    def operand(self, expr: relax.Expr) -> str:
        if isinstance(expr, relax.Var):
            return self.names[expr]
        name = self.place(expr.ty)
        self.given[name] = expr.value.numpy()
        return name

    def place(self, ty: relax.TensorType) -> str:
        return self.put([int(s) for s in ty.shape.values], str(ty.dtype), scope_of(ty))

    def put(self, shape: Sequence[int], dtype: str, scope: str) -> str:
        texture = Texture.of(shape, scope) if scope != GLOBAL else None
        texels = (texture.width, texture.height, texture.depth) if texture is not None else None
        name = f"t{len(self.places)}"
        self.places[name] = Place(tuple(shape), dtype, texels)
        return name

    def launch(self, function: str, args: Sequence[str]) -> None:
        """Every loop nest of a function is a kernel; what is between them lies in buffers."""
        func = self.functions[function]
        tensors = dict(zip(func.params, args, strict=True))
        root = func.body.block
        for buffer in root.alloc_buffers:
            if buffer.scope() == GLOBAL:
                tensors[buffer] = self.put([int(s) for s in buffer.shape], str(buffer.dtype), GLOBAL)
        nests = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
        for i, nest in enumerate(nests):
            name = f"{function}_kernel" + (f"_{i}" if i else "")
            source = self.sources[name]
            used = {*stored_buffers(nest), *(load.source for load in buffer_loads(nest))} & set(tensors)
            named = {buffer.name: tensors[buffer] for buffer in used}
            assert len(named) == len(used), "two buffers of a kernel have one name"
            taken = tuple(named[p] for p, _ in parameters(source))
            self.launches.append(Launch(name, source, taken, int(nest.extent), int(nest.body.extent)))
