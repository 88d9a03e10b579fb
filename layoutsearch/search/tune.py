"""The whole run: measure kernels, solve, time the best assignments whole, export what won."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tvm

from layoutsearch.errors import LayoutSearchError
from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidates import enumerate_candidates, uniform_layouts
from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.layout.space import SearchSpace, builtin_space, load_space
from layoutsearch.layout.unmatched import unmatched_rules
from layoutsearch.measure.builder import Builder
from layoutsearch.measure.device import Device
from layoutsearch.measure.records import ModelRecord, RecordContext, RecordStore
from layoutsearch.model.canonicalize import canonicalize
from layoutsearch.model.fingerprint import fingerprint
from layoutsearch.model.load import LoadedModel, load
from layoutsearch.model.samples import sample_inputs
from layoutsearch.plan.apply import target_json
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.schedule.value import TEMPLATES
from layoutsearch.search.acceptance import compare
from layoutsearch.search.assemble import Program, build_program, uniform_solution
from layoutsearch.search.budget import Budget
from layoutsearch.search.diverse import best_assignments
from layoutsearch.search.export import PlanContext, Verdict, make_plan, validated
from layoutsearch.search.jobs import file_stamp
from layoutsearch.search.kernels import KernelLab, Request, TransformKey
from layoutsearch.search.problem import NoAssignmentError
from layoutsearch.search.reporter import NoteKeeper, Reporter, Silent
from layoutsearch.search.runfile import RunFile
from layoutsearch.search.solve import solve
from layoutsearch.search.whole import Built, ModelSource, WholeLab
from layoutsearch.search.workloads import KernelNode, kernel_nodes
from layoutsearch.targets import as_target, default_threads, has_feature
from layoutsearch.toolchain import require_toolchain

# Schedules tried of every candidate at first, then of the contenders in further rounds.
_FIRST_TRIES = 2
_ROUNDS = (4, 8, 16, 24)
# A candidate contends while its kernel is within this factor of the workload's fastest.
_CONTENDER = 1.2
# At the end so many schedules of each candidate this close are timed again, with so many samples.
_REFINED = 2
_REFINE_WITHIN = 1.15
_REFINE_SAMPLES = 21
# Workloads that make up this share of the model's time are worth further tries.
_SHARE = 0.97
_TRANSFORM_ROUNDS = 12
_SIEVE_ROUNDS = 12
_FINAL_ROUNDS = 40
_DEFAULT_TRIALS = 4
_PLAN = "plan.json"


@dataclass(frozen=True)
class TuneResult:
    """What a run came to.

    Attributes:
        plan: the best validated plan, None if the run was stopped before there was one.
        path: where it lies.
        seconds: how long the run took.
        interrupted: whether the user stopped it.
        kernels_measured: kernels that were timed in this run (those from records not counted).
        note: one line for people.
        failures: how many kernels failed in this run, by status.
        notes: what went wrong on the way, a line each.
    """

    plan: LayoutPlan | None
    path: Path
    seconds: float
    interrupted: bool
    kernels_measured: int
    note: str
    failures: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The object that `tune --json` prints."""
        plan = self.plan
        validation = plan.validation if plan else {}

        def median(name: str) -> float | None:
            summary = validation.get(name)
            return summary["median"] if summary else None

        return {
            "plan": str(self.path) if plan else None,
            "baseline_us": median("baseline_us"),
            "plan_us": median("plan_us"),
            "speedup": validation.get("speedup"),
            "speedup_ci": validation.get("speedup_ci"),
            "predicted_us": plan.objective["predicted_us"] if plan else None,
            "transforms": len(plan.transforms) if plan else None,
            "ops": len(plan.ops) if plan else None,
            "accepted": bool(validation.get("accepted", False)),
            "seconds": round(self.seconds, 1),
            "kernels_measured": self.kernels_measured,
            "interrupted": self.interrupted,
            "note": self.note,
            "failures": dict(self.failures),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class TuneOptions:
    """How to tune; every field has the command line's default."""

    shapes: Mapping[str, Sequence[int]] | None = None
    target: tvm.target.Target | str | dict[str, Any] | None = None
    threads: int | None = None
    space: str | os.PathLike[str] | SearchSpace | None = None
    trials: int = _DEFAULT_TRIALS
    time_budget_s: float | None = None
    rpc: str | None = None
    device_key: str | None = None
    out: str | os.PathLike[str] | None = None
    records: str | os.PathLike[str] | None = None
    resume: bool = False
    seed: int = 0
    inputs: Sequence[Sequence[np.ndarray]] | None = None


def run_tune(
    model: Any, options: TuneOptions, reporter: Reporter | None = None, budget: Budget | None = None
) -> TuneResult:
    """Tune `model`; see `layoutsearch.tune`."""
    return _Run(model, options, reporter or Silent(), budget or Budget(options.time_budget_s)).run()


class _Run:
    def __init__(self, model: Any, options: TuneOptions, reporter: Reporter, budget: Budget) -> None:
        self.model, self.options, self.budget = model, options, budget
        self.reporter = NoteKeeper(reporter)
        require_toolchain()
        self.threads = options.threads or default_threads()
        self.target = as_target(options.target)
        if options.trials < 1:
            raise LayoutSearchError(f"--trials {options.trials}: at least one assignment has to be timed")
        if bool(options.rpc) != bool(options.device_key):
            raise LayoutSearchError("--rpc HOST:PORT and --device-key KEY go together; give both or neither")

    def run(self) -> TuneResult:
        self.reporter.stage("load", 1)
        self.loaded: LoadedModel = (
            self.model if isinstance(self.model, LoadedModel) else load(self.model, self.options.shapes)
        )
        canonical = canonicalize(self.loaded.module)
        self.graph: LayoutGraph = build_graph(canonical)
        self.out = Path(self.options.out or Path("results") / self.loaded.name)
        self.path = self.out / _PLAN
        space = _space(self.options.space, self.target)
        if self.options.space is not None:
            for line in unmatched_rules(space, self.graph):
                self.reporter.note(line)
        spaces = enumerate_candidates(self.graph, space)
        self.fingerprint = fingerprint(canonical)
        self.run_file = RunFile(
            self.out / "run.json", self.fingerprint, target_json(self.target), self.threads, self.options.device_key
        )
        self.run_file.begin(self.options.resume)
        self.nodes: tuple[KernelNode, ...] = kernel_nodes(canonical, self.graph, spaces)
        self.layouts = uniform_layouts([spaces[op.name] for op in self.graph.anchors])
        self.reporter.step(f"{self.loaded.name}: {len(self.graph.anchors)} layout-sensitive ops")
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="layoutsearch-")))
            device = stack.enter_context(self._device())
            builder = stack.enter_context(
                Builder(workers=max(1, min(8, default_threads())), preload=("layoutsearch.search.jobs",))
            )
            records = self.options.records or self.out / "records.sqlite"
            store = stack.enter_context(RecordStore(Path(records)))
            identity = device.identity()
            context = RecordContext(
                target=json.dumps(target_json(self.target), sort_keys=True),
                device=identity.key,
                cpu=identity.cpu,
                threads=self.threads,
                tvm=tvm.__version__,
                template=template_versions(),
            )
            self.context = PlanContext(self.loaded, self.graph, self.fingerprint, self.target, identity)
            self.lab = KernelLab(
                device, builder, store, context, target_json(self.target), folder, self.budget, self.reporter
            )
            samples = self.options.inputs or [sample_inputs(self.loaded.inputs, s) for s in range(2)]
            self.whole = WholeLab(device, builder, self._source(folder), samples, folder, self.budget, self.reporter)
            self.store, self.record_context = store, context
            return self._search()

    def _search(self) -> TuneResult:
        if not self.graph.anchors:
            return self._nothing_to_choose()
        reserve = 0.0
        self._first_round()
        best: LayoutPlan | None = None
        if not self.budget.interrupted:
            started = time.monotonic()
            best = self._first_plan()
            reserve = 15.0 + 3.0 * (time.monotonic() - started)
        self._further_rounds(reserve)
        self._refine(reserve)
        if not self.budget.interrupted:
            best = self._decide() or best
        kept = f"what was measured is kept in {self.store.path}"
        if best is None and not self.budget.interrupted:
            why = self.reporter.notes[-1] if self.reporter.notes else "no whole model was built"
            raise LayoutSearchError(f"no plan could be validated: {why}; {kept}")
        self.run_file.finish(self.budget.interrupted)
        return self._result(best, _note(best) if best else f"stopped before a plan was validated; {kept}")

    def _result(self, plan: LayoutPlan | None, note: str) -> TuneResult:
        return TuneResult(
            plan,
            self.path,
            self.budget.elapsed_s,
            self.budget.interrupted,
            self.lab.measured,
            note,
            self.lab.failures,
            tuple(self.reporter.notes),
        )

    def _first_round(self) -> None:
        requests = self._requests(_FIRST_TRIES, everything=True)
        self.reporter.stage("kernels, first tries", len(requests))
        self.lab.measure(requests)

    def _further_rounds(self, reserve_s: float) -> None:
        for tries in _ROUNDS:
            if self.budget.over(reserve_s):
                return
            requests = self._requests(tries, everything=False)
            self.reporter.stage(f"kernels, up to {tries} tries", len(requests))
            self.lab.measure(requests, reserve_s)

    def _refine(self, reserve_s: float) -> None:
        """Time the fastest schedules of the contenders again, with more samples."""
        if self.budget.over(reserve_s):
            return
        requests = [replace(r, tries=_REFINED) for r in self._contenders(_REFINE_WITHIN, everything=False)]
        self.reporter.stage("kernels, again", len(requests))
        self.lab.refine(requests, _REFINE_SAMPLES, reserve_s)

    def _requests(self, tries: int, everything: bool) -> list[Request]:
        """Contenders that have had fewer than `tries` tries and may have more."""
        found = []
        for request in self._contenders(_CONTENDER, everything):
            known = self.lab.of(request.workload, request.choice)
            if not known.closed and len(known.tries) < tries:
                found.append(replace(request, tries=tries))
        return found

    def _contenders(self, within: float, everything: bool) -> list[Request]:
        """One request per workload and candidate that is within a factor of the workload's fastest (or all).

        Only workloads that make up nearly all of the model's time, unless `everything`; costly ones first.
        """
        unique = {node.workload.key: node for node in self.nodes}
        shares = dict.fromkeys(unique, 0.0)
        for node in self.nodes:
            shares[node.workload.key] += min(self.lab.of(node.workload, c).best_us for c in node.choices)
        matters = set(unique) if everything else _largest(shares, _SHARE)
        found: list[tuple[float, Request]] = []
        for key in matters:
            node = unique[key]
            times = {choice: self.lab.of(node.workload, choice).best_us for choice in node.choices}
            fastest = min(times.values())
            importance = shares[key] if shares[key] < float("inf") else 0.0
            found += [
                (-importance, Request(node.workload, choice, 0))
                for choice in node.choices
                if everything or times[choice] <= within * fastest
            ]
        return [r for _, r in sorted(found, key=lambda pair: (pair[0], pair[1].workload.key))]

    def _uniform(self, program: Program) -> list[tuple[str, tuple[int, ...], float]]:
        """Uniform assignments by predicted time: (name, solution, microseconds)."""
        found: list[tuple[str, tuple[int, ...], float]] = []
        for layout in self.layouts:
            solution = uniform_solution(self.nodes, program.problem, layout)
            if solution is not None:
                total = program.problem.evaluate(solution).total
                if total < float("inf") and solution not in [s for _, s, _ in found]:
                    found.append((str(layout), solution, total))
        return sorted(found, key=lambda item: item[2])

    def _first_plan(self) -> LayoutPlan | None:
        """A validated uniform plan on disk early, so that a run that is stopped leaves something to use."""
        program = build_program(self.graph, self.nodes, self.lab)
        uniform = self._uniform(program)
        if not uniform:
            raise LayoutSearchError(self._no_kernels(program))
        name, solution, _ = uniform[0]
        self.reporter.stage("first plan", 2)
        plan = make_plan(self.context, program, solution, self.lab, uniform=solution, uniform_name=name)
        built = self.whole.build({f"uniform {name}": plan})
        if not built:
            return None
        (only,) = built.values()
        plan = validated(plan, Verdict(f"uniform {name}", (), (), None, only.max_rel_error, False))
        Path(only.path).unlink(missing_ok=True)
        plan.save(self.path)
        self.reporter.best(f"uniform {name} validated")
        return plan

    def _no_kernels(self, program: Program) -> str:
        for node, costs in zip(self.nodes, program.problem.nodes, strict=True):
            if min(costs.costs) == float("inf"):
                known = self.lab.of(node.workload, node.choices[0])
                failed = next((m for m in known.tries.values() if not m.ok), None)
                why = known.reason or (failed.error if failed else "") or "no time was left to measure it"
                return f"no candidate of {node.workload.summary} could be measured: {why}"
        return "no uniform assignment could be measured; give a longer --time-budget"

    def _solve(self) -> tuple[Program, float, list[tuple[int, ...]]]:
        """Measure the transforms that the best assignments use until they use measured ones only."""
        self.reporter.stage("transforms", _TRANSFORM_ROUNDS)
        changing = [i for i, n in enumerate(self.nodes) if self.graph.by_name[n.root] in self.graph.anchors]
        for attempt in range(_TRANSFORM_ROUNDS):
            program = build_program(self.graph, self.nodes, self.lab)
            solutions = [s for _, s, _ in self._uniform(program)[:2]]
            best = solve(program.problem, time_limit_s=20.0)
            others = best_assignments(
                program.problem, self.options.trials, min_changes=3, changing=changing, time_limit_s=20.0
            )
            found = list(dict.fromkeys([best.assignment, *(s.assignment for s in others)]))[: self.options.trials]
            used: list[TransformKey] = [k for s in [*found, *solutions] for k in program.transforms(s)]
            unknown = [k for k in used if not (self.lab.transform(k).tries or self.lab.transform(k).closed)]
            self.reporter.step(f"{len(unknown)} transforms to measure")
            if not unknown or attempt == _TRANSFORM_ROUNDS - 1:
                break
            self.lab.measure_transforms(unknown)
            if self.budget.interrupted:
                break
        return program, best.lower_bound, found

    def _decide(self) -> LayoutPlan | None:
        try:
            program, bound, solutions = self._solve()
        except NoAssignmentError as error:
            self.reporter.note(str(error))
            return None
        uniform = self._uniform(program)[:2]
        name, reference, _ = uniform[0]
        plans = {
            f"uniform {n}": make_plan(self.context, program, s, self.lab, uniform=s, uniform_name=n)
            for n, s, _ in uniform
        }
        known = {s for _, s, _ in uniform}
        for number, solution in enumerate(s for s in solutions if s not in known):
            plans[f"assignment {number + 1}"] = make_plan(
                self.context, program, solution, self.lab, uniform=reference, uniform_name=name, lower_bound_us=bound
            )
        self.reporter.stage("whole models", len(plans) + _SIEVE_ROUNDS + _FINAL_ROUNDS)
        built = self.whole.build(plans)
        uniforms = [label for label in plans if label.startswith("uniform") and label in built]
        if not uniforms or self.budget.interrupted:
            return None
        sieve = self.whole.time(built, _SIEVE_ROUNDS, self.options.seed)
        self._record(sieve)
        baseline = min((u for u in uniforms if u in sieve), key=lambda u: float(np.median(sieve[u])))
        contenders = [label for label in sieve if label not in uniforms]
        if not contenders:
            return self._export_baseline(plans[baseline], baseline, sieve[baseline], built[baseline])
        challenger = min(contenders, key=lambda c: float(np.median(sieve[c])))
        self.reporter.best(f"{challenger}: {np.median(sieve[challenger]) / 1e3:.3f} ms against {baseline}")
        pair = {label: built[label] for label in (baseline, challenger)}
        final = self.whole.time(pair, _FINAL_ROUNDS, self.options.seed + 1)
        self._record(final)
        if len(final) < 2:
            return self._export_baseline(plans[baseline], baseline, sieve[baseline], built[baseline])
        comparison = compare(final[baseline], final[challenger], seed=self.options.seed)
        if not comparison.accepted:
            return self._export_baseline(plans[baseline], baseline, final[baseline], built[baseline])
        verdict = Verdict(
            baseline, final[baseline], final[challenger], comparison, built[challenger].max_rel_error, True
        )
        plan = validated(plans[challenger], verdict)
        plan.save(self.path)
        return plan

    def _export_baseline(self, plan: LayoutPlan, name: str, samples: tuple[float, ...], built: Built) -> LayoutPlan:
        plan = validated(plan, Verdict(name, samples, samples, None, built.max_rel_error, False))
        plan.save(self.path)
        return plan

    def _record(self, samples: Mapping[str, tuple[float, ...]]) -> None:
        self.store.add_models(ModelRecord(self.record_context, self.fingerprint, samples))

    def _nothing_to_choose(self) -> TuneResult:
        program = build_program(self.graph, (), self.lab)
        plan = make_plan(self.context, program, (), self.lab)
        built = self.whole.build({"original": plan})
        if not built:
            why = self.reporter.notes[-1]
            raise LayoutSearchError(f"{self.loaded.name} has no layout to choose, and does not build as it is: {why}")
        plan = validated(plan, Verdict("original", (), (), None, built["original"].max_rel_error, False))
        plan.save(self.path)
        self.run_file.finish(False)
        note = "nothing to choose: the model has no convolution, pooling or resize that is free; the plan is empty"
        return self._result(plan, note)

    def _device(self) -> Any:
        if self.options.rpc:
            return Device.remote(self.options.rpc, str(self.options.device_key), self.threads)
        return Device.local(self.threads)

    def _source(self, folder: Path) -> ModelSource:
        shapes = tuple((i.name, tuple(i.shape)) for i in self.loaded.inputs)
        if isinstance(self.model, (str, os.PathLike)):
            path = str(Path(self.model).resolve())
            return ModelSource(path, False, file_stamp(path), shapes)
        if isinstance(self.model, onnx.ModelProto):
            path = str(folder / "model.onnx")
            onnx.save(self.model, path)
            return ModelSource(path, False, file_stamp(path), shapes)
        path = str(folder / "model.json")
        Path(path).write_text(tvm.ir.save_json(self.loaded.module), encoding="utf-8")
        return ModelSource(path, True, file_stamp(path), shapes)


def _largest(shares: Mapping[str, float], part: float) -> set[str]:
    """Keys of the largest shares that together make up `part` of the finite sum."""
    finite = {k: v for k, v in shares.items() if v < float("inf")}
    left, found = part * sum(finite.values()), set()
    for key in sorted(finite, key=lambda k: -finite[k]):
        if left <= 0:
            break
        found.add(key)
        left -= finite[key]
    return found


def template_versions() -> str:
    """Versions of all schedule templates: records made with others are not used."""
    return ",".join(f"{name}{spec.version}" for name, spec in sorted(TEMPLATES.items()))


def _note(plan: LayoutPlan) -> str:
    validation = plan.validation
    if validation["accepted"]:
        low, high = validation["speedup_ci"]
        return (
            f"{validation['speedup']:.3f}x (95 % interval {low:.3f} to {high:.3f}) against {validation['baseline']}, "
            f"{len(plan.transforms)} transforms"
        )
    return f"nothing beat {validation['baseline']}; the plan is that baseline"


def _space(space: Any, target: tvm.target.Target) -> SearchSpace:
    if isinstance(space, SearchSpace):
        return space
    if space is not None:
        return load_space(space)
    return builtin_space(target.kind.name, lambda feature: has_feature(target, feature))
