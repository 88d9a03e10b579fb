"""The linker that TVM needs to write a shared library: a C compiler, or zig from its PyPI wheel."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm.support import cc

from layoutsearch.errors import ToolchainError

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
    """Raise ToolchainError, with what to install, on a machine that cannot link (for `target`, if given)."""
    if find_compiler() is None and not has_zig():
        raise ToolchainError(f"no C compiler found, and TVM links its libraries with one; {HELP}")
    if target is not None:
        linker(target)


def linker(target: tvm.target.Target) -> Callable[[str, Sequence[str], Sequence[str] | None], None]:
    """The function TVM's `export_library` calls with (output, objects, options).

    Raises:
        ToolchainError: there is no compiler, or none for a foreign target.
    """
    triple = str(target.attrs.get("mtriple", "") or "")
    if triple and not _is_native(triple):
        cross = os.environ.get("LAYOUTSEARCH_CXX") or shutil.which(f"{triple}-g++") or shutil.which(f"{triple}-gcc")
        if cross:
            return cc.cross_compiler(cross)
        if has_zig():
            return _zig(triple)
        raise ToolchainError(f"no cross compiler for {triple}: install {triple}-g++, set LAYOUTSEARCH_CXX, or use zig")
    compiler = find_compiler()
    if compiler is not None:
        return cc.cross_compiler(compiler)
    if has_zig():
        return _zig("")
    raise ToolchainError(f"no C compiler found, and TVM links its libraries with one; {HELP}")


def export(executable: Any, path: str | os.PathLike[str], target: tvm.target.Target) -> None:
    """Write a compiled module or executable as a shared library, replacing an older one atomically.

    Raises:
        ToolchainError: there is no linker, linking failed, or the file cannot be written.
    """
    target_path = Path(path)
    link = linker(target)
    try:
        target_path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".layoutsearch-", dir=target_path.parent) as folder:
            # The suffix decides the format.
            made = Path(folder, f"library{target_path.suffix or '.so'}")
            executable.export_library(str(made), fcompile=link)
            made.replace(target_path)
    except OSError as error:
        raise ToolchainError(f"cannot write {target_path}: {error.strerror}") from None
    except RuntimeError as error:
        said = str(error).partition("\nCommand line:")[0].strip().splitlines()
        raise ToolchainError(
            f"linking {target_path} failed: {said[-1] if said else 'the linker said nothing'}"
        ) from error


def _is_native(triple: str) -> bool:
    here = str(tvm.get_global_func("target.llvm_get_system_triple")())
    return triple.split("-")[0] == here.split("-")[0] and ("linux" in triple) == ("linux" in here)


def _zig(triple: str) -> Callable[[str, Sequence[str], Sequence[str] | None], None]:
    arguments = [sys.executable, "-m", "ziglang", "cc"]
    if triple:
        parts = triple.split("-")
        arguments += ["-target", f"{parts[0]}-linux-{parts[-1] if parts[-1] != 'linux' else 'gnu'}"]

    def link(output: str, objects: Sequence[str], options: Sequence[str] | None = None, **_: Any) -> None:
        command = [*arguments, "-shared", "-fPIC", "-o", output, *objects, *(options or ())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)

    link.output_format = "so"  # type: ignore[attr-defined]
    return link
