"""What is built for a device."""

from __future__ import annotations

from pathlib import Path

import tvm

from layoutsearch.measure import vector_work
from layoutsearch.search.jobs import TransformJob, build_transform
from layoutsearch.targets import local_target


def test_libraries_bring_the_vector_work_that_goes_before_their_kernels(tmp_path: Path) -> None:
    target = dict(local_target().export())
    path = str(tmp_path / "t.so")
    built = build_transform(TransformJob((1, 12, 5, 7), "NCHW", "float32", "NCHW", "NCHW4c", target, 2, path))
    assert built.output == path
    assert vector_work.worker(tvm.runtime.load_module(path), 2) is not None
