"""This machine as a TVM target, and what a target can do."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import tvm

from layoutsearch.errors import LayoutSearchError
from layoutsearch.layout.candidate import Candidate

_ALIASES = {"arm64": "aarch64", "amd64": "x86_64", "i486": "i386", "i586": "i386", "i686": "i386"}


def local_target() -> tvm.target.Target:
    """The LLVM target of this machine's own CPU."""
    cpu = str(tvm.get_global_func("target.llvm_get_system_cpu")())
    return tvm.target.Target({"kind": "llvm", "mcpu": cpu})


def as_target(target: tvm.target.Target | str | Mapping[str, Any] | None) -> tvm.target.Target:
    """A target from what a user gives: None is this machine's CPU.

    Raises:
        LayoutSearchError: TVM knows no such target, or LLVM no such CPU.
    """
    if target is None:
        return local_target()
    if isinstance(target, tvm.target.Target):
        return target
    try:
        if isinstance(target, Mapping):
            target = dict(target)
            if target.get("kind") == "llvm" and target.get("mcpu"):
                _check_cpu(target["mcpu"], target.get("mtriple", ""))
        return tvm.target.Target(target)
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise LayoutSearchError(f"--target {target!r} is not a TVM target: {lines[-1] if lines else error}") from None


def _check_cpu(cpu: str, triple: str) -> None:
    """LLVM builds for a generic CPU, with a warning only, where it does not know the name."""
    machine = tvm.target.Target({"kind": "llvm", **({"mtriple": triple} if triple else {})})
    known = {str(name) for name in tvm.get_global_func("target.llvm_get_cpu_archlist")(machine)}
    if cpu not in known:
        where = f" for {triple}" if triple else ""
        raise LayoutSearchError(f"--target: LLVM knows no CPU {cpu!r}{where}; leave mcpu away or name one it knows")


def architecture(target: tvm.target.Target) -> str:
    """The instruction set that a CPU runs for `target`, such as `aarch64`; empty for other kinds without a host."""
    if target.kind.name != "llvm":
        return architecture(target.host) if target.host is not None else ""
    return architecture_of(str(target.attrs.get("mtriple", "") or "") or _system_triple())


def architecture_of(triple: str) -> str:
    """The instruction set of an LLVM triple, by one name whichever of its names the triple has."""
    name = triple.split("-")[0].lower()
    if name.startswith(("arm", "thumb")) and name != "arm64":
        return "arm"
    return _ALIASES.get(name, name)


def local_architecture() -> str:
    """The instruction set of this machine."""
    return architecture_of(_system_triple())


def runs_here(target: tvm.target.Target) -> bool:
    """Whether this machine's CPU could run code for `target`."""
    return target.kind.name == "llvm" and architecture(target) == local_architecture()


def default_threads() -> int:
    """Cores this process may use. TVM's own default is half of that on x86."""
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def has_feature(target: tvm.target.Target, feature: str) -> bool:
    """Whether LLVM's features of `target` include `feature`; every AArch64 CPU has `neon`.

    An OpenCL target may have `texture`: its tensors can be in other memory than buffers.
    """
    if target.kind.name != "llvm":
        return feature == "texture" and target.kind.name == "opencl" and "texture" in target.keys
    arm = architecture(target) in ("aarch64", "arm")
    if feature == "neon":
        return arm
    return not arm and bool(tvm.get_global_func("target.target_has_feature")(feature, target))


def check_textures(source: str, choices: Iterable[Candidate], target: tvm.target.Target) -> None:
    """Refuse choices with textures for a target that has none; `source` is the file they are from.

    Raises:
        LayoutSearchError: names the first.
    """
    if has_feature(target, "texture"):
        return
    for choice in choices:
        if choice.has_textures:
            raise LayoutSearchError(
                f"{source} has {choice}, but target {target.kind.name} has no textures: take the scopes away, or give "
                "--target qcom/adreno-opencl-texture"
            )


def _system_triple() -> str:
    return str(tvm.get_global_func("target.llvm_get_system_triple")())
