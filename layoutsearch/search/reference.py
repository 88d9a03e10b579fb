"""Outputs of the untouched module, kept beside the plan: TVM's default build of a large model runs for seconds."""

from __future__ import annotations

import hashlib
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import tvm
from tvm import relax

from layoutsearch.errors import LayoutSearchError
from layoutsearch.model.load import LoadedModel

Outputs = list[tuple[np.ndarray, ...]]


def reference_key(loaded: LoadedModel, fingerprint: str, samples: Sequence[Sequence[np.ndarray]]) -> str:
    """Digest of structure, weights, inputs and TVM version: what the outputs depend on."""
    digest = hashlib.sha256(f"{tvm.__version__} {fingerprint}".encode())
    for _, function in loaded.module.functions_items():
        if isinstance(function, relax.Function):

            def visit(expr: relax.Expr) -> None:
                if isinstance(expr, tvm.ir.GenericConst) and isinstance(expr.ty, relax.TensorType):
                    digest.update(np.ascontiguousarray(expr.value.numpy()).tobytes())

            relax.analysis.post_order_visit(function, visit)
    for arrays in samples:
        for array in arrays:
            digest.update(str((array.shape, array.dtype)).encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def cached_outputs(path: Path, key: str, compute: Callable[[], Outputs]) -> Outputs:
    """Outputs from `path` if they are of `key`, else computed and written there."""
    found = _read(path, key)
    if found is not None:
        return found
    outputs = compute()
    arrays = {f"{i}.{j}": array for i, row in enumerate(outputs) for j, array in enumerate(row)}
    temporary = path.with_suffix(f".{os.getpid()}.npz")
    try:
        np.savez_compressed(temporary, about=_about(key, arrays), **arrays)  # type: ignore[arg-type]
        temporary.replace(path)
    except OSError as error:
        raise LayoutSearchError(f"cannot write {path}: {error.strerror or error}; free some space") from None
    finally:
        temporary.unlink(missing_ok=True)
    return outputs


def _about(key: str, names: Iterable[str]) -> np.ndarray:
    """What the file is of; its arrays' names too, which the checksums of an archive leave out."""
    return np.array(f"{key} {' '.join(sorted(names))}")


def _read(path: Path, key: str) -> Outputs | None:
    try:
        with np.load(path, allow_pickle=False) as data:
            names = [name for name in data.files if name != "about"]
            if str(data["about"]) != str(_about(key, names)):
                return None
            rows: dict[int, dict[int, np.ndarray]] = {}
            for name in names:
                i, j = map(int, name.split("."))
                rows.setdefault(i, {})[j] = data[name]
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):
        # A cache: what cannot be read is made again.
        return None
    return [tuple(rows[i][j] for j in sorted(rows[i])) for i in sorted(rows)]
