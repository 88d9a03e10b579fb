"""The linker that TVM needs to write a shared library: a C compiler, or zig from its PyPI wheel."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm.support import cc

from layoutsearch.errors import ToolchainError
from layoutsearch.targets import architecture_of, local_architecture

HELP = "install a C compiler (Debian: apt install gcc; macOS: xcode-select --install) or: pip install layoutsearch[zig]"


def find_compiler() -> str | None:
    """Path of a C++ or C compiler on PATH (CXX and CC first), None without one."""
    for name in (os.environ.get("CXX"), os.environ.get("CC"), "g++", "clang++", "gcc", "clang", "cc"):
        if name and shutil.which(name):
            return shutil.which(name)
    return None


def has_zig() -> bool:
    """Whether the `ziglang` wheel is installed."""
    return importlib.util.find_spec("ziglang") is not None


def require_toolchain(target: tvm.target.Target | None = None) -> None:
    """Raise ToolchainError, with what to install, on a machine that cannot link for `target` (itself by default)."""
    linker(target or tvm.target.Target("llvm"))


def linker(target: tvm.target.Target) -> Callable[[str, Sequence[str], Sequence[str] | None], None]:
    """The function TVM's `export_library` calls with (output, objects, options).

    Raises:
        ToolchainError: there is no compiler, or none for a foreign target.
    """
    triple = str((target.host or target).attrs.get("mtriple", "") or "")
    if triple and not _is_native(triple):
        given = os.environ.get("LAYOUTSEARCH_CXX")
        if given and not shutil.which(given):
            raise ToolchainError(f"LAYOUTSEARCH_CXX={given} is no program; set it to a C++ compiler for {triple}")
        cross = given or shutil.which(f"{triple}-g++") or shutil.which(f"{triple}-gcc")
        if cross:
            return cc.cross_compiler(cross)
        if has_zig():
            return _zig(triple)
        raise ToolchainError(
            f"no cross compiler for {triple}: install {triple}-g++ (Debian: apt install g++-{triple}), "
            "set LAYOUTSEARCH_CXX to one, or: pip install layoutsearch[zig]"
        )
    compiler = find_compiler()
    if compiler is not None:
        return cc.cross_compiler(compiler)
    if has_zig():
        return _zig("")
    raise ToolchainError(f"no C compiler found, and TVM links its libraries with one; {HELP}")


@dataclass(frozen=True)
class LinkInput:
    """What a library is linked with beside TVM's own objects: files, and options of the linker."""

    files: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


def export(
    executable: Any, path: str | os.PathLike[str], target: tvm.target.Target, extra: LinkInput | None = None
) -> None:
    """Write a compiled module or executable as a shared library, replacing an older one atomically.

    Raises:
        ToolchainError: there is no linker, linking failed, or the file cannot be written.
    """
    target_path = Path(path)
    link = linker(target)
    arguments = {"addons": list(extra.files), "options": list(extra.options)} if extra is not None else {}
    try:
        target_path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".layoutsearch-", dir=target_path.parent) as folder:
            # The suffix decides the format.
            made = Path(folder, f"library{target_path.suffix or '.so'}")
            executable.export_library(str(made), fcompile=link, **arguments)
            made.replace(target_path)
    except OSError as error:
        raise ToolchainError(f"cannot write {target_path}: {error.strerror}") from None
    except RuntimeError as error:
        said = str(error).partition("\nCommand line:")[0].strip().splitlines()
        raise ToolchainError(
            f"linking {target_path} failed: {said[-1] if said else 'the linker said nothing'}"
        ) from error


def _is_native(triple: str) -> bool:
    return architecture_of(triple) == local_architecture() and ("linux" in triple) == sys.platform.startswith("linux")


def _zig(triple: str) -> Callable[[str, Sequence[str], Sequence[str] | None], None]:
    arguments = [sys.executable, "-m", "ziglang", "cc"]
    if triple:
        parts = triple.split("-")
        abi = parts[-1] if parts[-1] != "linux" else "gnu"
        arguments += ["-target", f"{architecture_of(triple)}-linux-{abi}"]

    def link(output: str, objects: Sequence[str], options: Sequence[str] | None = None, **_: Any) -> None:
        command = [*arguments, "-shared", "-fPIC", "-o", output, *objects, *(options or ())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)

    link.output_format = "so"  # type: ignore[attr-defined]
    return link
