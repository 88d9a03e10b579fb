"""Runs the OpenCL C of a compiled plan on PoCL, an OpenCL for CPUs: it shows that code is right, never how fast it is.

TVM's wheel has no OpenCL runtime, so kernels are launched here one by one, with the grids of their scheduled functions.
PoCL has an LLVM of its own and may crash: it runs in a process of its own, without TVM.

    python -m tests.textures.pocl     # reads pickled programs on standard input, answers on standard output
"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np


@dataclass(frozen=True)
class Place:
    """Where a tensor is: physical shape, element type, and (width, height, depth) where it is a texture."""

    shape: tuple[int, ...]
    dtype: str
    texels: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Launch:
    """One kernel: its OpenCL C, the tensors it takes by name, and how many groups of how many items run it."""

    name: str
    source: str
    args: tuple[str, ...]
    groups: int
    items: int


@dataclass(frozen=True)
class Program:
    """A whole model as launches over tensors; `given` are inputs and constants."""

    places: Mapping[str, Place]
    given: Mapping[str, np.ndarray]
    launches: tuple[Launch, ...]
    outputs: tuple[str, ...]


class Pocl:
    """The process that runs programs."""

    def __init__(self, folder: Path) -> None:
        env = {**os.environ, "POCL_CACHE_DIR": str(folder), "OPENBLAS_NUM_THREADS": "1"}
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.textures.pocl"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, env=env,
            cwd=Path(__file__).resolve().parents[2],
        )  # fmt: skip

    def run(self, program: Program) -> tuple[np.ndarray, ...]:
        """Outputs of the program; RuntimeError with what the process said where it fails or dies."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            _write(self._process.stdin, program)
            reply = _read(self._process.stdout)
        except (EOFError, OSError):
            code = self._process.wait()
            self._said.seek(0)
            raise RuntimeError(f"PoCL ended with {code}: {self._said.read()[-2000:].decode()}") from None
        if isinstance(reply, str):
            raise RuntimeError(reply)
        return reply

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._said.close()


@contextmanager
def pocl(folder: Path) -> Iterator[Pocl]:
    """A process that runs programs, with its cache in `folder`."""
    process = Pocl(folder)
    try:
        yield process
    finally:
        process.close()


def _write(pipe: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value)
    pipe.write(struct.pack("<q", len(data)) + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> Any:
    header = pipe.read(8)
    if len(header) < 8:
        raise EOFError
    return pickle.loads(pipe.read(struct.unpack("<q", header)[0]))


class _Machine:
    def __init__(self) -> None:
        import pyopencl

        self.cl = pyopencl
        self.context = pyopencl.Context([pyopencl.get_platforms()[0].get_devices()[0]])
        self.queue = pyopencl.CommandQueue(self.context)
        self.kernels: dict[tuple[str, str], Any] = {}

    def run(self, program: Program) -> tuple[np.ndarray, ...]:
        memory = {name: self._allocate(place) for name, place in program.places.items()}
        for name, array in program.given.items():
            self._copy(memory[name], np.ascontiguousarray(array), program.places[name], to_device=True)
        for launch in program.launches:
            key = (launch.name, launch.source)
            if key not in self.kernels:
                self.kernels[key] = getattr(self.cl.Program(self.context, launch.source).build(), launch.name)
            args = [memory[name] for name in launch.args]
            self.kernels[key](self.queue, (launch.groups * launch.items,), (launch.items,), *args)
        found = []
        for name in program.outputs:
            place = program.places[name]
            array = np.empty(place.shape, place.dtype)
            self._copy(memory[name], array, place, to_device=False)
            found.append(array)
        self.queue.finish()
        return tuple(found)

    def _allocate(self, place: Place) -> Any:
        cl, flags = self.cl, self.cl.mem_flags.READ_WRITE
        if place.texels is None:
            size = int(np.prod(place.shape)) * np.dtype(place.dtype).itemsize
            return cl.Buffer(self.context, flags, max(size, 1))
        width, height, depth = place.texels
        pixel = cl.ImageFormat(cl.channel_order.RGBA, cl.channel_type.FLOAT)
        return cl.Image(self.context, flags, pixel, shape=(width, height, depth), is_array=True)

    def _copy(self, memory: Any, array: np.ndarray, place: Place, *, to_device: bool) -> None:
        pair = (memory, array) if to_device else (array, memory)
        if place.texels is None:
            self.cl.enqueue_copy(self.queue, *pair)
        else:
            self.cl.enqueue_copy(self.queue, *pair, origin=(0, 0, 0), region=place.texels)


def main() -> None:
    """Serve programs until standard input ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    machine = _Machine()
    while True:
        try:
            program = _read(sys.stdin.buffer)
        except EOFError:
            return
        try:
            reply: Any = machine.run(program)
        except Exception as error:
            reply = f"{type(error).__name__}: {error}"
        _write(out, reply)


if __name__ == "__main__":
    # Pickles name the classes by their module.
    from tests.textures import pocl as this

    this.main()
