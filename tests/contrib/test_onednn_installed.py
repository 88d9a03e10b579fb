"""Without the extra: one line that says what to install, wherever oneDNN would be needed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import tvm
from tvm import relax

import layoutsearch
from layoutsearch.contrib.onednn import library
from layoutsearch.errors import LayoutSearchError, SpaceError, ToolchainError
from layoutsearch.layout.space import parse_space
from layoutsearch.search.externs import check_externs, with_externs
from layoutsearch.search.space_report import space_report
from tests.contrib.onednn import needs_onednn
from tests.models.nets import Net, build
from tests.models.plans import make_plan
from tests.models.running import native_target

ALONE = """
[target]
match = { kind = "llvm" }
blocks = [16]
[[rule]]
name = "convolutions"
match = { op = "nn.conv2d" }
layouts = ["NCHW16c@onednn"]
[[rule]]
name = "rest"
match = {}
layouts = ["NCHW", "NCHW{b}c"]
"""


@pytest.fixture
def _missing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    known = metadata.distribution

    def distribution(name: str) -> metadata.Distribution:
        if name.startswith("onednn"):
            raise metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(library.metadata, "distribution", distribution)
    for cached in (library.installed, library._object_file, library._loaded):
        cached.cache_clear()
    yield
    for cached in (library.installed, library._object_file, library._loaded):
        cached.cache_clear()


def model() -> tvm.IRModule:
    return build((1, 16, 9, 14), body=lambda n, x: n.conv_relu(x, 32))


@pytest.mark.usefixtures("_missing")
def test_a_search_with_it_is_refused() -> None:
    with pytest.raises(ToolchainError, match=r"oneDNN is not installed .*pip install 'layoutsearch\[onednn\]'"):
        check_externs(["onednn"])


def test_what_is_no_library_is_refused() -> None:
    with pytest.raises(LayoutSearchError, match="--extern 'mkl' is unknown; expected one of onednn"):
        check_externs(["mkl"])


def test_a_rule_that_names_it_needs_the_option() -> None:
    with pytest.raises(SpaceError, match="rule 'convolutions' names onednn; give --extern onednn too"):
        with_externs(parse_space(ALONE, "mine.toml"), [])


@needs_onednn
def test_a_plan_with_it_does_not_compile_without_it(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    space = tmp_path / "alone.toml"
    space.write_text(ALONE)
    plan = make_plan(model(), native_target(), space=space)
    assert [op.choice.extern for op in plan.ops if op.kind == "conv2d" and op.choice is not None] == ["onednn"]
    plan.save(tmp_path / "plan.json")
    loaded = layoutsearch.LayoutPlan.load(tmp_path / "plan.json")
    assert loaded == plan
    layoutsearch.compile(model(), loaded, output=tmp_path / "model.so")
    request.getfixturevalue("_missing")
    with pytest.raises(ToolchainError, match="oneDNN is not installed") as caught:
        layoutsearch.compile(model(), loaded, output=tmp_path / "model.so")
    assert "\n" not in str(caught.value)


@needs_onednn
def test_space_show_lists_it_and_names_what_it_does_not_apply_to() -> None:
    def body(n: Net, x: relax.Expr) -> relax.Expr:
        y = n.emit(relax.op.nn.adaptive_avg_pool2d(n.conv_relu(x, 32), (1, 1)))
        y = n.emit(relax.op.matmul(n.emit(relax.op.reshape(y, (1, 32))), n.const((32, 10))))
        return n.emit(relax.op.add(y, n.const((10,))))

    found = {op.op.kind: op for op in space_report(build((1, 16, 9, 14), body=body), externs=["onednn"]).ops}
    assert "NCHW16c,OIHW,NCHW16c,onednn" in found["conv2d"].candidates
    assert not any(
        "onednn" in text for text in (*found["adaptive_avg_pool2d"].candidates, *found["adaptive_avg_pool2d"].out)
    )
    # What follows a frozen operator in its kernel is frozen as well.
    assert found["matmul"].candidates == ()


@needs_onednn
def test_another_cpu_is_refused() -> None:
    target = tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu"})
    with pytest.raises(ToolchainError, match="for x86-64, the target is aarch64-linux-gnu"):
        library.link_input(target)
