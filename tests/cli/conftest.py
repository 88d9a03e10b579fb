"""Small models on disk, and one that was tuned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tvm

from layoutsearch.plan.plan import LayoutPlan
from tests.cli.running import SPACE, last_json, run
from tests.models import nets
from tests.models.plans import make_plan, two_in_three_out
from tests.models.running import native_target


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, a search space, and a plan of `outputs.json` that was made without measuring."""
    folder = tmp_path_factory.mktemp("models")
    modules = {
        "stem": nets.stem((1, 3, 16, 16)),
        "outputs": two_in_three_out(),
        "outputs_stride": two_in_three_out(stride=1),
        "outputs_wide": two_in_three_out(out=32),
        "residual": nets.residual(),
        "dense": nets.without_convolution(),
    }
    for name, module in modules.items():
        (folder / f"{name}.json").write_text(tvm.ir.save_json(module))
    (folder / "space.toml").write_text(SPACE)
    make_plan(modules["outputs"], native_target(), seed=4).save(folder / "plan.json")
    return folder


@pytest.fixture(scope="session")
def plan(files: Path) -> LayoutPlan:
    return LayoutPlan.load(files / "plan.json")


@dataclass(frozen=True)
class Tuned:
    """What `tune --json` of stem.json left behind."""

    out: Path
    result: dict[str, Any]
    stderr: str

    @property
    def plan(self) -> Path:
        return self.out / "plan.json"


@pytest.fixture(scope="session")
def tuned(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    out = tmp_path_factory.mktemp("tuned") / "new"
    # The budget leaves out the later rounds of schedules.
    options = ["--space", files / "space.toml", "--trials", 2, "--threads", 1, "--time-budget", "20s"]
    done = run("tune", files / "stem.json", *options, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    return Tuned(out, last_json(done.stdout), done.stderr)
