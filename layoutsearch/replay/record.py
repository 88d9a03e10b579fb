"""Record a full table on a live device: every candidate, its schedule tries, every transform, whole assignments.

Every measurement goes to a record store first, so that a recording that was killed goes on where it was, and a store of
`tune` is a head start.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layoutsearch.errors import DeviceError, LayoutSearchError
from layoutsearch.measure.builder import Builder
from layoutsearch.measure.calibrate import profile_for
from layoutsearch.measure.device import Device
from layoutsearch.measure.records import ModelRecord, RecordStore
from layoutsearch.model.samples import sample_inputs
from layoutsearch.plan.apply import target_json
from layoutsearch.replay.assignments import Labeled, different_assignments
from layoutsearch.replay.builds import BuildTimes, TimedBuilder
from layoutsearch.replay.collect import WholeLabel, collect, whole_records
from layoutsearch.replay.table import Table
from layoutsearch.replay.values import RecordedWhole, TableError
from layoutsearch.search.assemble import Program, build_program
from layoutsearch.search.budget import Budget
from layoutsearch.search.export import PlanContext, make_plan
from layoutsearch.search.kernels import KernelLab
from layoutsearch.search.known import Request
from layoutsearch.search.reference import reference_key
from layoutsearch.search.reporter import Reporter, Silent
from layoutsearch.search.setup import ModelSetup, set_up, template_versions
from layoutsearch.search.whole import WholeLab
from layoutsearch.targets import default_threads
from layoutsearch.toolchain import require_toolchain

# Tries before all of them, so that a recording that is stopped early knows a little of everything.
_FIRST_TRIES = 2
# As `tune` does: so many of the fastest schedules of each candidate this close to its workload's fastest, again.
_REFINED, _REFINE_WITHIN, _REFINE_SAMPLES = 2, 1.15, 21
_REFINE_PASSES = 4
_SPARE = 1.25
# Libraries and constants that may lie on the device side by side.
_GROUP_BYTES = 2 << 30
_GROUP_MODELS = 8


@dataclass(frozen=True)
class RecordOptions:
    """What `bench record` was asked for.

    Attributes:
        out: the table to write.
        records: record store; beside the run folders of `tune` by default, so that its records are reused.
        tries: schedules of each candidate.
        assignments: different ones that are timed whole.
        transforms: whether to measure every transform, or those only that the assignments use.
    """

    out: Path
    shapes: dict[str, tuple[int, ...]] | None = None
    target: Any = None
    space: str | None = None
    threads: int | None = None
    records: Path | None = None
    tries: int = 24
    assignments: int = 32
    transforms: bool = True
    rounds: int = 24
    starts: int = 4
    seed: int = 0
    rpc: str | None = None
    device_key: str | None = None


def record_table(model: str, options: RecordOptions, reporter: Reporter | None = None) -> Table:
    """Measure whatever the record store does not hold yet, then write the table.

    Raises:
        LayoutSearchError: the model cannot be loaded, no device answers, or a kernel runs in no layout.
    """
    reporter = reporter or Silent()
    if bool(options.rpc) != bool(options.device_key):
        raise LayoutSearchError("--rpc HOST:PORT and --device-key KEY go together; give both or neither")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="layoutsearch-")))
        reporter.stage("load", 1)
        setup = set_up(model, folder, options.shapes, options.target, options.space)
        require_toolchain(setup.target)
        if not setup.anchors:
            raise LayoutSearchError(f"{setup.loaded.name} has no layout to choose; there is nothing to record")
        reporter.step(f"{setup.loaded.name}: {len(setup.anchors)} layout-sensitive ops")
        path = options.records or Path("results") / setup.loaded.name / "records.sqlite"
        store = stack.enter_context(RecordStore(path))
        device = stack.enter_context(_device(options))
        device.check_target(setup.target)
        workers = max(1, min(8, default_threads()))
        builds = BuildTimes(store.path.with_suffix(".builds.jsonl"))
        builder = stack.enter_context(TimedBuilder(builds, setup.skeleton, workers))
        table = _Recorder(setup, options, device, builder, builds, store, folder, reporter).run()
    table.save(options.out)
    return table


def _device(options: RecordOptions) -> AbstractContextManager[Device]:
    threads = options.threads or default_threads()
    if options.rpc:
        return Device.remote(options.rpc, str(options.device_key), threads)
    return Device.local(threads)


class _Recorder:
    def __init__(
        self,
        setup: ModelSetup,
        options: RecordOptions,
        device: Device,
        builder: Builder,
        builds: BuildTimes,
        store: RecordStore,
        folder: Path,
        reporter: Reporter,
    ) -> None:
        self._setup, self._options, self._reporter = setup, options, reporter
        self._store, self._skeleton = store, setup.skeleton
        self._identity = device.identity()
        if not device.places_operands:
            raise DeviceError(
                f"the server of device {self._identity.key!r} cannot place operands as a model does, and its numbers "
                "would not compare; run python -m layoutsearch.measure.server of this version on the device"
            )
        reporter.stage("device", 1)
        self._profile = profile_for(device, setup.target, lambda text: reporter.step(text, 0))
        if self._profile.is_doubtful:
            reporter.note("the device was busy when it was calibrated, and searches will not use its limits: run "
                          "layoutsearch device calibrate when it is idle, then record again")  # fmt: skip
        self._context = setup.context(self._identity, template_versions())
        self._builds = builds
        budget = Budget()
        target = target_json(setup.target)
        self._lab = KernelLab(device, builder, store, self._context, target, folder, budget, reporter)
        samples = [sample_inputs(setup.loaded.inputs, seed) for seed in range(2)]
        key = reference_key(setup.loaded, setup.fingerprint, samples)
        reference = (store.path.with_suffix(".reference.npz"), key)
        self._whole = WholeLab(device, builder, setup.source, samples, reference, folder, budget, reporter)
        self._plans = PlanContext(setup.loaded, setup.graph, setup.fingerprint, setup.target, self._identity)

    def run(self) -> Table:
        keys = list(dict.fromkeys(self._skeleton.keys.values())) if self._options.transforms else []
        self._reporter.stage("transforms", len(keys))
        self._lab.measure_transforms(keys)
        self._kernels()
        self._refine()
        self._reporter.stage("transforms, again", len(keys))
        self._lab.measure_transforms_again(keys)
        program = build_program(self._skeleton, self._lab)
        self._assignments(program)
        table = self._collect([])
        wholes = [replace(whole, schedules=self._unusual(table, whole)) for whole in self._timed(program)]
        return replace(table, wholes=tuple(wholes))

    def _candidates(self) -> list[Request]:
        found: dict[tuple[str, str], Request] = {}
        for node in self._skeleton.nodes:
            for choice in node.choices:
                found.setdefault((node.workload.key, str(choice)), Request(node.workload, choice, 0))
        return list(found.values())

    def _kernels(self) -> None:
        for tries in sorted({min(_FIRST_TRIES, self._options.tries), self._options.tries}):
            requests = [replace(request, tries=tries) for request in self._candidates()]
            self._reporter.stage(f"kernels, up to {tries} tries", len(requests))
            self._lab.measure(requests)

    def _refine(self) -> None:
        """The fastest schedules again: those that are fastest only until they are measured well lead to others.

        And what has one schedule only: where something disturbed it, no other one would tell.
        """
        for _ in range(_REFINE_PASSES):
            best: dict[str, float] = {}
            for request in self._candidates():
                us = self._lab.of(request.workload, request.choice).best_us
                best[request.workload.key] = min(us, best.get(request.workload.key, us))
            requests = [
                replace(request, tries=_REFINED)
                for request in self._candidates()
                if self._lab.of(request.workload, request.choice).best_us <= _REFINE_WITHIN * best[request.workload.key]
                or self._is_alone(request)
            ]
            before = self._lab.measured
            self._reporter.stage("kernels, again", len(requests))
            self._lab.refine(requests, _REFINE_SAMPLES)
            if self._lab.measured == before:
                break

    def _is_alone(self, request: Request) -> bool:
        known = self._lab.of(request.workload, request.choice)
        return sum(measurement.ok for measurement in known.tries.values()) == 1

    def _assignments(self, program: Program) -> None:
        """Time whole assignments, group by group, until there are enough."""
        options = self._options
        spare = max(1, round(options.assignments * _SPARE))
        chosen = different_assignments(
            self._skeleton, program.problem, self._setup.layouts, self._setup.anchors, spare, options.seed
        )
        optimum, size = chosen[0], self._group_size()
        failed: set[tuple[int, ...]] = set()
        while True:
            records = self._timed(program)
            timed = {whole.solution for whole in records}
            left = [pair for pair in chosen if pair[1] not in timed | failed]
            wanted = options.assignments - len(timed)
            if wanted <= 0 or not left:
                break
            # The optimum is in every group: groups are compared through it.
            others = wanted - (optimum in left)
            members = [optimum] if optimum[1] not in failed else []
            members += [pair for pair in left if pair != optimum][: min(size - 1, others)]
            group = 1 + max((whole.group for whole in records), default=-1)
            done = self._time_group(program, group, members)
            failed |= {solution for _, solution in members} - done
        if len(timed) < options.assignments:
            self._reporter.note(f"{len(timed)} whole assignments, {options.assignments} were asked for: no more differ")

    def _time_group(self, program: Program, group: int, members: Sequence[Labeled]) -> set[tuple[int, ...]]:
        """Build, validate and time assignments together; those that came through."""
        options = self._options
        names = {f"{number + 1} {label}": solution for number, (label, solution) in enumerate(members)}
        self._lab.measure_transforms([key for _, solution in members for key in program.transforms(solution)])
        program = build_program(self._skeleton, self._lab)
        self._reporter.stage(f"whole models, group {group + 1}", len(names) + options.rounds)
        plans = {name: make_plan(self._plans, program, solution, self._lab) for name, solution in names.items()}
        built = self._whole.build(plans)
        if not built:
            return set()
        samples = self._whole.time(built, options.rounds, options.seed + group, options.starts)
        for each in built.values():
            Path(each.path).unlink(missing_ok=True)
        labels = dict(zip(names, (label for label, _ in members), strict=True))
        recorded = {
            str(WholeLabel(group, options.starts, labels[name], names[name], self._digest(names[name]))): values
            for name, values in samples.items()
        }
        if recorded:
            self._store.add_models(ModelRecord(self._context, self._setup.fingerprint, recorded))
        return {names[name] for name in samples}

    def _timed(self, program: Program) -> list[RecordedWhole]:
        """Whole assignments that the store holds, built with the schedules that are the fastest now."""
        records = self._store.models(self._context, self._setup.fingerprint)
        return whole_records(records, self._digest, self._builds.plan_s, len(program.nodes))

    def _schedules(self, solution: Sequence[int]) -> list[str]:
        """The fastest schedule of each kernel; empty where none was measured."""
        found = []
        for node, index in zip(self._skeleton.nodes, solution, strict=True):
            best = self._lab.of(node.workload, node.choices[index]).best
            found.append(best[0] if best else "")
        return found

    def _digest(self, solution: Sequence[int]) -> str:
        return hashlib.sha256("\n".join(self._schedules(solution)).encode()).hexdigest()[:12]

    def _unusual(self, table: Table, whole: RecordedWhole) -> tuple[tuple[int, str], ...]:
        """Schedules that rounding made the second of two equally fast ones."""
        found = []
        for index, schedule in enumerate(self._schedules(whole.solution)):
            node = table.skeleton.nodes[index]
            best = table.of(node.workload, node.choices[whole.solution[index]]).best
            if best is not None and best[0] != schedule:
                found.append((index, schedule))
        return tuple(found)

    def _collect(self, wholes: Sequence[RecordedWhole]) -> Table:
        table = collect(
            self._setup,
            self._identity,
            self._profile.to_json(),
            self._store,
            self._context,
            self._builds,
            wholes,
            str(self._options.out),
        )
        for workload, choice in table.candidates:
            if not table.of(workload, choice).tries and not table.of(workload, choice).reason:
                raise TableError(f"{workload.summary} as {choice} was not measured; run the same command again")
        return table

    def _group_size(self) -> int:
        weights = sum(node.workload.facts.weight_bytes * count for node, count in self._skeleton.workloads.values())
        # A library holds the constants, and loading it makes a copy.
        return max(2, min(_GROUP_MODELS, _GROUP_BYTES // max(1, 2 * weights)))
