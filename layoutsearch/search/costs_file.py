"""The file of a run's costs, `plan.costs.jsonl.gz` beside `plan.json`.

It has one JSON object a line: a header, every kernel with its candidates, and every tensor between kernels with its
transforms. Times are in microseconds, `null` for what does not run; each is measured or predicted.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from layoutsearch.layout.kinds import Role
from layoutsearch.search.plan_costs import Cost, CostNode, CostOp, CostsError, CostTensor, PlanCosts

SCHEMA = "layoutsearch.costs/1"


def costs_path(plan: str | os.PathLike[str]) -> Path:
    """Where the costs of a plan lie: `plan.costs.jsonl.gz` beside `plan.json`."""
    path = Path(plan)
    return path.with_name(f"{path.stem}.costs.jsonl.gz")


def save_costs(costs: PlanCosts, path: str | os.PathLike[str]) -> None:
    """Write the file of costs, replacing an older one atomically.

    Raises:
        CostsError: it cannot be written.
    """
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in _lines(costs))
    target, temporary = Path(path), None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(gzip.compress(text.encode("utf-8"), mtime=0))
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise CostsError(f"cannot write {target}: {error.strerror}; free some space") from None


def load_costs(path: str | os.PathLike[str]) -> PlanCosts:
    """Read a file of costs.

    Raises:
        CostsError: it is missing, damaged, or of another version.
    """
    try:
        text = gzip.decompress(Path(path).read_bytes()).decode("utf-8")
        header, *lines = (json.loads(line) for line in text.splitlines())
        if header["schema"] != SCHEMA:
            raise CostsError(f"{path} has schema {header['schema']!r}, this version reads {SCHEMA!r}; {_remedy(path)}")
        found = _read(header, lines)
        found.problem  # noqa: B018 - checks that all belongs together
    except OSError as error:
        raise CostsError(f"cannot read {path}: {error.strerror or error}; {_remedy(path)}") from None
    except (EOFError, zlib.error, LookupError, TypeError, ValueError, AttributeError) as error:
        raise CostsError(f"{path} is damaged ({type(error).__name__}); {_remedy(path)}") from None
    return found


def _remedy(path: object) -> str:
    folder = Path(str(path)).parent
    return f"`layoutsearch tune MODEL --out {folder}` writes it at its end, from the records that are there"


def _lines(costs: PlanCosts) -> Iterator[dict[str, Any]]:
    yield {
        "schema": SCHEMA,
        "fingerprint": costs.fingerprint,
        "target": dict(costs.target),
        "device": dict(costs.device),
        "predicted_by": costs.predicted_by,
    }
    for node in costs.nodes:
        yield {
            "kernel": node.members[0].id,
            "members": [asdict(member) for member in node.members],
            "candidates": {c: _cost_json(us) for c, us in zip(node.choices, node.costs, strict=True)},
        }
    for tensor in costs.tensors:
        yield {
            "tensor": tensor.id,
            "layouts": list(tensor.layouts),
            "producer": tensor.producer,
            "made": list(tensor.made),
            "uses": [[node, list(wanted)] for node, wanted in tensor.uses],
            "transforms": [[source, target, _cost_json(cost)] for (source, target), cost in tensor.moves.items()],
        }


def _cost_json(cost: Cost) -> list[Any]:
    us = round(cost.us, 4) if math.isfinite(cost.us) else None
    return [us, cost.basis, *(round(x, 3) for x in cost.between or ())]


def _read(header: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> PlanCosts:
    nodes = [line for line in lines if "kernel" in line]
    tensors = [line for line in lines if "tensor" in line]
    return PlanCosts(
        header["fingerprint"],
        header["target"],
        header["device"],
        header["predicted_by"],
        tuple(
            CostNode(
                tuple(CostOp(**{**member, "role": Role(member["role"])}) for member in line["members"]),
                tuple(line["candidates"]),
                tuple(_cost(value) for value in line["candidates"].values()),
            )
            for line in nodes
        ),
        tuple(
            CostTensor(
                line["tensor"],
                tuple(line["layouts"]),
                line["producer"],
                tuple(line["made"]),
                tuple((node, tuple(wanted)) for node, wanted in line["uses"]),
                {(source, target): _cost(value) for source, target, value in line["transforms"]},
            )
            for line in tensors
        ),
    )


def _cost(value: Sequence[Any]) -> Cost:
    us, basis, *between = value
    return Cost(math.inf if us is None else float(us), str(basis), (between[0], between[1]) if between else None)
