"""The record store: every measurement that was made, in one SQLite file that only grows.

Several processes may write at once, and a process may be killed at any moment: SQLite's write-ahead log keeps whole
transactions or nothing.

History of the file format: 1, kernels and models; 2, `workloads` tells what the kernels compute. A file of an older
version is brought up to date when it is opened.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import sqlalchemy as sa

from layoutsearch.errors import LayoutSearchError
from layoutsearch.layout.facts import KernelFacts
from layoutsearch.measure.record_values import KernelRecord, ModelRecord, RecordContext, WorkloadRecord, canonical_json
from layoutsearch.measure.results import Measurement, Status

__all__ = [
    "KernelRecord",
    "ModelRecord",
    "RecordContext",
    "RecordError",
    "RecordStore",
    "WorkloadRecord",
    "canonical_json",
]

SCHEMA_VERSION = 2
_APPLICATION_ID = 0x4C53_5231  # "LSR1"
_BUSY_S = 30.0


class RecordError(LayoutSearchError):
    """The record file cannot be used."""


class _RowError(Exception):
    """A row holds what was never written."""


_metadata = sa.MetaData()


def _context_columns() -> list[sa.Column]:
    return [
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("device", sa.Text, nullable=False),
        sa.Column("cpu", sa.Text, nullable=False),
        sa.Column("threads", sa.Integer, nullable=False),
        sa.Column("tvm", sa.Text, nullable=False),
        sa.Column("template", sa.Text, nullable=False),
    ]


_kernels = sa.Table(
    "kernels",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("workload", sa.Text, nullable=False),
    sa.Column("candidate", sa.Text, nullable=False),
    sa.Column("schedule", sa.Text, nullable=False),
    *_context_columns(),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("samples_us", sa.Text, nullable=False),
    sa.Column("median_us", sa.Float),
    sa.Column("error", sa.Text, nullable=False),
    sa.Column("wall_s", sa.Float, nullable=False),
    sa.Column("warmup", sa.Integer, nullable=False),
    sa.Column("repeat", sa.Integer, nullable=False),
    sa.Column("flush", sa.Boolean, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
    sa.Index("kernels_by_workload", "workload", "candidate", "schedule"),
)
_models = sa.Table(
    "models",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("model", sa.Text, nullable=False, index=True),
    *_context_columns(),
    sa.Column("samples_us", sa.Text, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
)
_workloads = sa.Table(
    "workloads",
    _metadata,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("summary", sa.Text, nullable=False),
    sa.Column("facts", sa.Text, nullable=False),
)


class RecordStore:
    """Append-only store of measurements at `path`; the file is made where there is none. A context manager.

    Raises:
        RecordError: the file is damaged, is of a newer layoutsearch, or is not a record file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordError(f"cannot make the folder of record file {self.path}: {error.strerror}") from None
        url = sa.URL.create("sqlite", database=str(self.path))
        self._engine = sa.create_engine(url, connect_args={"timeout": _BUSY_S})
        sa.event.listen(self._engine, "connect", _configure)
        try:
            with self._errors():
                self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RecordStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._engine.dispose()

    def add(self, *records: KernelRecord) -> None:
        """Append measurements of kernels, all or none of them."""
        rows = []
        for record in records:
            if record.measurement.is_infrastructure:
                raise ValueError(f"{record.measurement.status.value} is no property of a kernel and is not recorded")
            rows.append(_kernel_row(record))
        if rows:
            with self._errors(), self._engine.begin() as connection:
                connection.execute(sa.insert(_kernels), rows)

    def add_models(self, record: ModelRecord) -> None:
        """Append interleaved samples of whole models."""
        samples = {name: list(values) for name, values in record.samples_us.items()}
        row = {
            "model": record.model,
            **_context_row(record.context),
            "samples_us": canonical_json(samples),
            "created": record.created or time.time(),
        }
        with self._errors(), self._engine.begin() as connection:
            connection.execute(sa.insert(_models), [row])

    def add_workloads(self, *records: WorkloadRecord) -> None:
        """Describe workloads, all or none of them; a later description of a key takes the place of an earlier one."""
        rows = [{"key": r.key, "summary": r.summary, "facts": canonical_json(r.facts.to_json())} for r in records]
        if rows:
            with self._errors(), self._engine.begin() as connection:
                connection.execute(sa.insert(_workloads).prefix_with("OR REPLACE"), rows)

    def workload_records(self) -> tuple[WorkloadRecord, ...]:
        """The workloads that are described, by key; measurements of others are from before schema 2."""
        with self._errors(), self._engine.connect() as connection:
            rows = connection.execute(sa.select(_workloads).order_by(_workloads.c.key)).mappings().all()
            return tuple(_workload_record(row) for row in rows)

    def workload_facts(self) -> dict[str, KernelFacts]:
        """Workload key -> what it computes."""
        return {record.key: record.facts for record in self.workload_records()}

    def lookup(
        self, context: RecordContext, workload: str, candidate: str, schedule: str, *, flush: bool = True
    ) -> KernelRecord | None:
        """The latest measurement of exactly this kernel, failures included; None if there is none."""
        query = (
            _select(context, workload=workload, candidate=candidate, flush=flush)
            .where(_kernels.c.schedule == schedule)
            .order_by(_kernels.c.id.desc())
            .limit(1)
        )
        return next(iter(self._kernel_records(query)), None)

    def best(
        self, context: RecordContext, workload: str, candidate: str | None = None, *, flush: bool = True
    ) -> KernelRecord | None:
        """The fastest measurement of a workload, or of one candidate of it; None if none succeeded.

        Of a schedule that was measured more than once, the latest measurement counts.
        """
        latest: dict[tuple[str, str], KernelRecord] = {}
        for record in self.records(context, workload=workload, candidate=candidate, flush=flush):
            latest[record.candidate, record.schedule] = record
        measured = [record for record in latest.values() if record.measurement.ok]
        return min(measured, key=lambda record: record.measurement.median_us, default=None)

    def records(
        self,
        context: RecordContext | None = None,
        *,
        workload: str | None = None,
        candidate: str | None = None,
        flush: bool | None = None,
        after: int | None = None,
        upto: int | None = None,
    ) -> Iterator[KernelRecord]:
        """Measurements of kernels, oldest first; with `after` and `upto`, those from one `mark` to another."""
        query = _select(context, workload=workload, candidate=candidate, flush=flush).order_by(_kernels.c.id)
        if after is not None:
            query = query.where(_kernels.c.id > after)
        if upto is not None:
            query = query.where(_kernels.c.id <= upto)
        return iter(self._kernel_records(query))

    def mark(self) -> int:
        """A number that grows with every measurement of a kernel."""
        with self._errors(), self._engine.connect() as connection:
            return int(connection.execute(sa.select(sa.func.coalesce(sa.func.max(_kernels.c.id), 0))).scalar_one())

    def workloads(self, context: RecordContext | None = None) -> tuple[str, ...]:
        """Workload keys that have records, sorted."""
        query = sa.select(_kernels.c.workload).distinct().order_by(_kernels.c.workload)
        if context is not None:
            query = query.where(*_same_context(_kernels, context))
        with self._errors(), self._engine.connect() as connection:
            return tuple(connection.execute(query).scalars())

    def models(self, context: RecordContext, model: str) -> Iterator[ModelRecord]:
        """Interleaved runs of a model, oldest first."""
        query = (
            sa.select(_models).where(_models.c.model == model, *_same_context(_models, context)).order_by(_models.c.id)
        )
        with self._errors(), self._engine.connect() as connection:
            return iter([_model_record(row) for row in connection.execute(query).mappings().all()])

    def _kernel_records(self, query: sa.Select) -> Sequence[KernelRecord]:
        with self._errors(), self._engine.connect() as connection:
            return [_kernel_record(row) for row in connection.execute(query).mappings().all()]

    def _open(self) -> None:
        """Check that the file is ours and whole, or make it."""
        with self._engine.connect() as connection:
            # One writer at a time makes the tables; the driver would begin a transaction later than that.
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            application = connection.exec_driver_sql("PRAGMA application_id").scalar_one()
            version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
            tables = connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar_one()
            if tables == 0 and application == 0:
                _metadata.create_all(connection)
                connection.exec_driver_sql(f"PRAGMA application_id = {_APPLICATION_ID}")
                connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")
            elif application != _APPLICATION_ID:
                raise RecordError(f"{self.path} is a database of another program; name another record file")
            elif version == 1:
                _workloads.create(connection, checkfirst=True)
                connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")
            elif version != SCHEMA_VERSION:
                raise RecordError(
                    f"{self.path} has record schema {version}, this layoutsearch reads {SCHEMA_VERSION}; "
                    "update layoutsearch, or name another record file"
                )
            connection.commit()
            verdict = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
            if verdict != "ok":
                raise self._damaged(verdict)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except _RowError as error:
            raise self._damaged(str(error)) from None
        except sa.exc.DBAPIError as error:
            text = str(error.orig)
            if "malformed" in text or "not a database" in text or "disk I/O" in text:
                raise self._damaged(text) from None
            raise RecordError(f"record file {self.path}: {text}; check the disk and the permissions") from None

    def _damaged(self, why: str) -> RecordError:
        reason = " ".join(str(why).split())
        return RecordError(
            f"record file {self.path} is damaged or is no record file ({reason}); move it away to start a new one"
        )


