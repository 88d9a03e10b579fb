"""Rules in a whole run: what is pinned stays pinned, and what `explain --pin` predicted is what a pinned run finds."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from layoutsearch.errors import LayoutSearchError, SpaceError
from layoutsearch.layout.desired import parse_desired
from layoutsearch.measure.profile import HOME_VARIABLE
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.replay.clock import SimulatedBudget
from layoutsearch.replay.session import ReplaySource
from layoutsearch.replay.table import Table
from layoutsearch.search.costs_file import costs_path, load_costs, save_costs
from layoutsearch.search.options import TuneOptions, TuneResult
from layoutsearch.search.plan_costs import CostsError
from layoutsearch.search.setup import ModelSetup, set_up
from layoutsearch.search.tune import run_tune
from layoutsearch.search.what_if import OPTION, WhatIf, what_if
from tests.cli.running import call, last_json, refused
from tests.replay.made import made_table, model_files, model_setup

Capture = pytest.CaptureFixture[str]
PACKED, PLAIN = "NCHW8c,OIHW8i8o,NCHW8c", "NCHW,OIHW,NCHW"
PIN = "nn.conv2d_pointwise=NCHW8c"


def run(folder: Path, table: Table, out: Path, *wanted: str, resume: bool = False) -> TuneResult:
    model, space = model_files(folder)
    options = TuneOptions(space=space, desired_layouts=wanted, trials=2, out=out, time_budget_s=36000.0, resume=resume)
    return run_tune(model, options, budget=SimulatedBudget(36000.0), source=ReplaySource(table))


def pinned_table(folder: Path, table: Table, *wanted: str) -> Table:
    """What a run with these rules would have recorded: the same times of fewer candidates."""
    model, space = model_files(folder)
    skeleton = set_up(model, folder, space=space, desired=parse_desired(wanted)).skeleton
    texts = {node.workload.key: {str(c) for c in node.choices} for node, _ in skeleton.workloads.values()}
    kernels = tuple(k for k in table.kernels if k.candidate in texts[k.workload])
    keys = {(key.workload, key.candidate) for key in skeleton.keys.values()}
    transforms = tuple(t for t in table.transforms if (t.workload, t.candidate) in keys)

    def left(solution: tuple[int, ...]) -> tuple[int, ...]:
        chosen = [node.choices[i] for node, i in zip(table.skeleton.nodes, solution, strict=True)]
        pairs = zip(skeleton.nodes, chosen, strict=True)
        return tuple(node.choices.index(c) if c in node.choices else 0 for node, c in pairs)

    wholes = tuple(replace(whole, solution=left(whole.solution)) for whole in table.wholes)
    return replace(table, skeleton=skeleton, kernels=kernels, transforms=transforms, wholes=wholes)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOME_VARIABLE, str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def free(folder: Path, table: Table, home: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """plan.json of a run without rules."""
    out = tmp_path_factory.mktemp("free")
    assert run(folder, table, out).plan is not None
    return out / "plan.json"


def asked(plan: Path, *pins: str) -> WhatIf:
    return what_if(LayoutPlan.load(plan), load_costs(costs_path(plan)), parse_desired(pins, OPTION))


def test_the_costs_beside_a_plan_are_those_it_was_predicted_with(free: Path) -> None:
    nothing = asked(free)
    plan = LayoutPlan.load(free)
    assert nothing.before_us == pytest.approx(plan.objective["predicted_us"], abs=0.01)
    assert nothing.after_us == nothing.best_us <= nothing.before_us
    assert nothing.transforms[0] == len(plan.transforms)


POINTWISE = [f"conv2d_pointwise_{i}" for i in range(5)]
# Pins, and the layout that they leave each kernel, by one of its operators.
PINS: list[tuple[list[str], dict[str, str]]] = [
    ([PIN], dict.fromkeys(POINTWISE, "NCHW8c")),
    (["default=NCHW8c"], dict.fromkeys([*POINTWISE, "conv2d_0", "conv2d_1"], "NCHW8c")),
    (["nn.conv2d=NCHW", PIN], {**dict.fromkeys(POINTWISE, "NCHW8c"), "conv2d_0": "NCHW", "conv2d_1": "NCHW"}),
    (["conv2d_1=NCHW8c"], {"conv2d_1": "NCHW8c"}),
    (["relu_0=NCHW8c"], {"relu_0": "NCHW8c"}),
    (["conv2d_?=NCHW", "conv2d_0=NCHW8c"], {"conv2d_0": "NCHW8c", "conv2d_1": "NCHW"}),
]


@pytest.mark.parametrize(("pins", "wanted"), PINS)
def test_what_if_is_the_best_of_all_assignments_with_the_pins(
    free: Path, pins: list[str], wanted: dict[str, str]
) -> None:
    """By brute force, and its parts add up."""
    costs, found = load_costs(costs_path(free)), asked(free, *pins)
    kernel = {member.name: i for i, node in enumerate(costs.nodes) for member in node.members}
    outs = [[text.split(",")[-1] for text in node.choices] for node in costs.nodes]
    totals = [
        costs.problem.evaluate(solution).total
        for solution in itertools.product(*(range(len(node.choices)) for node in costs.nodes))
        if all(outs[kernel[name]][solution[kernel[name]]] == layout for name, layout in wanted.items())
    ]
    assert found.after_us == pytest.approx(min(totals))
    change = sum(k.after_cost.us - k.before_cost.us for k in found.kernels)
    change += sum(t.cost.us for t in found.added) - sum(t.cost.us for t in found.removed)
    assert found.after_us - found.before_us == pytest.approx(change)
    assert found.transforms[1] - found.transforms[0] == len(found.added) - len(found.removed)


def test_a_run_with_the_rule_finds_what_was_predicted(
    folder: Path, setup: ModelSetup, home: object, tmp_path: Path
) -> None:
    """One schedule of each candidate runs, so that two searches differ only in what they time again."""
    table = made_table(setup, tries=2, seed=3)
    assert run(folder, table, tmp_path / "free").plan is not None
    result = run(folder, pinned_table(folder, table, PIN), tmp_path / "pinned", PIN)
    assert result.plan is not None
    pointwise = [op for op in result.plan.ops if op.kind == "conv2d_pointwise"]
    assert len(pointwise) == 5
    assert all(str(op.choice) == PACKED and op.why.startswith(f"pinned by --desired-layout {PIN}") for op in pointwise)
    predicted, found = asked(tmp_path / "free" / "plan.json", PIN), asked(tmp_path / "pinned" / "plan.json")
    assert found.best_us == pytest.approx(predicted.after_us, rel=0.05)
    assert found.assignment == predicted.assignment
    assert found.transforms[1] == predicted.transforms[1]


def test_rules_that_leave_one_assignment(folder: Path, table: Table, home: object, tmp_path: Path) -> None:
    result = run(folder, pinned_table(folder, table, "nn.conv2d=NCHW8c"), tmp_path, "nn.conv2d=NCHW8c")
    assert result.plan is not None
    assert {str(op.choice) for op in result.plan.ops if op.kind.startswith("conv2d")} == {PACKED}
    assert result.note == f"the rules leave one assignment, which the plan is; {len(result.plan.transforms)} transforms"


def test_a_plan_of_an_earlier_run_does_not_go_round_the_rules(
    folder: Path, table: Table, home: object, tmp_path: Path
) -> None:
    first = run(folder, table, tmp_path).plan
    assert first is not None
    has = {str(op.choice) for op in first.ops if op.kind.startswith("conv2d")}
    rule = "nn.conv2d=NCHW" if has != {PLAIN} else "nn.conv2d=NCHW8c"
    second = run(folder, pinned_table(folder, table, rule), tmp_path, rule).plan
    assert second is not None
    wanted = PLAIN if rule.endswith("=NCHW") else PACKED
    assert {str(op.choice) for op in second.ops if op.kind.startswith("conv2d")} == {wanted}


def test_a_run_with_other_rules_is_another_run(folder: Path, table: Table, home: object, tmp_path: Path) -> None:
    rule = "nn.conv2d=NCHW8c"
    pinned = pinned_table(folder, table, rule)
    before = run(folder, pinned, tmp_path, rule).plan
    again = run(folder, pinned, tmp_path, "relax.nn.conv2d=NCHW8c", resume=True).plan
    assert before is not None
    assert again is not None
    assert before.ops == again.ops
    for other in ((), ("nn.conv2d=NCHW",), (rule, "default=NCHW8c")):
        with pytest.raises(LayoutSearchError, match=r"--resume: .* has desired_layouts") as caught:
            run(folder, table, tmp_path, *other, resume=True)
        assert "\n" not in str(caught.value)


def test_pins_that_leave_one_candidate_tell_studies_apart(folder: Path) -> None:
    """Kernels with one candidate are no parameters of the study, but what it is of depends on them."""
    model, space = model_files(folder)
    digests = {
        set_up(model, folder, space=space, desired=parse_desired(wanted)).assignments.digest
        for wanted in ([], ["nn.conv2d=NCHW"], ["nn.conv2d=NCHW8c"])
    }
    assert len(digests) == 3
    assert model_setup(folder).assignments.pinned == ()


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        (["conv9=NCHW"], "--pin conv9=NCHW: the plan has no op 'conv9'; the nearest is conv2d_"),
        (["conv2d_0=NHWC"], r"conv2d_0=NHWC: conv2d:\w+:0 had no such candidate in the run of this plan, but NCHW,"),
        (["conv2d_0=NCHW7c"], "had no such candidate"),
        (["conv2d_0=NCHW", "conv2d_0=NCHW8c"], "--pin conv2d_0=NCHW and --pin conv2d_0=NCHW8c contradict each other"),
        (["conv2d_0=NCHW", "relu_1=NCHW8c"], "--pin relu_1=NCHW8c: relu"),
        (["conv2d_0"], "--pin 'conv2d_0': expected KEY=LAYOUT"),
    ],
)  # fmt: skip
def test_pins_that_cannot_be(free: Path, pins: list[str], message: str) -> None:
    with pytest.raises(SpaceError, match=message) as caught:
        asked(free, *pins)
    assert "\n" not in str(caught.value)


def test_what_failed_cannot_be_pinned(free: Path) -> None:
    costs = load_costs(costs_path(free))
    node = costs.nodes[2]
    bad = tuple(
        replace(c, us=math.inf) if text == PACKED else c for text, c in zip(node.choices, node.costs, strict=True)
    )
    nodes = (*costs.nodes[:2], replace(node, costs=bad), *costs.nodes[3:])
    plan = LayoutPlan.load(free)
    with pytest.raises(SpaceError, match=f"did not run as {PACKED} when it was measured"):
        what_if(plan, replace(costs, nodes=nodes), parse_desired([f"{node.members[0].id}=NCHW8c"], OPTION))


def test_costs_survive_the_file(free: Path, tmp_path: Path) -> None:
    costs = load_costs(costs_path(free))
    save_costs(costs, tmp_path / "again.costs.jsonl.gz")
    assert load_costs(tmp_path / "again.costs.jsonl.gz") == costs
    assert (tmp_path / "again.costs.jsonl.gz").read_bytes() == costs_path(free).read_bytes()


def test_costs_that_cannot_be_used(free: Path, tmp_path: Path) -> None:
    good = costs_path(free).read_bytes()
    for name, data, message in (
        ("torn", good[: len(good) // 2], "is damaged"),
        ("text", b"costs", "cannot read|is damaged"),
        ("empty", b"", "is damaged"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CostsError, match=f"(?:{message}).*layoutsearch tune MODEL --out") as caught:
            load_costs(tmp_path / name)
        assert "\n" not in str(caught.value)
    plan = LayoutPlan.load(free)
    costs = load_costs(costs_path(free))
    with pytest.raises(CostsError, match="another model than the plan"):
        what_if(plan, replace(costs, fingerprint="0"), ())
    with pytest.raises(CostsError, match="another device than the plan"):
        what_if(plan, replace(costs, device={**costs.device, "threads": 9}), ())
    nodes = tuple(replace(n, choices=tuple(c.replace("NCHW", "NHWC") for c in n.choices)) for n in costs.nodes)
    with pytest.raises(CostsError, match="of another run than the plan"):
        what_if(plan, replace(costs, nodes=nodes), ())


def test_explain_pin(free: Path, tmp_path: Path, capfd: Capture) -> None:
    found = asked(free, PIN)
    code, out, err = call(capfd, "explain", free, "--pin", PIN, "--json")
    assert (code, err) == (0, "")
    data = last_json(out)
    assert data == json.loads(json.dumps(found.to_json()))
    assert data["transforms"] == {"before": found.transforms[0], "after": found.transforms[1]}
    code, out, err = call(capfd, "explain", free, "--pin", PIN)
    assert (code, err) == (0, "")
    assert f"--pin {PIN}" in out
    assert f"{found.after_us:.1f} us and {found.transforms[1]} transforms then" in out
    for change in found.kernels:
        assert f"{change.id}: {change.before} to {change.after}" in out
    code, out, err = call(capfd, "explain", free, "--json")
    assert {k["id"] for k in last_json(out)["kernels"]} == {n.members[0].id for n in load_costs(costs_path(free)).nodes}
    alone = tmp_path / "plan.json"
    LayoutPlan.load(free).save(alone)
    line = refused(capfd, "explain", alone, "--pin", PIN)
    assert "plan.costs.jsonl.gz" in line
    assert "layoutsearch tune MODEL --out" in line
    code, _, err = call(capfd, "explain", alone, "--pin", PIN, "--costs", costs_path(free))
    assert (code, err) == (0, "")
    assert "no op 'conv9'" in refused(capfd, "explain", free, "--pin", "conv9=NCHW")
