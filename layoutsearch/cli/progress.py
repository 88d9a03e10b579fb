"""Progress on stderr: what is being measured, the best so far, the time left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from layoutsearch.search.budget import Budget
from layoutsearch.search.reporter import Reporter, Silent

_LINE_S = 30.0
_BAR_COLUMNS = 110


@contextmanager
def reporter_for(console: Console, budget: Budget, quiet: bool) -> Iterator[Reporter]:
    """Bars on a terminal, lines in a log, nothing where `quiet`."""
    if quiet:
        yield Silent()
    elif not console.is_terminal:
        yield LineReporter(console, budget)
    else:
        reporter = BarReporter(console, budget)
        try:
            yield reporter
        finally:
            reporter.stop()


class LineReporter:
    """A `Reporter` for logs: a line for a stage, then one every half minute."""

    def __init__(self, console: Console, budget: Budget) -> None:
        self._console, self._budget = console, budget
        self._stage, self._best = "", ""
        self._done = self._total = 0
        self._next = time.monotonic() + _LINE_S

    def stage(self, name: str, total: int) -> None:
        """See Reporter."""
        self._stage, self._done, self._total = name, 0, total
        self._next = 0.0

    def step(self, what: str, count: int = 1) -> None:
        """See Reporter."""
        self._done += count
        if time.monotonic() >= self._next:
            left = left_text(self._budget)
            parts = (f"{self._stage} {self._done}/{self._total}", left, self._best, what)
            self._line("  ".join(part for part in parts if part))
            self._next = time.monotonic() + _LINE_S

    def best(self, text: str) -> None:
        """See Reporter."""
        self._best = f"best: {text}"

    def note(self, text: str) -> None:
        """See Reporter."""
        self._line(f"note: {text}")

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class BarReporter:
    """A `Reporter` for terminals: a bar for each stage."""

    def __init__(self, console: Console, budget: Budget) -> None:
        self._console, self._budget = console, budget
        fixed = Column(no_wrap=True)
        bar = (BarColumn(bar_width=14),) if console.width >= _BAR_COLUMNS else ()
        self._progress = Progress(
            TextColumn("[bold]{task.fields[stage]}", table_column=fixed),
            *bar,
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True)),
            TextColumn("[green]{task.fields[best]}", table_column=Column(no_wrap=True, ratio=1)),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            console=console,
            expand=True,
        )
        self._task: TaskID | None = None
        self._best = ""

    def stop(self) -> None:
        """Leave the terminal as it was, the bars above the next line."""
        if self._task is not None:
            self._progress.stop()

    def stage(self, name: str, total: int) -> None:
        """See Reporter."""
        if self._task is None:
            self._progress.start()
        else:
            self._progress.stop_task(self._task)
        self._task = self._progress.add_task("", total=total, stage=name, left=left_text(self._budget), best=self._best)

    def step(self, what: str, count: int = 1) -> None:
        """See Reporter."""
        if self._task is not None:
            self._progress.update(self._task, advance=count, description=what, left=left_text(self._budget))

    def best(self, text: str) -> None:
        """See Reporter."""
        self._best = f"best: {text}"
        if self._task is not None:
            self._progress.update(self._task, best=self._best)

    def note(self, text: str) -> None:
        """See Reporter."""
        self._console.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)


def left_text(budget: Budget) -> str:
    """The time left, in words; empty without a deadline."""
    left = budget.left_s
    if left == float("inf"):
        return ""
    seconds = max(0, round(left))
    if seconds < 120:
        return f"{seconds} s left"
    return f"{seconds // 60} min left" if seconds < 7200 else f"{seconds / 3600:.1f} h left"