def _configure(connection: Any, _: Any) -> None:
    """Settings of each SQLite connection. Changing to the write-ahead log does not wait for other processes."""
    deadline = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except Exception as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    connection.execute("PRAGMA synchronous = NORMAL")


def _context_row(context: RecordContext) -> dict[str, Any]:
    return {name: getattr(context, name) for name in ("target", "device", "cpu", "threads", "tvm", "template")}


def _same_context(table: sa.Table, context: RecordContext) -> list[sa.ColumnElement[bool]]:
    return [table.c[name] == value for name, value in _context_row(context).items()]


def _select(
    context: RecordContext | None, *, workload: str | None, candidate: str | None, flush: bool | None
) -> sa.Select:
    query = sa.select(_kernels)
    if context is not None:
        query = query.where(*_same_context(_kernels, context))
    for column, value in (
        (_kernels.c.workload, workload),
        (_kernels.c.candidate, candidate),
        (_kernels.c.flush, flush),
    ):
        if value is not None:
            query = query.where(column == value)
    return query


def _kernel_row(record: KernelRecord) -> dict[str, Any]:
    measurement = record.measurement
    return {
        "workload": record.workload,
        "candidate": record.candidate,
        "schedule": record.schedule,
        **_context_row(record.context),
        "status": measurement.status.value,
        "samples_us": canonical_json(list(measurement.samples_us)),
        "median_us": measurement.median_us if measurement.ok else None,
        "error": measurement.error,
        "wall_s": measurement.wall_s,
        "warmup": record.warmup,
        "repeat": record.repeat,
        "flush": record.flush,
        "created": record.created or time.time(),
    }


