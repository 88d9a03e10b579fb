"""Targets as users give them."""

from __future__ import annotations

import sys

import pytest
import tvm

from layoutsearch.cli.options import parse_target
from layoutsearch.errors import LayoutSearchError
from layoutsearch.targets import architecture, as_target, has_feature, local_architecture, local_target, runs_here
from layoutsearch.toolchain import require_toolchain


def test_forms_of_the_same_target() -> None:
    forms = [
        tvm.target.Target({"kind": "llvm", "mcpu": "skylake-avx512"}),
        {"kind": "llvm", "mcpu": "skylake-avx512"},
        parse_target("llvm -mcpu=skylake-avx512"),
        parse_target('{"kind": "llvm", "mcpu": "skylake-avx512"}'),
        parse_target("llvm --mcpu=skylake-avx512"),
    ]
    assert {str(as_target(form)) for form in forms} == {str(forms[0])}


def test_none_is_this_machine() -> None:
    assert parse_target(None) is None
    assert str(as_target(None)) == str(local_target())
    assert as_target(None).attrs["mcpu"]


def test_options_of_other_kinds() -> None:
    assert parse_target("llvm -mattr=+avx2,+fma -num-cores=4") == {
        "kind": "llvm", "mattr": ["+avx2", "+fma"], "num-cores": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    "target", ["nonsense", "", {"kind": "nonsense"}, {"mcpu": "haswell"}, {"kind": "llvm", "mcpu": "i-am-no-cpu"}, {}]
)
def test_what_is_no_target(target: object, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LayoutSearchError, match="--target") as caught:
        as_target(target)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_a_cpu_of_another_architecture(capfd: pytest.CaptureFixture[str]) -> None:
    assert as_target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"})
    with pytest.raises(LayoutSearchError, match=r"'haswell' for aarch64-linux-gnu"):
        as_target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "haswell"})
    assert capfd.readouterr().err == ""


def test_features() -> None:
    avx512 = as_target({"kind": "llvm", "mcpu": "skylake-avx512", "mtriple": "x86_64-unknown-linux-gnu"})
    avx2 = as_target({"kind": "llvm", "mcpu": "haswell", "mtriple": "x86_64-unknown-linux-gnu"})
    arm = as_target({"kind": "llvm", "mcpu": "cortex-a72", "mtriple": "aarch64-linux-gnu"})
    assert [has_feature(t, "avx512f") for t in (avx512, avx2, arm)] == [True, False, False]
    assert [has_feature(t, "avx2") for t in (avx512, avx2, arm)] == [True, True, False]
    assert [has_feature(t, "neon") for t in (avx512, avx2, arm)] == [False, False, True]


def test_a_foreign_target_needs_a_cross_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from layoutsearch import toolchain

    monkeypatch.setattr(toolchain, "has_zig", lambda: False)
    monkeypatch.delenv("LAYOUTSEARCH_CXX", raising=False)
    arch = "aarch64" if "x86_64" in str(tvm.get_global_func("target.llvm_get_system_triple")()) else "x86_64"
    with pytest.raises(LayoutSearchError, match=f"no cross compiler for {arch}-none-linux-gnu"):
        require_toolchain(as_target({"kind": "llvm", "mtriple": f"{arch}-none-linux-gnu"}))
    monkeypatch.setenv("LAYOUTSEARCH_CXX", "/opt/cross/g++")
    with pytest.raises(LayoutSearchError, match=r"LAYOUTSEARCH_CXX=/opt/cross/g\+\+ is no program"):
        require_toolchain(as_target({"kind": "llvm", "mtriple": f"{arch}-none-linux-gnu"}))
    monkeypatch.setenv("LAYOUTSEARCH_CXX", sys.executable)
    require_toolchain(as_target({"kind": "llvm", "mtriple": f"{arch}-none-linux-gnu"}))


def test_instruction_sets_have_one_name() -> None:
    def named(triple: str) -> str:
        return architecture(as_target({"kind": "llvm", "mtriple": triple}))

    triples = ("aarch64-linux-gnu", "arm64-apple-darwin", "armv7l-linux-gnueabihf", "i686-linux-gnu")
    assert [named(triple) for triple in triples] == ["aarch64", "aarch64", "arm", "i386"]
    assert architecture(local_target()) == local_architecture()
    assert runs_here(local_target())
    assert [runs_here(as_target({"kind": "llvm", "mtriple": f"{a}-linux-gnu"})) for a in ("aarch64", "x86_64")] in (
        [True, False], [False, True], [False, False],
    )  # fmt: skip
    assert architecture(tvm.target.Target("c")) == ""
