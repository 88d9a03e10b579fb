"""Where studies live: a journal file by default, any database of SQLAlchemy by URL."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy as sa
from optuna.exceptions import OptunaError, StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage

from layoutsearch.measure.results import one_line
from layoutsearch.search.journal import MOVE_AWAY, JournalFile, StorageError

__all__ = ["JOURNAL", "StorageError", "open_storage", "storage_errors"]

JOURNAL = "study.journal"
_BUSY_S = 60
_ATTEMPTS = 5
_PAUSE_S = 0.2
# Package of a driver's module, where it has another name.
_DRIVERS = {
    "psycopg": "'psycopg[binary]'",
    "psycopg2": "psycopg2-binary",
    "pymysql": "PyMySQL",
    "MySQLdb": "mysqlclient",
}


def open_storage(storage: str | None, folder: Path) -> BaseStorage:
    """Open the storage of a study; made where there is none.

    Args:
        storage: path of a journal file, or URL of a database such as `sqlite:///studies.db` or
            `postgresql://user@host/name`; `study.journal` in `folder` if None.
        folder: output folder of the run.

    Raises:
        StorageError: the storage cannot be used.
    """
    if storage is None:
        return _open_journal(folder / JOURNAL)
    if "://" not in storage:
        return _open_journal(Path(storage))
    url = _url(storage)
    options: dict[str, Any] = {"pool_pre_ping": True}
    if url.get_backend_name() == "sqlite":
        options = {"connect_args": {"timeout": _BUSY_S}}
    with quiet():
        try:
            return _open_database(storage, options)
        except (sa.exc.SQLAlchemyError, StorageInternalError) as error:
            why = _why(error)
        except ImportError as error:
            module = getattr(error.__cause__ or error, "name", None) or "its driver"
            why = f"the driver {module} is missing; pip install {_DRIVERS.get(module, module)}"
        except RuntimeError as error:  # made by another version of Optuna, says its text
            why = one_line(error)
    raise StorageError(f"--storage {shown(storage)}: {why}")


def _open_journal(path: Path) -> JournalStorage:
    journal = JournalFile(path)
    try:
        return JournalStorage(journal)
    except (AssertionError, AttributeError, LookupError, OptunaError, TypeError, ValueError):
        # Every line is JSON, and Optuna makes nothing of one.
        raise StorageError(f"{journal.path} is damaged: it has lines that are none of a study; {MOVE_AWAY}") from None


def _open_database(storage: str, options: dict[str, Any]) -> RDBStorage:
    for _ in range(_ATTEMPTS - 1):
        # Of two processes that make the tables at once, the second fails, or finds them half made.
        with contextlib.suppress(sa.exc.IntegrityError, AssertionError), _unless_made_meanwhile():
            return RDBStorage(storage, engine_kwargs=options)
        time.sleep(_PAUSE_S)
    return RDBStorage(storage, engine_kwargs=options)


@contextlib.contextmanager
def _unless_made_meanwhile() -> Iterator[None]:
    try:
        yield
    except sa.exc.DatabaseError as error:
        if "already exists" not in str(error):
            raise


@contextlib.contextmanager
def storage_errors(storage: BaseStorage) -> Iterator[None]:
    """Turns what the database of an open storage complains of into a `StorageError` of one line."""
    try:
        yield
    except StorageInternalError as error:
        url = storage.url if isinstance(storage, RDBStorage) else ""
        raise StorageError(f"--storage {shown(url)}: {_why(error)}") from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Optuna's own progress lines stay away; warnings of it pass."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(before, optuna.logging.WARNING))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def shown(storage: str) -> str:
    """A storage for messages: without its password."""
    try:
        return sa.engine.make_url(storage).render_as_string(hide_password=True)
    except (sa.exc.ArgumentError, ValueError):
        return storage.rpartition("@")[2]


def _url(storage: str) -> sa.URL:
    try:
        url = sa.engine.make_url(storage)
        url.get_dialect()
    except (sa.exc.ArgumentError, sa.exc.NoSuchModuleError, ValueError):
        raise StorageError(
            f"--storage {shown(storage)} is none; expected the path of a journal file, sqlite:///FILE or "
            "postgresql://USER@HOST/DATABASE"
        ) from None
    return url


def _why(error: BaseException) -> str:
    while isinstance(error, StorageInternalError) and error.__cause__ is not None:
        error = error.__cause__
    text = one_line(getattr(error, "orig", None) or error)
    if "locked" in text:
        return f"{text}: another process has held it for {_BUSY_S} s; stop that, or use a journal file"
    if "unable to open" in text:
        return f"{text}; its folder has to exist and be writable"
    return f"{text}; check it, or leave --storage away to use a journal file"
