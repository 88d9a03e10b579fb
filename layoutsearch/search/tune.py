"""The whole run: search for the best assignment of kernels, time the best few whole, export what won."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from layoutsearch.cost.bounds import Bounds
from layoutsearch.cost.library import LibraryError
from layoutsearch.cost.machine import Machine
from layoutsearch.errors import LayoutSearchError
from layoutsearch.layout.candidates import nearest
from layoutsearch.layout.desired import parse_desired
from layoutsearch.layout.io_layouts import IoLayouts
from layoutsearch.layout.layout import Layout
from layoutsearch.measure.records import RecordStore
from layoutsearch.model.samples import sample_inputs
from layoutsearch.plan.apply import target_json
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.search.budget import Budget
from layoutsearch.search.campaign import Campaign
from layoutsearch.search.costs_file import costs_path, save_costs
from layoutsearch.search.decide import Decision
from layoutsearch.search.export import Bound, PlanContext
from layoutsearch.search.externs import check_externs
from layoutsearch.search.final_costs import final_costs
from layoutsearch.search.finals import WholeTimes
from layoutsearch.search.gap import CONFIDENCE, SearchState
from layoutsearch.search.joining import Joining
from layoutsearch.search.known import Request
from layoutsearch.search.labs import DeviceSource, Labs, LabSource, Workplace
from layoutsearch.search.lazy import LazySearch
from layoutsearch.search.learned import Learned
from layoutsearch.search.numerics import check_limit
from layoutsearch.search.options import TuneOptions, TuneResult
from layoutsearch.search.plan_costs import CostsError
from layoutsearch.search.pool import Pool
from layoutsearch.search.problem import NoAssignmentError
from layoutsearch.search.reporter import NoteKeeper, Reporter, Silent
from layoutsearch.search.runfile import RunFile
from layoutsearch.search.setup import ModelSetup, set_up
from layoutsearch.search.sharing_out import SharingOut
from layoutsearch.search.study import SAMPLERS
from layoutsearch.search.tuners import KernelTuner
from layoutsearch.targets import as_target
from layoutsearch.toolchain import require_toolchain

# What choosing and timing the finalists takes, in seconds.
_TIMING_S = 70.0
# What is kept for the end of a run that found a plan of an earlier run, and so does not know what a build takes.
_RESERVE_S = 110.0
# Enough to build and time a few finalists, and to improve them a little, where a run is short.
_END_S = 90.0
# A kernel that moves so many times what the threads' own caches hold leaves nothing in them for the next.
_CACHED = 4.0


def run_tune(
    model: Any,
    options: TuneOptions,
    reporter: Reporter | None = None,
    budget: Budget | None = None,
    source: LabSource | None = None,
) -> TuneResult:
    """Tune `model`; see `layoutsearch.tune`. `source` takes the place of the device of the options."""
    return _Run(model, options, reporter or Silent(), budget or Budget(options.time_budget_s), source).run()


class _Run:
    def __init__(
        self, model: Any, options: TuneOptions, reporter: Reporter, budget: Budget, source: LabSource | None
    ) -> None:
        self.model, self.options, self.budget = model, options, budget
        self.reporter = NoteKeeper(reporter)
        self.source = source or DeviceSource(options.target, options.threads, options.rpc, options.device_key)
        self.target = as_target(self.source.target)
        if source is None:
            require_toolchain(self.target)
        if options.trials < 1:
            raise LayoutSearchError(f"--trials {options.trials}: at least one assignment has to be timed")
        check_limit(options.max_rel_error)
        if options.sampler not in SAMPLERS:
            raise LayoutSearchError(f"--sampler {options.sampler!r} is unknown; expected one of {', '.join(SAMPLERS)}")
        check_externs(options.externs)
        self.io_layouts = IoLayouts.parse(options.io_layout)
        if source is not None and self.io_layouts.words:
            raise LayoutSearchError("--replay has the borders it was recorded with; leave --io-layout away")
        self.tuner = KernelTuner.named(options.kernel_tuner)
        self.desired = parse_desired(options.desired_layouts)
        if self.target.kind.name != "llvm" and self.tuner is not KernelTuner.TEMPLATE:
            raise LayoutSearchError(
                f"--kernel-tuner {options.kernel_tuner} is for CPUs, not for target {self.target.kind.name}; "
                "leave it away"
            )
        if source is not None and self.tuner is not KernelTuner.TEMPLATE:
            raise LayoutSearchError("--replay has the schedules it was recorded with; leave --kernel-tuner away")

    def run(self) -> TuneResult:
        options = self.options
        self.reporter.stage("load", 1)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="layoutsearch-")))
            self.setup: ModelSetup = set_up(
                self.model,
                folder,
                options.shapes,
                self.target,
                options.space,
                options.max_rel_error,
                self.desired,
                options.externs,
                self.io_layouts,
            )
            for line in self.setup.notes:
                self.reporter.note(line)
            loaded = self.setup.loaded
            self.out = Path(options.out or Path("results") / loaded.name)
            self.reporter.step(f"{loaded.name}: {len(self.setup.anchors)} layout-sensitive ops")
            self.run_file = RunFile(
                self.out / "run.json",
                self.setup.fingerprint,
                target_json(self.target),
                self.source.threads,
                self.source.name,
                {
                    "sampler": options.sampler,
                    "seed": options.seed,
                    "trials": options.trials,
                    # None by default, as in files of before there was a choice.
                    "kernel_tuner": None if self.tuner is KernelTuner.TEMPLATE else self.tuner.value,
                    "max_rel_error": options.max_rel_error,
                    "desired_layouts": [f"{d.key}={','.join(sorted(d.values))}" for d in self.desired],
                    "io_layout": self.io_layouts.words,
                    "candidates": self.setup.assignments.digest,
                },
            )
            self.run_file.begin(options.resume)
            self.store = stack.enter_context(RecordStore(Path(options.records or self.out / "records.sqlite")))
            began = self.run_file.since(self.store.mark())
            self.resumed = began is not None
            samples = options.inputs or [sample_inputs(loaded.inputs, s) for s in range(2)]
            place = Workplace(
                folder,
                self.out,
                self.store,
                began,
                samples,
                self.budget,
                self.reporter,
                options.max_rel_error,
                self.tuner,
            )
            self.labs: Labs = stack.enter_context(self.source.open(self.setup, place))
            return self._search()

    def _search(self) -> TuneResult:
        setup, labs = self.setup, self.labs
        lab, profile = labs.lab, labs.profile
        target = TargetInfo.from_target(self.target, self.source.threads)
        learned = Learned(labs.context, profile, target, setup.fingerprint)
        context = PlanContext(
            setup.loaded,
            setup.graph,
            setup.fingerprint,
            self.target,
            labs.identity,
            setup.errors,
            setup.pins,
            setup.rules,
        )
        machine = Machine.of(profile, target)
        pool = Pool(context, setup.skeleton, setup.layouts, lab, self.budget, self.reporter)
        times = WholeTimes(self.store, labs.context, setup.fingerprint, labs.whole.weights)
        joining = None
        if labs.pairs is not None:
            joining = Joining(
                labs.pairs, setup.graph, setup.skeleton.nodes, labs.whole, times, self.budget, self.reporter
            )
        sharing = None
        if labs.parts is not None and target.threads > 1:
            cached = _CACHED * target.threads * target.l2_bytes
            sharing = SharingOut(
                labs.parts, setup.graph, setup.skeleton.nodes, lab, cached, labs.whole, times, self.budget,
                self.reporter,
            )  # fmt: skip
        self.decision = Decision(
            pool, lab, labs.whole, times, learned.correction(), machine, self.out, self.budget, self.reporter,
            [step for step in (sharing, joining) if step is not None],
        )  # fmt: skip
        if not setup.graph.anchors:
            return self._nothing_to_choose()
        incumbent = self.decision.incumbent(self.options.max_rel_error)
        best = incumbent
        reserve = self._at_most(_RESERVE_S + self.decision.improving_s)
        if best is None or self.resumed:
            # A resumed run goes the whole way again, from its records: what it knew when decides what it did next.
            self._one_layout(self._first_layout(target.lanes))
        if best is None:
            best, reserve = self._first_plan()
        if profile and profile.is_doubtful:
            self.reporter.note(
                "the device was busy when it was calibrated: no strict bound; layoutsearch device calibrate"
            )
        search = LazySearch(
            setup.skeleton,
            lab,
            learned.cost_model(),
            # Limits that were measured on a busy device may be too low, and bounds from them too high.
            Bounds(profile) if profile and not profile.is_doubtful else None,
            seed=self.options.seed,
            refit=learned.refit,
            reporter=self.reporter,
        )
        campaign = Campaign(
            setup, labs.context, search, lab, self.options.sampler, self.options.storage, self.out,
            self.options.seed, self.budget, self.reporter,
        )  # fmt: skip
        # Where a kernel fails in the first layout there is no plan yet, and nothing to reserve time for.
        state = self._explored(campaign, search, reserve if best else 0.0)
        if state and state.refuted:
            self.reporter.note(
                f"{state.refuted} kernels and transforms ran faster than the device's calibrated limits allow, which "
                "bound nothing then; run layoutsearch device calibrate while it is idle"
            )
        pool.bound = Bound(state.lower_bound_us, state.strict_bound_us, CONFIDENCE) if state else None
        if not self.budget.interrupted:
            # The first plan of a run that was stopped was never timed, and its like competes anyway.
            rival = incumbent if incumbent is not None and incumbent.validation["plan_us"] else None
            decided = self.decision.decide(self.options.trials, self.options.seed, rival, self.run_file)
            if decided is not None or (best is incumbent and not self.budget.interrupted):
                # A plan of an earlier run, where nothing builds any more, says nothing about this model.
                best = decided
            for solution, us in self.decision.timed:
                campaign.note_whole(solution, us)
        try:
            learned.keep(setup.skeleton, lab, self.decision.wholes)
        except LibraryError as error:
            # The plan is there; only other models will have less to start from.
            self.reporter.note(str(error))
        kept = f"what was measured is kept in {self.store.path}"
        if best is None and not self.budget.interrupted:
            why = self.reporter.notes[-1] if self.reporter.notes else "no whole model was built"
            raise LayoutSearchError(f"no plan could be validated: {why}; {kept}")
        if best is not None:
            try:
                costs = final_costs(context, setup.skeleton, lab, search.beliefs)
                save_costs(costs, costs_path(self.decision.path))
            except CostsError as error:
                # The plan is there; only questions about it will have no answer.
                self.reporter.note(str(error))
        self.run_file.finish(self.budget.interrupted)
        if best is None:
            return self._result(None, f"stopped before a plan was validated; {kept}")
        verdict = _verdict(best, self.decision.is_uncontested, bool(setup.pins))
        if setup.pins and not setup.assignments.parameters:
            verdict = f"the rules leave one assignment, which the plan is; {len(best.transforms)} transforms"
        return self._result(best, verdict + _pairs(best))

    def _explored(self, campaign: Campaign, search: LazySearch, reserve_s: float) -> SearchState | None:
        """Where the search ends; None if some kernel has nothing that runs, which the decision explains."""
        # An earlier run may have been through all of it with these templates; then the records hold what it found.
        about = f"{self.setup.fingerprint} {self.labs.context.template} {search.digest}"
        if self.tuner is not KernelTuner.TEMPLATE:
            about += f" {self.tuner.value}"
        if self.io_layouts.words:
            about += f" {' '.join(self.io_layouts.words)}"
        try:
            if self.resumed or not self.run_file.is_settled("kernels", about):
                campaign.run(reserve_s)
                if not self.budget.over(reserve_s):
                    self.run_file.settle("kernels", about)
            return search.state()
        except NoAssignmentError:
            return None

    def _one_layout(self, layout: Layout) -> None:
        """One try of what a uniform assignment of `layout` needs: the least that a plan can be made of."""
        requests = {}
        for node in self.setup.skeleton.nodes:
            free = [c for c in node.choices if c is not None]
            wanted = Request(node.workload, nearest(free, layout) if free else None, 1)
            requests[node.workload.key, wanted.choice] = wanted
        self.reporter.stage(f"kernels of uniform {layout}", len(requests))
        self.labs.lab.measure(list(requests.values()))

    def _first_plan(self) -> tuple[LayoutPlan | None, float]:
        """A plan on disk, if one can be made of what is measured, and the seconds to keep for the end of the run."""
        if self.budget.interrupted:
            return None, 0.0
        started = time.monotonic()
        plan = self.decision.first_plan()
        # Building and timing the finalists takes several times what the first plan took.
        wanted = _TIMING_S + 3.0 * (time.monotonic() - started - self.labs.whole.once_s) + self.decision.improving_s
        return plan, self._at_most(wanted)

    def _at_most(self, wanted_s: float) -> float:
        """Seconds to keep for the end of the run: without a search there is nothing to build and to improve."""
        left_s = self.budget.left_s
        return min(wanted_s, max(left_s / 3, min(left_s / 2, _END_S)))

    def _first_layout(self, lanes: int) -> Layout:
        """The packed layout of one vector where the space has it, else its last."""
        layouts = self.setup.layouts
        return next((lay for lay in layouts if lay.block("C") == lanes), layouts[-1])

    def _result(self, plan: LayoutPlan | None, note: str) -> TuneResult:
        return TuneResult(
            plan,
            self.decision.path,
            self.budget.elapsed_s,
            self.budget.interrupted,
            self.labs.lab.measured,
            note,
            self.labs.lab.failures,
            tuple(self.reporter.notes),
        )

    def _nothing_to_choose(self) -> TuneResult:
        plan = self.decision.empty_plan()
        if plan is None:
            why = self.reporter.notes[-1]
            name = self.setup.loaded.name
            raise LayoutSearchError(f"{name} has no layout to choose, and does not build as it is: {why}")
        self.run_file.finish(False)
        note = "nothing to choose: the model has no convolution, pooling or resize that is free; the plan is empty"
        return self._result(plan, note)


def _pairs(plan: LayoutPlan) -> str:
    return f"; {len(plan.fusions)} pairs of kernels are one kernel each" if plan.fusions else ""


def _verdict(plan: LayoutPlan, is_uncontested: bool, has_pins: bool) -> str:
    validation = plan.validation
    # A uniform layout is then the nearest to it that the rules allow.
    as_allowed = ", as near as the rules allow" if has_pins else ""
    if validation["accepted"]:
        low, high = validation["speedup_ci"]
        return (
            f"{validation['speedup']:.3f}x (95 % interval {low:.3f} to {high:.3f}) against {validation['baseline']}, "
            f"{len(plan.transforms)} transforms"
        )
    if is_uncontested:
        return (
            f"there was no time to compare anything with {validation['baseline']}, which the plan is; "
            "give a longer --time-budget"
        )
    return f"nothing beat {validation['baseline']}{as_allowed}; the plan is that baseline"
