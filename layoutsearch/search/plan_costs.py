"""The costs that a run ended with, beside its plan: what a change of it would cost can then be asked without a device.

`plan.costs.jsonl.gz` has one JSON object a line: a header, every kernel with its candidates, and every tensor between
kernels with its transforms. Times are in microseconds, `null` for what does not run; each is measured or predicted.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from layoutsearch.errors import LayoutSearchError
from layoutsearch.layout.kinds import Role
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.search.problem import LayoutProblem, Node, Tensor, Use

SCHEMA = "layoutsearch.costs/1"
MEASURED, EARLY, PREDICTED = "measured", "measured early", "predicted"


class CostsError(LayoutSearchError):
    """The file of costs is missing, damaged, or of another plan."""


@dataclass(frozen=True)
class CostOp:
    """An operator of a kernel, as rules name it."""

    id: str
    name: str
    op: str
    kind: str
    role: Role


@dataclass(frozen=True)
class Cost:
    """A time.

    Attributes:
        us: microseconds, infinite for what does not run.
        basis: `measured`; `measured early`, where not all schedules that may be faster were tried; or `predicted`.
        between: of what is predicted, lowest and highest microseconds at 80 %.
    """

    us: float
    basis: str
    between: tuple[float, float] | None = None


@dataclass(frozen=True)
class CostNode:
    """A kernel: its operators, root first, its candidates as text (empty where it has no choice), and their times."""

    members: tuple[CostOp, ...]
    choices: tuple[str, ...]
    costs: tuple[Cost, ...]


@dataclass(frozen=True)
class CostTensor:
    """A tensor between kernels.

    Attributes:
        id: of the operator that makes it, or the model input.
        layouts: those it may have; the tables below are indices into it, see `search.problem.Tensor`.
        producer: index of the kernel that makes it, None for a model input.
        made: layout made by each candidate of the producer.
        uses: kernel (None for a model output) and the layout that each of its candidates wants.
        moves: time of each transform, by (from, to).
    """

    id: str
    layouts: tuple[str, ...]
    producer: int | None
    made: tuple[int, ...]
    uses: tuple[tuple[int | None, tuple[int, ...]], ...]
    moves: Mapping[tuple[int, int], Cost]


@dataclass(frozen=True)
class PlanCosts:
    """All costs of a run.

    Attributes:
        fingerprint: of the model.
        target: what the kernels are built for.
        device: key, cpu and threads of the device.
        predicted_by: what predicts the times that are not measured, for people.
        nodes: the kernels.
        tensors: between them.
    """

    fingerprint: str
    target: Mapping[str, Any]
    device: Mapping[str, Any]
    predicted_by: str
    nodes: tuple[CostNode, ...]
    tensors: tuple[CostTensor, ...]

    @cached_property
    def problem(self) -> LayoutProblem:
        """The exact problem under these costs."""
        nodes = tuple(Node(n.members[0].id, tuple(c.us for c in n.costs)) for n in self.nodes)
        return LayoutProblem(nodes, tuple(_tensor(t) for t in self.tensors))

    def check(self, plan: LayoutPlan, source: str = "the file of costs") -> None:
        """Raise CostsError unless the costs are of the plan's model, target and device."""
        device = {key: plan.device[key] for key in ("key", "cpu", "threads")}
        for what, have, wanted in (
            ("model", self.fingerprint, plan.fingerprint),
            ("target", dict(self.target), dict(plan.target)),
            ("device", dict(self.device), device),
        ):
            if have != wanted:
                raise CostsError(f"{source} is of another {what} than the plan; {_remedy(source)}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, replacing an older one atomically.

        Raises:
            CostsError: it cannot be written.
        """
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in _lines(self))
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

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PlanCosts:
        """Read the file.

        Raises:
            CostsError: it is missing, damaged, or of another version.
        """
        try:
            text = gzip.decompress(Path(path).read_bytes()).decode("utf-8")
            header, *lines = (json.loads(line) for line in text.splitlines())
            if header["schema"] != SCHEMA:
                raise CostsError(
                    f"{path} has schema {header['schema']!r}, this version reads {SCHEMA!r}; {_remedy(path)}"
                )
            found = _read(header, lines)
            found.problem  # noqa: B018 - checks that all belongs together
        except OSError as error:
            raise CostsError(f"cannot read {path}: {error.strerror or error}; {_remedy(path)}") from None
        except (EOFError, zlib.error, LookupError, TypeError, ValueError, AttributeError) as error:
            raise CostsError(f"{path} is damaged ({type(error).__name__}); {_remedy(path)}") from None
        return found


def costs_path(plan: str | os.PathLike[str]) -> Path:
    """Where the costs of a plan lie: `plan.costs.jsonl.gz` beside `plan.json`."""
    path = Path(plan)
    return path.with_name(f"{path.stem}.costs.jsonl.gz")


def _remedy(path: object) -> str:
    folder = Path(str(path)).parent
    return f"`layoutsearch tune MODEL --out {folder}` writes it at its end, from the records that are there"


def _tensor(tensor: CostTensor) -> Tensor:
    side = len(tensor.layouts)
    matrix = [[0.0 if i == j else math.inf for j in range(side)] for i in range(side)]
    for (source, target), cost in tensor.moves.items():
        matrix[source][target] = cost.us
    uses = tuple(Use(node, wanted) for node, wanted in tensor.uses)
    return Tensor(tensor.id, tensor.producer, tensor.made, uses, tuple(map(tuple, matrix)))


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
