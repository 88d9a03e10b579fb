"""What earlier runs measured on this kind of device, of any model: a cost model of a new model starts from it.

One gzip file of JSON a model, in a folder for each device, target and version of templates and TVM, below the user's
folder of layoutsearch. Runs of the same model replace each other's file; two at once leave one of the two.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from layoutsearch.cost.correction import WholeRow
from layoutsearch.cost.features import SCHEMA_VERSION
from layoutsearch.cost.model import ModelIdentity
from layoutsearch.cost.rows import KernelRow, TransformRow
from layoutsearch.cost.train import Rows
from layoutsearch.cost.whole import WholeShape
from layoutsearch.errors import LayoutSearchError
from layoutsearch.layout.candidate import Candidate, choice_text
from layoutsearch.layout.facts import KernelFacts
from layoutsearch.layout.transform import TransformKey
from layoutsearch.measure.profile import HOME_VARIABLE, user_folder

_SCHEMA = "layoutsearch.cost/2"


class LibraryError(LayoutSearchError):
    """The library cannot be written."""


@dataclass(frozen=True)
class ModelRows:
    """What was measured of one model.

    Attributes:
        model: its fingerprint.
        rows: kernels and transforms.
        wholes: assignments that were timed whole.
    """

    model: str
    rows: Rows = field(default_factory=Rows)
    wholes: tuple[WholeRow, ...] = ()


class CostLibrary:
    """The rows of all models measured under one identity.

    Args:
        identity: device, target and versions.
        folder: of the library; by default in the user's folder of layoutsearch.
    """

    def __init__(self, identity: ModelIdentity, folder: str | os.PathLike[str] | None = None) -> None:
        digest = hashlib.sha256(repr((identity, SCHEMA_VERSION)).encode()).hexdigest()[:16]
        self.folder = (Path(folder) if folder is not None else user_folder() / "cost") / digest
        self._identity = identity

    def models(self) -> Iterator[ModelRows]:
        """Every model's rows, in order of their names. A file that cannot be read says nothing and is left out."""
        for path in sorted(self.folder.glob("*.json.gz")):
            found = self._read(path)
            if found is not None:
                yield found

    def save(self, found: ModelRows) -> None:
        """Keep what a run has measured of a model, in place of what is there.

        Raises:
            LibraryError: the folder cannot be written.
        """
        data = {
            "schema": _SCHEMA,
            "identity": asdict(self._identity),
            "model": found.model,
            "kernels": [_kernel_json(row) for row in found.rows.kernels],
            "transforms": [[r.key.workload, r.key.candidate, r.us] for r in found.rows.transforms],
            "wholes": [{"us": r.us, "shape": asdict(r.shape)} for r in found.wholes],
        }
        path = self.folder / f"{found.model[:32]}.json.gz"
        temporary = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=".rows.", dir=self.folder)
            with os.fdopen(handle, "wb") as file:
                file.write(gzip.compress(json.dumps(data).encode("utf-8"), mtime=0))
            os.replace(temporary, path)
        except OSError as error:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            raise LibraryError(f"cannot write {path}: {error.strerror}; set {HOME_VARIABLE} to a folder") from None

    def _read(self, path: Path) -> ModelRows | None:
        try:
            data = json.loads(gzip.decompress(path.read_bytes()))
            if data["schema"] != _SCHEMA or ModelIdentity(**data["identity"]) != self._identity:
                return None
            model = data["model"]
            kernels = tuple(_kernel_row(row, model) for row in data["kernels"])
            moves = tuple(TransformRow(TransformKey.parse(w, c), _time(us), model) for w, c, us in data["transforms"])
            wholes = tuple(WholeRow(WholeShape(**row["shape"]), _time(row["us"]), model) for row in data["wholes"])
        except (OSError, EOFError, zlib.error, LookupError, TypeError, ValueError, AttributeError, LayoutSearchError):
            return None
        return ModelRows(model, Rows(kernels, moves), wholes)


def _kernel_json(row: KernelRow) -> list[Any]:
    return [row.workload, choice_text(row.choice), row.us, row.tries, row.facts.to_json()]


def _kernel_row(data: list[Any], model: str) -> KernelRow:
    workload, choice, us, tries, facts = data
    candidate = Candidate.parse(choice) if choice else None
    return KernelRow(KernelFacts.from_json(facts), candidate, _time(us), workload, model, int(tries))


def _time(us: Any) -> float:
    """Microseconds that a model can be fitted to."""
    if not 0 < float(us) < math.inf:
        raise ValueError(f"{us!r} is no time")
    return float(us)
