"""The default storage of a study: Optuna's journal in a file, made safe against processes that are killed.

The format is that of `optuna.storages.journal.JournalFileBackend`, which can read the same file, as optuna-dashboard
does. What differs: a line that a killed process left half written is cut off before anything is appended to it (the
backend of Optuna appends to it, and then cannot read the file any more), and a dead owner's lock is taken at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
import uuid
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optuna.storages.journal import BaseJournalBackend

from layoutsearch.errors import LayoutSearchError
from layoutsearch.search.owner import Owner

# How long a lock may be held by a process nothing is known of, such as one on another machine.
_FOREIGN_GRACE_S = 30.0
_LONGEST_SLEEP_S = 0.05
_TAIL_BYTES = 1 << 16

MOVE_AWAY = "move the file away to start a new study, what was measured is kept in the records"


class StorageError(LayoutSearchError):
    """The storage of a study cannot be used."""


class OwnedLock:
    """A lock between processes that carries its owner: a symbolic link whose text names the process.

    The link has the name that Optuna's own locks use, so both exclude each other. Making a link is atomic on network
    file systems as well. A dead owner's link is removed at once. A link of an owner nothing is known of is removed when
    it has not changed for `grace_s`, as Optuna does.
    """

    def __init__(self, path: Path, grace_s: float = _FOREIGN_GRACE_S) -> None:
        self._journal, self._link, self._grace_s = path, path.with_name(path.name + ".lock"), grace_s

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock; waits as long as its owner lives."""
        mine = json.dumps({**Owner.current().to_json(), "lock": uuid.uuid4().hex})
        try:
            self._acquire(mine)
            yield
        finally:
            # Not if somebody took it from us meanwhile: then it is theirs.
            if self._text() == mine:
                self._link.unlink(missing_ok=True)

    def _acquire(self, mine: str) -> None:
        sleep_s = 0.001
        seen, since = self._state(), time.monotonic()
        while True:
            with contextlib.suppress(FileExistsError):
                os.symlink(mine, self._link)
                return
            state = self._state()
            if state is None:
                continue
            if state != seen:
                seen, since = state, time.monotonic()
            owner = Owner.parse(state[0])
            if owner is None or owner.host != Owner.current().host:
                stale = time.monotonic() - since > self._grace_s
            else:
                stale = owner.dead
            if stale:
                self._remove(state)
                continue
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)

    def _remove(self, state: tuple[str, int, int]) -> None:
        """Remove the link if it is still the one that was seen: of several that wait, one removes it."""
        with open(self._journal, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # the kernel drops it with the process, so it is never stale itself
            if self._state() == state:
                self._link.unlink(missing_ok=True)

    def _text(self) -> str:
        try:
            return os.readlink(self._link)
        except OSError:
            return ""

    def _state(self) -> tuple[str, int, int] | None:
        try:
            stat = os.lstat(self._link)
        except OSError:
            return None
        return self._text(), stat.st_ino, stat.st_mtime_ns


class JournalFile(BaseJournalBackend):
    """A journal in a file; several processes may use it, and any of them may be killed at any moment.

    Args:
        path: of the file; made where there is none.

    Raises:
        StorageError: the file cannot be made or written, or is not a journal.
    """

    def __init__(self, path: Path) -> None:
        # Absolute, since a worker may change its folder.
        self._path = Path(path).absolute()
        self._lock = OwnedLock(self._path)
        # Lines before the mark, and the bytes they take.
        self._mark = (0, 0)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab"):
                pass
            with open(self._path, "rb") as file:
                head = file.read(1)
        except OSError as error:
            raise self._unusable(error) from None
        if head not in (b"", b"{"):
            raise StorageError(
                f"{self._path} is not a journal of a study; for an SQLite file write --storage sqlite:///FILE"
            )
        self._append(b"", durable=False)

    @property
    def path(self) -> Path:
        """Where the journal lies."""
        return self._path

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """The entries from a number on; see BaseJournalBackend.

        Raises:
            StorageError: the file cannot be read, or a line in the middle of it is no entry.
        """
        number, offset = self._mark if log_number_from >= self._mark[0] else (0, 0)
        lines, certain = deque(self._lines(offset)), False
        while lines:
            line = lines.popleft()
            if number >= log_number_from:
                try:
                    entry = json.loads(line)
                except ValueError:
                    if certain:
                        raise self._damaged(number) from None
                    # Perhaps another process cut off a torn line and wrote its own while this one read.
                    with self._lock.held():
                        lines, certain = deque(self._lines(offset)), True
                    continue
                self._mark = (number + 1, offset + len(line))
                yield entry
            number, offset = number + 1, offset + len(line)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append entries, whole or not at all; see BaseJournalBackend.

        Trials that begin or end are on the disk when this returns. Of what is in between, a power cut may take the last
        few, which saves a second for each trial of many parameters; a killed process loses nothing.

        Raises:
            StorageError: the file cannot be written.
        """
        text = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        durable = any("state" in log or "study_name" in log for log in logs)
        self._append(text.encode("utf-8"), durable)

    def _append(self, data: bytes, durable: bool) -> None:
        try:
            with self._lock.held(), open(self._path, "r+b", buffering=0) as file:
                end = _end_of_lines(file.fileno())
                if end != os.fstat(file.fileno()).st_size:
                    file.truncate(end)
                try:
                    _write(file.fileno(), data, end)
                except OSError:
                    file.truncate(end)
                    raise
                if durable:
                    os.fsync(file.fileno())
        except OSError as error:
            raise self._unusable(error) from None

    def _lines(self, offset: int) -> list[bytes]:
        """The whole lines from an offset on."""
        try:
            with open(self._path, "rb") as file:
                file.seek(offset)
                data = file.read()
        except OSError as error:
            raise self._unusable(error) from None
        return [line + b"\n" for line in data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]]

    def _damaged(self, number: int) -> StorageError:
        return StorageError(f"{self._path}: line {number + 1} is damaged; {MOVE_AWAY}")

    def _unusable(self, error: OSError) -> StorageError:
        why = error.strerror or str(error)
        hint = "free some space" if error.errno == errno.ENOSPC else "name another --storage"
        return StorageError(f"cannot use {self._path}: {why}; {hint}")


def _end_of_lines(fd: int) -> int:
    """Bytes up to the end of the last whole line."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - _TAIL_BYTES)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
