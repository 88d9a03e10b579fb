"""The whole run: measure kernels, solve, time the best assignments whole, export what won."""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import onnx
import tvm

from layoutsearch.errors import LayoutSearchError
from layoutsearch.layout.build import build_graph
from layoutsearch.layout.candidates import enumerate_candidates, uniform_layouts
from layoutsearch.layout.graph import LayoutGraph
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.space import SearchSpace, builtin_space, load_space
from layoutsearch.layout.unmatched import unmatched_rules
from layoutsearch.measure.builder import Builder
from layoutsearch.measure.device import Device
from layoutsearch.measure.operand_state import PREPARE, PROTOCOL
from layoutsearch.measure.records import RecordContext, RecordStore
from layoutsearch.model.canonicalize import canonicalize
from layoutsearch.model.fingerprint import fingerprint
from layoutsearch.model.load import LoadedModel, load
from layoutsearch.model.samples import sample_inputs
from layoutsearch.plan.apply import target_json
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.value import TEMPLATES
from layoutsearch.search.budget import Budget
from layoutsearch.search.decide import Decision
from layoutsearch.search.export import PlanContext
from layoutsearch.search.jobs import file_stamp
from layoutsearch.search.kernels import KernelLab
from layoutsearch.search.options import TuneOptions, TuneResult
from layoutsearch.search.reference import reference_key
from layoutsearch.search.reporter import NoteKeeper, Reporter, Silent
from layoutsearch.search.rounds import KernelRounds
from layoutsearch.search.runfile import RunFile
from layoutsearch.search.whole import ModelSource, WholeLab
from layoutsearch.search.workloads import KernelNode, kernel_nodes
from layoutsearch.targets import as_target, default_threads, has_feature
from layoutsearch.toolchain import require_toolchain

# What timing the finalists takes, in seconds.
_TIMING_S = 15.0
# What is kept for the end of a run that found a plan of an earlier run, and so does not know what a build takes.
_RESERVE_S = 60.0


def run_tune(
    model: Any, options: TuneOptions, reporter: Reporter | None = None, budget: Budget | None = None
) -> TuneResult:
    """Tune `model`; see `layoutsearch.tune`."""
    return _Run(model, options, reporter or Silent(), budget or Budget(options.time_budget_s)).run()


class _Run:
    def __init__(self, model: Any, options: TuneOptions, reporter: Reporter, budget: Budget) -> None:
        self.model, self.options, self.budget = model, options, budget
        self.reporter = NoteKeeper(reporter)
        self.threads = options.threads or default_threads()
        self.target = as_target(options.target)
        require_toolchain(self.target)
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
        space = _space(self.options.space, self.target)
        if self.options.space is not None:
            for line in unmatched_rules(space, self.graph):
                self.reporter.note(line)
        spaces = enumerate_candidates(self.graph, space)
        self.fingerprint = fingerprint(canonical)
        self.templates = template_versions()
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
            if not device.has_function(PREPARE):
                # Other numbers than those of our server: never read as the same.
                self.templates += " flush-all"
                self.reporter.note(
                    "the device's server cannot place operands as a model does, so all but one are cold and kernels "
                    "look slower; python -m layoutsearch.measure.server on the device can"
                )
            context = RecordContext(
                target=json.dumps(target_json(self.target), sort_keys=True),
                device=identity.key,
                cpu=identity.cpu,
                threads=self.threads,
                tvm=tvm.__version__,
                template=self.templates,
            )
            self.lab = KernelLab(
                device, builder, store, context, target_json(self.target), folder, self.budget, self.reporter
            )
            samples = self.options.inputs or [sample_inputs(self.loaded.inputs, s) for s in range(2)]
            key = reference_key(self.loaded, self.fingerprint, samples)
            reference = (self.out / "reference.npz", key)
            whole = WholeLab(
                device, builder, self._source(folder), samples, reference, folder, self.budget, self.reporter
            )
            self.store = store
            self.decision = Decision(
                PlanContext(self.loaded, self.graph, self.fingerprint, self.target, identity),
                self.nodes,
                self.layouts,
                self.lab,
                whole,
                store,
                context,
                self.out,
                self.budget,
                self.reporter,
            )
            return self._search()

    def _search(self) -> TuneResult:
        if not self.graph.anchors:
            return self._nothing_to_choose()
        rounds = KernelRounds(self.nodes, self.lab, self.budget, self.reporter)
        incumbent = self.decision.incumbent()
        best, reserve = incumbent, _RESERVE_S
        if best is None:
            rounds.one_layout(self._first_layout())
            best, reserve = self._first_plan()
        # Where a kernel fails in the first layout there is no plan yet, and nothing to reserve time for.
        rounds.everything(reserve if best else 0.0)
        if best is None:
            best, reserve = self._first_plan()
        # An earlier run may have been through all rounds with these templates; then the records hold what it found.
        about = f"{rounds.digest()} {self.templates}"
        if not self.run_file.is_settled("kernels", about):
            rounds.contenders(reserve)
            if not self.budget.over(reserve):
                self.run_file.settle("kernels", about)
        if not self.budget.interrupted:
            best = self.decision.decide(self.options.trials, self.options.seed, incumbent, self.run_file) or best
        kept = f"what was measured is kept in {self.store.path}"
        if best is None and not self.budget.interrupted:
            why = self.reporter.notes[-1] if self.reporter.notes else "no whole model was built"
            raise LayoutSearchError(f"no plan could be validated: {why}; {kept}")
        self.run_file.finish(self.budget.interrupted)
        return self._result(best, _note(best) if best else f"stopped before a plan was validated; {kept}")

    def _first_plan(self) -> tuple[LayoutPlan | None, float]:
        """A plan on disk, if one can be made of what is measured, and the seconds to keep for the end of the run."""
        if self.budget.interrupted:
            return None, 0.0
        started = time.monotonic()
        plan = self.decision.first_plan()
        # Building and timing the finalists takes several times what the first plan took.
        return plan, _TIMING_S + 3.0 * (time.monotonic() - started)

    def _first_layout(self) -> Layout:
        """The packed layout of one vector where the space has it, else its last."""
        lanes = TargetInfo.from_target(self.target, self.threads).lanes
        return next((lay for lay in self.layouts if lay.block("C") == lanes), self.layouts[-1])

    def _result(self, plan: LayoutPlan | None, note: str) -> TuneResult:
        return TuneResult(
            plan,
            self.decision.path,
            self.budget.elapsed_s,
            self.budget.interrupted,
            self.lab.measured,
            note,
            self.lab.failures,
            tuple(self.reporter.notes),
        )

    def _nothing_to_choose(self) -> TuneResult:
        plan = self.decision.empty_plan()
        if plan is None:
            why = self.reporter.notes[-1]
            raise LayoutSearchError(f"{self.loaded.name} has no layout to choose, and does not build as it is: {why}")
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


def template_versions() -> str:
    """Versions of all schedule templates and of the way kernels are timed: records made with others are not used."""
    return ",".join(f"{name}{spec.version}" for name, spec in sorted(TEMPLATES.items())) + f" {PROTOCOL}"


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
