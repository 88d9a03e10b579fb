"""Pairs of kernels that become one, as a plan lists them: two calls in `main` turn into one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import relax, tirx
from tvm_ffi import structural_walk

from layoutsearch.errors import PlanError
from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.materialize.fuse import Kernel
from layoutsearch.materialize.lower import Lowered
from layoutsearch.materialize.writer import FunctionWriter, main_of, with_main
from layoutsearch.plan.plan import PlanFusion
from layoutsearch.schedule import pair
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.value import Schedule, ScheduleError

_CALL_TIR = "relax.call_tir"


@dataclass(frozen=True)
class Join:
    """A kernel that was two.

    Attributes:
        function: its name.
        first, second: bound variables of the operators in each of the two, root first.
        reads: which operand of the second was the result of the first; the one kernel reads what the first read, then
            what the second read but for that.
    """

    function: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    reads: int


@dataclass(frozen=True)
class _Call:
    """A call of a kernel in `main`."""

    binding: relax.VarBinding
    group: tuple[str, ...]

    @property
    def function(self) -> tvm.ir.GlobalVar:
        return self.binding.value.args[0]

    @property
    def operands(self) -> list[relax.Expr]:
        return list(self.binding.value.args[1].fields)


def join_pairs(
    lowered: Lowered, fusions: Sequence[PlanFusion], graph: LayoutGraph, target: TargetInfo
) -> tuple[Lowered, tuple[Join, ...]]:
    """Make one scheduled kernel of each pair of a plan, with the operators of both in the table of kernels.

    Raises:
        PlanError: the two cannot be one; the message names the operators.
    """
    if not fusions:
        return lowered, ()
    work = _Joining(lowered, graph, target)
    for fusion in fusions:
        work.join(fusion)
    return work.result(), tuple(work.joins)


class _Joining:
    def __init__(self, lowered: Lowered, graph: LayoutGraph, target: TargetInfo) -> None:
        self._lowered, self._target = lowered, target
        self._names = {op.id: op.name for op in graph.ops}
        self._main = main_of(lowered.module)
        self._calls = {call.group[0]: call for call in _calls(lowered)}
        self._readers = _readers(self._main)
        self._made: dict[tuple[str, str, Schedule], tvm.ir.GlobalVar] = {}
        self._functions: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
        self._gone: set[str] = set()
        self._replaced: dict[str, relax.Call] = {}
        self.joins: list[Join] = []

    def join(self, fusion: PlanFusion) -> None:
        first, second = self._call(fusion.first), self._call(fusion.second)
        var = first.binding.var
        positions = [i for i, operand in enumerate(second.operands) if operand.same_as(var)]
        why = ""
        if len(positions) != 1:
            why = f"the kernel of {fusion.second} does not read what {fusion.first} makes, as it is and once"
        elif self._readers[var.name] != 1 or not isinstance(var, relax.DataflowVar):
            why = f"what {fusion.first} makes is read elsewhere too"
        if why:
            raise _refused(fusion, why)
        try:
            gv, reads = self._kernel(first, second, fusion.schedule)
        except ScheduleError as error:
            raise _refused(fusion, str(error)) from None
        if reads != positions[0]:
            raise _refused(fusion, f"{fusion.first} does not make the data of {fusion.second}")
        operands = [*first.operands, *(o for i, o in enumerate(second.operands) if i != reads)]
        self._gone.add(var.name)
        self._replaced[second.binding.var.name] = relax.call_tir(gv, relax.Tuple(operands), second.binding.var.ty)
        self.joins.append(Join(gv.name_hint, first.group, second.group, reads))
        for call in (first, second):
            del self._calls[call.group[0]]

    def _call(self, op_id: str) -> _Call:
        name = self._names.get(op_id)
        if name is None:
            raise PlanError(f"the plan joins op {op_id} with another, the model has no such op; tune again")
        if name not in self._calls:
            raise PlanError(
                f"the plan joins op {op_id} with another, but it is not the root of a kernel of its own; tune again"
            )
        return self._calls[name]

    def _kernel(self, first: _Call, second: _Call, schedule: Schedule) -> tuple[tvm.ir.GlobalVar, int]:
        """The one kernel, made once for equal pairs; and which operand of the second is between them."""
        both = pair.Pair.of(*(self._lowered.module[call.function] for call in (first, second)))
        key = (first.function.name_hint, second.function.name_hint, schedule)
        if key not in self._made:
            gv = tvm.ir.GlobalVar(f"pair_{len(self._made)}_{second.function.name_hint}")
            params = [*first.operands, *(o for i, o in enumerate(second.operands) if i != both.reads)]
            out = second.binding.var.ty
            relax.expr._update_type(gv, relax.FuncType([*(p.ty for p in params), out], relax.TupleType([]), False))
            self._functions[gv] = pair.apply(both, schedule, self._target)
            self._made[key] = gv
        return self._made[key], both.reads

    def result(self) -> Lowered:
        """The module and its table."""
        builder, writer = relax.BlockBuilder(), FunctionWriter()
        for block in self._main.body.blocks:
            for binding in block.bindings:
                call = self._replaced.get(binding.var.name)
                if binding.var.name not in self._gone:
                    writer.keep(binding if call is None else relax.VarBinding(binding.var, builder.normalize(call)))
            writer.end_block(isinstance(block, relax.DataflowBlock))
        module = with_main(
            self._lowered.module, writer.function(self._main.params, self._main.body.body, self._main.attrs)
        )
        for gv, function in self._functions.items():
            module[gv] = function
        joined = {join.first[0] for join in self.joins} | {join.second[0] for join in self.joins}
        kernels = [
            Kernel(kernel.function, tuple(group for group in kernel.groups if group[0] not in joined))
            for kernel in self._lowered.kernels
        ]
        unused = {kernel.function for kernel in kernels if not kernel.groups}
        for gv in [g for g in module.functions if g.name_hint in unused]:
            del module[gv]
        by_function: dict[str, list[tuple[str, ...]]] = {}
        order = {binding.var.name: i for i, binding in enumerate(_bindings(self._main))}
        for join in sorted(self.joins, key=lambda j: order[j.second[-1]]):
            by_function.setdefault(join.function, []).append((*join.first, *join.second))
        pairs = [Kernel(function, tuple(groups)) for function, groups in by_function.items()]
        left = (kernel for kernel in kernels if kernel.groups)
        return Lowered(module, (*left, *pairs), self._lowered.transforms, frozenset(by_function))


def _refused(fusion: PlanFusion, why: str) -> PlanError:
    return PlanError(f"ops {fusion.first} and {fusion.second} cannot become one kernel: {why}; tune again")


def _bindings(main: relax.Function) -> list[relax.Binding]:
    return [binding for block in main.body.blocks for binding in block.bindings]


def _calls(lowered: Lowered) -> list[_Call]:
    """Calls of kernels with the operators of each: the table has them in the order of the calls."""
    groups = {kernel.function: kernel.groups for kernel in lowered.kernels}
    seen: Counter[str] = Counter()
    found = []
    for binding in _bindings(main_of(lowered.module)):
        value = binding.value
        is_call = isinstance(value, relax.Call) and getattr(value.op, "name", "") == _CALL_TIR
        if not is_call or not isinstance(value.args[1], relax.Tuple):
            continue
        name = value.args[0].name_hint
        number = seen[name]
        seen[name] += 1
        if number < len(groups.get(name, ())):
            found.append(_Call(binding, groups[name][number]))
    return found


def _readers(main: relax.Function) -> Counter[str]:
    """How often each variable is read, by bindings and as a result."""
    found: Counter[str] = Counter()

    def visit(var: relax.Var) -> None:
        found[var.name] += 1

    for binding in _bindings(main):
        structural_walk(binding.value, (relax.Var, visit))
    structural_walk(main.body.body, (relax.Var, visit))
    return found
