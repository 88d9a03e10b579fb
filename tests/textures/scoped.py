"""Models in the scopes of an assignment, without a plan around them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tvm

from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.space import load_space
from layoutsearch.materialize.convert import materialize
from layoutsearch.materialize.lower import Lowered, lower
from layoutsearch.materialize.scopes import put_in_scopes
from layoutsearch.materialize.verify_scopes import verify_scopes
from layoutsearch.plan.apply import schedule_kernels
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.search.workloads import kernel_nodes
from tests.materialize.cases import Case
from tests.textures.pocl import Pocl
from tests.textures.programs import TARGET, program_of

SPACE = Path(__file__).resolve().parents[2] / "search_spaces" / "adreno.toml"


def case_of(module: tvm.IRModule) -> Case:
    """The model with the candidates of the shipped space."""
    return Case.of(module, load_space(SPACE))


def drawn(case: Case, rng: random.Random) -> dict[str, Candidate]:
    """Any candidate for every kernel; operators in one kernel follow its root."""
    found: dict[str, Candidate] = {}
    for node in kernel_nodes(case.module, case.graph, case.spaces):
        found.update(node.assignment(rng.choice(node.choices)))
    return found


def placed(case: Case, assignment: Mapping[str, Candidate]) -> Lowered:
    """The model lowered, in its scopes."""
    converted = materialize(case.module, case.graph, assignment).module
    lowered = put_in_scopes(lower(converted, TARGET), converted, case.graph, assignment, TARGET)
    verify_scopes(lowered, case.graph, assignment)
    return lowered


def scheduled(lowered: Lowered) -> tvm.IRModule:
    """With default schedules."""
    return schedule_kernels(lowered, {}, TargetInfo.from_target(TARGET, 1))[0]


def outputs(case: Case, assignment: Mapping[str, Candidate], pocl: Pocl) -> list[np.ndarray]:
    """What the model computes on PoCL."""
    return list(pocl.run(program_of(scheduled(placed(case, assignment)), case.inputs)))
