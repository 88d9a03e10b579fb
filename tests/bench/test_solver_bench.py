"""`bench solver`: its instances, and what it reports of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from layoutsearch.bench.families import FAMILIES
from layoutsearch.bench.graphs import COSTS, N_CANDIDATES
from layoutsearch.bench.solver import Instance, default_instances, met_targets, run_instances, write_results
from layoutsearch.errors import LayoutSearchError
from tests.cli.running import call


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("costs", COSTS)
def test_instances_are_what_they_say(family: str, costs: str) -> None:
    problem = Instance(family, 200, costs).problem()
    assert 180 <= len(problem.nodes) <= 220
    assert {len(node.costs) for node in problem.nodes} == {N_CANDIDATES}
    readers = [len({use.node for use in tensor.uses if use.node is not None}) for tensor in problem.tensors]
    assert max(readers) >= 2
    assert readers.count(0) == 1  # the output alone
    assert problem == Instance(family, 200, costs).problem()
    assert problem != Instance(family, 200, costs, seed=1).problem()


def test_densenet_has_n_ary_concats_and_the_size_of_densenet_121() -> None:
    problem = Instance("densenet", 185).problem()
    assert len(problem.nodes) == 185
    reads = [sum(any(use.node == i for use in t.uses) for t in problem.tensors) for i in range(len(problem.nodes))]
    assert max(reads) == 25


def test_equal_operators_cost_the_same() -> None:
    problem = Instance("resnet", 200).problem()
    costs = [node.costs for node in problem.nodes if node.name.startswith("conv")]
    assert len(set(costs)) < len(costs) / 3


def test_rows_say_what_was_proven(tmp_path: Path) -> None:
    instances = [Instance("chain", 60), Instance("unet", 47), Instance("densenet", 50, "shared")]
    rows = run_instances(instances, time_limit_s=20)
    assert [row.ops for row in rows] == [60, 49, 56]
    assert all(row.proven and row.gap == 0 for row in rows[:2])
    assert all(row.lower_bound <= row.cost * (1 + 1e-9) for row in rows)
    assert all(20 < row.peak_mb < 2000 for row in rows)
    assert met_targets(rows) == {"unet-47": True}
    write_results(rows, tmp_path)
    assert (tmp_path / "solver.png").stat().st_size > 5000
    assert (tmp_path / "solver.csv").read_text().count("\n") == 4


def test_the_default_instances_cover_the_targets() -> None:
    names = {(i.family, i.n_ops, i.costs) for i in default_instances((50,))}
    assert {("chain", 1000, "realistic"), ("densenet", 185, "realistic"), ("unet", 47, "realistic")} <= names
    assert {costs for _, _, costs in names} == set(COSTS)


def test_an_unknown_family_is_an_error() -> None:
    with pytest.raises(LayoutSearchError, match="expected one of chain"):
        run_instances([Instance("vgg", 50)])


def test_sizes_are_numbers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capfd, "bench", "solver", "--sizes", "10,x", "--out", tmp_path)
    assert code == 2
    assert "--sizes '10,x'" in err
