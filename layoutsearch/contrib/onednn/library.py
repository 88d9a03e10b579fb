"""Where oneDNN lies, the object file that kernels are linked with, and what the compiler asks oneDNN."""

from __future__ import annotations

import atexit
import ctypes
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from layoutsearch.errors import ToolchainError
from layoutsearch.targets import architecture_of
from layoutsearch.toolchain import HELP, LinkInput, find_compiler, has_zig

VERSION = "2023.2.0"
_PACKAGES = ("onednn-cpu-gomp", "onednn-devel-cpu-gomp")
_LIBRARY, _HEADER = "libdnnl.so.3", "dnnl.h"
_MESSAGE = 256
# The layout of packed weights hardly depends on the number of threads; asked for one, it is the same everywhere.
_THREADS = 1


class Unsupported(ValueError):
    """oneDNN does not compute something; says what it was."""


@dataclass(frozen=True)
class Installed:
    """Folders of an installed oneDNN."""

    include: Path
    library: Path


@cache
def installed() -> Installed:
    """The oneDNN of this Python environment.

    Raises:
        ToolchainError: the extra is not installed, or in another version.
    """
    found: dict[str, Path] = {}
    for package in _PACKAGES:
        try:
            distribution = metadata.distribution(package)
        except metadata.PackageNotFoundError:
            raise ToolchainError(
                f"oneDNN is not installed ({package} is missing); pip install 'layoutsearch[onednn]' (x86-64 Linux)"
            ) from None
        if distribution.version != VERSION:
            raise ToolchainError(
                f"{package} is version {distribution.version}, expected {VERSION}; pip install 'layoutsearch[onednn]'"
            )
        for file in distribution.files or ():
            found.setdefault(file.name, Path(str(distribution.locate_file(file))).resolve().parent)
    missing = [name for name in (_LIBRARY, _HEADER) if name not in found or not (found[name] / name).exists()]
    if missing:
        raise ToolchainError(f"{missing[0]} of oneDNN is not where pip put it; reinstall 'layoutsearch[onednn]'")
    include = found[_HEADER]
    return Installed(include if include.name != "dnnl" else include.parents[1], found[_LIBRARY])


def require() -> None:
    """Raise ToolchainError unless kernels of oneDNN can be compiled and linked here."""
    _loaded()


def link_input(target: tvm.target.Target) -> LinkInput:
    """What a library with oneDNN's kernels is linked with; it looks for oneDNN where it lies now.

    Raises:
        ToolchainError: oneDNN or a C compiler is missing, or the target is another CPU than this oneDNN is for.
    """
    triple = str(target.attrs.get("mtriple", "") or "")
    if target.kind.name != "llvm" or (triple and architecture_of(triple) != "x86_64"):
        raise ToolchainError(f"kernels of oneDNN are for x86-64, the target is {triple or target.kind.name}")
    return LinkInput((str(_object_file()),), _options())


def _options() -> tuple[str, ...]:
    folder = installed().library
    return (
        "-Wl,--no-as-needed",
        f"-L{folder}",
        f"-l:{_LIBRARY}",
        f"-Wl,-rpath,{folder}",
        # Called by oneDNN, not by what is linked here.
        "-lpthread",
    )


def _compiler() -> list[str]:
    compiler = find_compiler()
    if compiler is not None:
        return [compiler]
    if has_zig():
        return [sys.executable, "-m", "ziglang", "cc"]
    raise ToolchainError(f"no C compiler found, and kernels of oneDNN are linked with one; {HELP}")


def _compile(arguments: Sequence[str]) -> None:
    done = subprocess.run([*_compiler(), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or "the compiler said nothing").strip().splitlines()
        raise ToolchainError(f"compiling layoutsearch's part of oneDNN's kernels failed: {said[0]}")


@cache
def _object_file() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="layoutsearch-onednn-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    source, made = Path(__file__).with_name("runtime.c"), folder / "layoutsearch_onednn.o"
    include = f"-I{installed().include}"
    _compile(["-x", "c", "-std=gnu11", "-O2", "-fPIC", "-w", include, "-c", str(source), "-o", str(made)])
    return made


@cache
def _loaded() -> Any:
    made = _object_file().with_name("layoutsearch_onednn.so")
    _compile(["-shared", "-o", str(made), str(_object_file()), *_options()])
    return ctypes.CDLL(str(made))


@dataclass(frozen=True)
class Chosen:
    """How oneDNN computes a convolution.

    Attributes:
        weights: its name for the layout of the weights.
        bytes: size of the packed weights.
        how: name of the implementation.
    """

    weights: str
    bytes: int
    how: str

    @property
    def is_reference(self) -> bool:
        """Whether oneDNN has no fast implementation."""
        return self.how.startswith("ref")


@cache
def choose(text: str) -> Chosen:
    """What oneDNN does about a convolution (see `Conv.text`) on this CPU.

    Raises:
        Unsupported: it cannot compute it.
        ToolchainError: it cannot be asked.
    """
    weights, how = ctypes.create_string_buffer(40), ctypes.create_string_buffer(_MESSAGE)
    size, error = ctypes.c_long(), ctypes.create_string_buffer(_MESSAGE)
    failed = _loaded().layoutsearch_onednn_choose(text.encode(), _THREADS, weights, ctypes.byref(size), how, error)
    if failed:
        raise Unsupported(error.value.decode())
    return Chosen(weights.value.decode(), size.value, how.value.decode())


def pack(text: str, weights: np.ndarray) -> np.ndarray:
    """Weights (O, I / groups, H, W) in the layout that `text` names, as a flat array of float32.

    Raises:
        ToolchainError: oneDNN refuses.
    """
    plain = np.ascontiguousarray(weights, dtype="float32")
    packed = np.zeros(choose(text).bytes // 4, "float32")
    error = ctypes.create_string_buffer(_MESSAGE)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (plain, packed)]
    if _loaded().layoutsearch_onednn_pack_weights(text.encode(), *pointers, error):
        raise ToolchainError(f"{error.value.decode()} ({text})")
    return packed
