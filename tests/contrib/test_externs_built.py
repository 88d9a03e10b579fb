"""External functions on the whole way: measured, compiled, checked, by a code generator of a user's and by oneDNN's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

import layoutsearch
from layoutsearch.errors import MaterializeError, ModelError
from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidates import enumerate_candidates
from layoutsearch.layout.declare import is_external
from layoutsearch.layout.space import load_space
from layoutsearch.materialize.codegen import IMPORT, inlined
from layoutsearch.materialize.externs import rewritten
from layoutsearch.model import canonicalize
from layoutsearch.model.samples import sample_inputs
from layoutsearch.plan.apply import apply_plan, target_json, vm_pipeline
from layoutsearch.plan.prove import prove_scheduled
from layoutsearch.search.jobs import KernelJob, build_kernels
from layoutsearch.search.workloads import kernel_nodes
from tests.contrib.made_codegen import partition
from tests.contrib.onednn import needs_onednn
from tests.materialize.test_externs import B8, B16, beside_a_convolution, chain
from tests.models.interpreter import interpret
from tests.models.nets import Net, build
from tests.models.plans import SPACE, make_plan
from tests.models.running import native_target, range_error


def by_made(body: Callable[..., relax.Expr]) -> tvm.IRModule:
    return partition(build((1, 16, 11, 14), body=body), lambda i: B8 if i else [B16, B8])


def by_onednn(body: Callable[..., relax.Expr]) -> tvm.IRModule:
    from layoutsearch.contrib.onednn import codegen

    return layoutsearch.declare_layouts(codegen.partition(build((1, 16, 11, 14), body=body)), codegen.declaration)


def undeclared_onednn(body: Callable[..., relax.Expr]) -> tvm.IRModule:
    """Only the activations are declared: weights are packed in every call."""
    from layoutsearch.contrib.onednn import codegen

    return layoutsearch.declare_layouts(codegen.partition(build((1, 16, 11, 14), body=body)), lambda f: B16)


GENERATORS = [
    by_made,
    pytest.param(by_onednn, marks=needs_onednn),
    pytest.param(undeclared_onednn, marks=needs_onednn),
]


@pytest.fixture(autouse=True)
def _imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IMPORT, "tests.contrib.made_codegen")


@pytest.mark.parametrize(
    ("generator", "body"),
    [
        (by_made, chain),
        (by_made, beside_a_convolution),
        pytest.param(by_onednn, chain, marks=needs_onednn),
        pytest.param(by_onednn, beside_a_convolution, marks=needs_onednn),
        pytest.param(undeclared_onednn, chain, marks=needs_onednn),
    ],
)
def test_a_plan_compiles_and_computes_the_same(
    generator: Callable[..., tvm.IRModule], body: Callable[..., relax.Expr], tmp_path: Path
) -> None:
    module, target = generator(body), native_target()
    plan = make_plan(module, target, seed=1)
    library = tmp_path / "model.so"
    layoutsearch.compile(module, plan, output=library)
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
    x = sample_inputs(layoutsearch.load(module).inputs, 0)
    (want,) = interpret(inlined(module), x)
    assert range_error(machine["main"](tvm.runtime.tensor(x[0])).numpy(), want) < 5e-5


@pytest.mark.parametrize("generator", GENERATORS)
def test_a_pass_leaves_functions_for_the_users_own_codegen(generator: Callable[..., tvm.IRModule]) -> None:
    module, target = generator(chain), native_target()
    plan = make_plan(module, target, seed=1)
    applied = layoutsearch.ApplyPlan(plan)(module)
    external = [f for _, f in applied.functions_items() if f.attrs is not None and "Codegen" in f.attrs]
    assert [len(f.params[0].ty.shape.values) for f in external] == [
        len(op.choice.data.axes) for op in plan.ops if op.kind == "extern" and op.choice is not None
    ]
    layoutsearch.materialize.codegen.require_generators({str(external[0].attrs["Codegen"])})  # type: ignore[attr-defined]
    made = relax.transform.RunCodegen()(applied)
    assert len(made.attrs["external_mods"]) >= 1


@pytest.mark.parametrize("generator", GENERATORS)
def test_every_choice_is_built_like_a_kernel(generator: Callable[..., tvm.IRModule], tmp_path: Path) -> None:
    """As the search does it: the function alone, in a worker, from plain data."""
    canonical = canonicalize(generator(chain))
    graph = build_graph(canonical)
    target = target_json(native_target())
    nodes = kernel_nodes(canonical, graph, enumerate_candidates(graph, load_space(SPACE)))
    externs = [n for n in nodes if n.root.startswith("extern")]
    assert len(externs) == 2
    assert externs[0].workload.key != externs[1].workload.key
    for choice in externs[0].choices:
        output = str(tmp_path / f"{choice}.so")
        workload = externs[0].workload
        job = KernelJob(workload.module_json, workload.axes, 1, str(choice), target, 2, (), 4, output)
        built = build_kernels(job)
        assert (len(built.schedules), built.exhausted, built.failed) == (1, True, ())
        assert choice is not None
        assert len(built.args[0][0]) == len(choice.data.axes)
        arrays = [tvm.runtime.tensor(np.zeros(shape, dtype)) for shape, dtype in built.args]
        tvm.runtime.load_module(output)["kernel_0"](*arrays)
        again = build_kernels(replace(job, known=built.schedules))
        assert (again.schedules, again.exhausted) == ((), True)


def test_without_its_code_generator_a_model_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = by_made(chain)
    for gv, function in module.functions_items():
        if gv.name_hint != "main":
            module.update_func(gv, function.with_attr("Codegen", "nobody"))
    plan = make_plan(module, native_target(), seed=1)
    with pytest.raises(ModelError, match=rf"no code generator relax.ext.nobody .* {IMPORT}") as caught:
        layoutsearch.compile(module, plan, output=tmp_path / "model.so")
    assert "\n" not in str(caught.value)
    monkeypatch.setenv(IMPORT, "no_such_module")
    with pytest.raises(ModelError, match="no_such_module, which cannot be imported"):
        layoutsearch.compile(module, plan, output=tmp_path / "model.so")


def test_check_and_compile_of_the_command_line(tmp_path: Path) -> None:
    """In processes of their own, which know the code generator by the environment alone."""
    module = by_made(chain)
    model, plan = tmp_path / "model.json", tmp_path / "plan.json"
    model.write_text(tvm.ir.save_json(module))
    make_plan(module, native_target(), seed=1).save(plan)
    command = [sys.executable, "-m", "layoutsearch", "check", str(model), "--plan", str(plan), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"ok": true' in done.stdout


@needs_onednn
def test_an_unconverted_function_is_as_it_was_written() -> None:
    """RunCodegen without this project: the code generator is any other."""
    made: Any = relax.transform.RunCodegen()(by_onednn(chain))
    assert len(made.attrs["external_mods"]) == 1


@needs_onednn
def test_a_sum_has_to_be_declared_like_the_result(tmp_path: Path) -> None:
    module = undeclared_onednn(beside_a_convolution)
    plan = make_plan(module, native_target(), seed=1)
    with pytest.raises(ModelError, match="parameter 2 is not declared NCHW16c as the result is"):
        layoutsearch.compile(module, plan, output=tmp_path / "model.so")


def test_calls_of_functions_are_proven_like_kernels() -> None:
    """The second of two reads what the first has read, of the same shape: that is not in the plan."""
    module, target = partition(build((1, 16, 11, 14), body=same_shape), lambda _: B16), native_target()
    applied = apply_plan(module, make_plan(module, target, seed=1))
    names = [g.name_hint for g, f in applied.module.functions_items() if is_external(f)]
    assert sum(c.function in names for c in applied.proven.calls) == 2
    with target:
        vm_pipeline(proven=applied.proven)(applied.module)
    first, second = (b for b in bindings(applied.module) if isinstance(b.value.op, tvm.ir.GlobalVar))
    wrong = relax.Call(second.value.op, [first.value.args[0], *second.value.args[1:]])
    swapped = rewritten(applied.module, lambda name, value: wrong if name == second.var.name else value)
    with pytest.raises(MaterializeError, match=r"operand 0 is .* the plan has"):
        prove_scheduled(swapped, applied.proven)
    with target, pytest.raises(MaterializeError):
        vm_pipeline(proven=applied.proven)(swapped)


def same_shape(n: Net, x: relax.Expr) -> relax.Expr:
    return n.conv_relu(n.conv_relu(x, 16), 16)


def bindings(module: tvm.IRModule) -> list[relax.Binding]:
    return [b for block in module["main"].body.blocks for b in block.bindings if isinstance(b.value, relax.Call)]
