"""Tables of every released format load for ever, and a search on one comes to the end it came to before.

`golden/v1_residual.jsonl.gz` was recorded on a real device:

    layoutsearch bench record residual.json --space space.toml --threads 2 --tries 6 --assignments 10 --rounds 8 \
--starts 2 --out tests/replay/golden/v1_residual.jsonl.gz

with the files that `tests.replay.made.model_files` writes; `golden/v1_residual.json` is what is found in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layoutsearch.replay.lab import ReplayLab
from layoutsearch.replay.table import Table
from layoutsearch.replay.whole import SimulatedTimes
from layoutsearch.search.assemble import build_program
from layoutsearch.search.known import Request
from layoutsearch.search.solve import solve

GOLDEN = Path(__file__).with_name("golden")

ADVICE = """
A search on a recorded table comes to another end than it did. The table has not changed: how it is read, what a replay
reveals of it, what counts of some samples, or the exact solver has. If that is meant, run

    pytest tests/replay/test_golden.py --update-golden
"""


def searched(table: Table) -> dict[str, Any]:
    """A plain search: two tries of everything, the transforms that the optimum uses, six tries of what is close."""
    lab = ReplayLab(table)
    lab.measure([Request(workload, choice, 2) for workload, choice in table.candidates])
    while True:
        program = build_program(table.skeleton, lab)
        best = solve(program.problem)
        before = lab.measured
        lab.measure_transforms(program.transforms(best.assignment))
        if lab.measured == before:
            break
    used = [
        (node.workload, node.choices[index]) for node, index in zip(table.skeleton.nodes, best.assignment, strict=True)
    ]
    lab.measure([Request(workload, choice, 6) for workload, choice in used])
    lab.refine([Request(workload, choice, 2) for workload, choice in used], 21)
    final = solve(build_program(table.skeleton, lab).problem)
    return {
        "solution": list(final.assignment),
        "cost_us": round(final.cost, 3),
        "measured": lab.measured,
        "candidates": lab.candidates_measured,
        "seconds": round(lab.budget.elapsed_s, 3),
        "whole_us": [round(us, 3) for us in SimulatedTimes(table).samples_us(final.assignment, seed=0, rounds=4)],
    }


def found_in(table: Table) -> dict[str, Any]:
    optimum = solve(table.problem)
    return {
        "model": table.header.model,
        "id": table.id,
        "kernels": len(table.kernels),
        "transforms": len(table.transforms),
        "candidates": len(table.candidates),
        "optimum": list(optimum.assignment),
        "optimum_us": round(optimum.cost, 3),
        "wholes": [[w.label, round(w.median_us, 3), round(table.additive_us(w.solution), 3)] for w in table.wholes],
        "search": searched(table),
    }


@pytest.mark.parametrize("name", sorted(path.name.removesuffix(".jsonl.gz") for path in GOLDEN.glob("*.jsonl.gz")))
def test_golden(name: str, request: pytest.FixtureRequest) -> None:
    table = Table.load(GOLDEN / f"{name}.jsonl.gz")
    found, path = found_in(table), GOLDEN / f"{name}.json"
    if request.config.getoption("--update-golden"):
        path.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(path.read_text()), ADVICE


def test_the_device_comes_along() -> None:
    table = Table.load(GOLDEN / "v1_residual.jsonl.gz")
    assert table.header.profile is not None
    assert table.header.profile["peak_gflops"]["float32"] > 0


def test_tables_are_small() -> None:
    assert all(path.stat().st_size < 100_000 for path in GOLDEN.iterdir())