def _context(row: sa.RowMapping) -> RecordContext:
    return RecordContext(row["target"], row["device"], row["cpu"], row["threads"], row["tvm"], row["template"])


@contextmanager
def _row(table: str, row: sa.RowMapping, key: str) -> Iterator[None]:
    """SQLite finds damaged pages; a value that was changed in place is found when it is read."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise _RowError(f"{key} {row[key]!r} of table {table}: {error}") from None


def _times(values: Any) -> tuple[float, ...]:
    times = tuple(map(float, values))
    if not all(0 <= us < math.inf for us in times):
        raise ValueError(f"{values} are no times")
    return times


def _workload_record(row: sa.RowMapping) -> WorkloadRecord:
    with _row("workloads", row, "key"):
        return WorkloadRecord(row["key"], row["summary"], KernelFacts.from_json(json.loads(row["facts"])))


def _kernel_record(row: sa.RowMapping) -> KernelRecord:
    with _row("kernels", row, "id"):
        samples = _times(json.loads(row["samples_us"]))
        measurement = Measurement(Status(row["status"]), samples, row["error"], row["wall_s"])
    return KernelRecord(
        _context(row),
        row["workload"],
        row["candidate"],
        row["schedule"],
        measurement,
        row["warmup"],
        row["repeat"],
        row["flush"],
        row["created"],
    )


def _model_record(row: sa.RowMapping) -> ModelRecord:
    with _row("models", row, "id"):
        samples = {name: _times(values) for name, values in json.loads(row["samples_us"]).items()}
    return ModelRecord(_context(row), row["model"], samples, row["created"])
