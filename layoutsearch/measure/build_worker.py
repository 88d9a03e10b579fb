"""The process behind `Builder`: reads jobs from standard input, answers on standard output.

python -m layoutsearch.measure.build_worker MEMORY_BYTES MODULE[,MODULE...]
"""

from __future__ import annotations

import importlib
import os
import pickle
import resource
import struct
import sys
from typing import BinaryIO

import cloudpickle

from layoutsearch.measure import lifeline
from layoutsearch.measure.results import Status, one_line


def main(argv: list[str]) -> None:
    """Serve jobs until standard input ends."""
    # Both: the signal reaches a worker that holds the interpreter lock in C++, the thread works on every system.
    lifeline.die_with_creator(os.getppid())
    lifeline.exit_with_parent(None)
    memory = int(argv[0])
    if memory:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = os.fdopen(lifeline.detach_output(), "wb")
    source = sys.stdin.buffer
    path = _read(source)
    if path is None:
        return
    sys.path[:] = pickle.loads(path)
    for module in filter(None, argv[1].split(",")):
        importlib.import_module(module)
    _write(out, b"ready")
    while (job := _read(source)) is not None:
        function, payload = pickle.loads(job)
        _write(out, _run(function, payload))


def _run(function: str, payload: bytes) -> bytes:
    try:
        module, _, name = function.partition(":")
        value = getattr(importlib.import_module(module), name)(pickle.loads(payload))
        return cloudpickle.dumps((Status.OK.value, value, ""))
    except Exception as error:
        message = one_line(error)
        kind = type(error).__name__
        return cloudpickle.dumps((Status.BUILD_ERROR.value, None, message if kind in message else f"{kind}: {message}"))


def _read(source: BinaryIO) -> bytes | None:
    header = source.read(8)
    if len(header) < 8:
        return None
    (size,) = struct.unpack("<q", header)
    data = source.read(size)
    return data if len(data) == size else None


def _write(out: BinaryIO, data: bytes) -> None:
    out.write(struct.pack("<q", len(data)) + data)
    out.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
