"""What a run tells while it goes on; the command line shows it, Python callers may ignore it."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """Receives progress. Every call returns at once."""

    def stage(self, name: str, total: int) -> None:
        """A new stage of `total` steps begins."""

    def step(self, what: str, count: int = 1) -> None:
        """`count` steps are done; `what` is being measured."""

    def best(self, text: str) -> None:
        """The best result so far, in words."""

    def note(self, text: str) -> None:
        """Something the user should know: a failure that was recorded, a decision."""


class Silent:
    """Reports nothing."""

    def stage(self, name: str, total: int) -> None:
        """See Reporter."""

    def step(self, what: str, count: int = 1) -> None:
        """See Reporter."""

    def best(self, text: str) -> None:
        """See Reporter."""

    def note(self, text: str) -> None:
        """See Reporter."""


class NoteKeeper:
    """Passes everything on to another reporter, and keeps the notes."""

    def __init__(self, inner: Reporter) -> None:
        self._inner = inner
        self.notes: list[str] = []

    def stage(self, name: str, total: int) -> None:
        """See Reporter."""
        self._inner.stage(name, total)

    def step(self, what: str, count: int = 1) -> None:
        """See Reporter."""
        self._inner.step(what, count)

    def best(self, text: str) -> None:
        """See Reporter."""
        self._inner.best(text)

    def note(self, text: str) -> None:
        """See Reporter."""
        self.notes.append(text)
        self._inner.note(text)
